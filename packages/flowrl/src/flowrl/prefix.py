"""What the frozen part of a policy has computed from a batch of observations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch import Tensor

Offload = Literal["auto", "gpu", "cpu"]
RESERVED = 0.25
"""Part of a GPU's memory that `auto` leaves to the update."""


@dataclass(frozen=True)
class Rows:
    """Chosen rows of a batch: as an index on its device, and the same in host memory.

    A prefix in host memory takes the latter. An index on the device would first have to be waited for, with all that is queued
    there before it.

    Attributes:
        index: int64 (rows,), on the device.
        host: The same on the CPU.
    """

    index: Tensor
    host: Tensor

    @classmethod
    def of(cls, rows: Sequence[int] | np.ndarray | Tensor, device: torch.device) -> Rows:
        """From an index on the CPU."""
        host = torch.as_tensor(rows)
        return cls(host.to(device), host)

    def __len__(self) -> int:
        return len(self.host)

    def split(self, size: int) -> list[Rows]:
        """Pieces of at most `size` rows, in order."""
        return [Rows(index, host) for index, host in zip(self.index.split(size), self.host.split(size))]


@dataclass(frozen=True)
class Prefix:
    """A batch of encoded observations: named tensors that share the leading batch dimension.

    It is computed once per decision and stored with it, so that an update never runs the frozen part again. The
    tensors keep the dtype they were used in; storing them in another one would change the likelihoods.

    Attributes:
        tensors: Named tensors, each of shape (B, ...).
        token_axes: The axis that runs over tokens, for the tensors that have one. Batches of different length are
            padded along it with zeros by `concatenate` (a padding mask is then padded with False).

    Raises:
        ValueError: If there is no tensor, or the batch sizes differ.
    """

    tensors: dict[str, Tensor]
    token_axes: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        sizes = {name: tensor.shape[0] for name, tensor in self.tensors.items()}
        if len(set(sizes.values())) != 1:
            raise ValueError(f"the tensors of a prefix must share one batch size, got {sizes}")

    def __len__(self) -> int:
        return next(iter(self.tensors.values())).shape[0]

    def __getitem__(self, index: int | slice | Sequence[int] | Tensor | Rows) -> Prefix:
        """Rows of the batch; the batch dimension stays, also for a single integer."""
        if isinstance(index, int):
            index = [index]
        where = index.index if isinstance(index, Rows) else index
        return self._map(lambda tensor: tensor[where])

    def to(self, device: torch.device | str) -> Prefix:
        """The same prefix on another device, dtypes unchanged."""
        return self._map(lambda tensor: tensor.to(device))

    def repeat_interleave(self, repeats: int) -> Prefix:
        """Every row `repeats` times in a row: (B, ...) -> (B * repeats, ...)."""
        return self._map(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    @property
    def num_bytes(self) -> int:
        """Memory of all tensors [bytes]."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())

    @staticmethod
    def concatenate(
        prefixes: Sequence[Prefix], places: Sequence[Tensor] | None = None, *, consume: bool = False
    ) -> Prefix:
        """Joins batches.

        Args:
            prefixes: The batches.
            places: For each of them where its rows go in the result, see `join_rows`; None: one batch after the other.
            consume: Empty them on the way, so that memory is freed.

        Raises:
            ValueError: If the list is empty, or the prefixes do not hold the same tensors.
        """
        if not prefixes:
            raise ValueError("cannot concatenate an empty list of prefixes")
        first = prefixes[0]
        for other in prefixes[1:]:
            if other.tensors.keys() != first.tensors.keys():
                raise ValueError(f"prefixes differ: {sorted(first.tensors)} and {sorted(other.tensors)}")
        joined = {}
        for name in list(first.tensors):
            parts = [prefix.tensors.pop(name) if consume else prefix.tensors[name] for prefix in prefixes]
            axis = first.token_axes.get(name)
            if axis is not None:
                length = max(part.shape[axis] for part in parts)
                parts = [_pad_axis(part, axis, length) for part in parts]
            joined[name] = torch.cat(parts) if places is None else join_rows(parts, places)
        return Prefix(joined, first.token_axes)

    def _map(self, function) -> Prefix:
        return Prefix({name: function(tensor) for name, tensor in self.tensors.items()}, self.token_axes)


@dataclass(frozen=True)
class HostPrefix(Prefix):
    """A prefix in host memory, pinned where there is a GPU. Rows that are taken are copied to `device`, bit for bit.

    The copy is queued on the device, and the host goes on meanwhile. Rows that are chosen by a tensor on the device have to
    wait for it first; `Rows` do not.
    """

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def __getitem__(self, index: int | slice | Sequence[int] | Tensor | Rows) -> Prefix:
        if isinstance(index, Rows):
            index = index.host
        if isinstance(index, slice):
            rows = {name: tensor[index] for name, tensor in self.tensors.items()}
        else:
            chosen = torch.as_tensor([index] if isinstance(index, int) else index).cpu()
            rows = {name: _gather(tensor, chosen) for name, tensor in self.tensors.items()}
        moved = {name: tensor.to(self.device, non_blocking=True) for name, tensor in rows.items()}
        return Prefix(moved, self.token_axes)


class PrefixStore:
    """The prefixes of a rollout, round by round, until they are joined for the update.

    With `auto` they stay on the GPU while its free memory is at least what is kept already, because joining makes a second
    copy, and a quarter of the whole; otherwise all of them go to host memory.

    Args:
        offload: Where they wait.
        device: The policy's. On a CPU `offload` has no effect.
        memory: Free and whole memory of the device [bytes].
    """

    def __init__(
        self,
        offload: Offload,
        device: torch.device,
        memory: Callable[[torch.device], tuple[int, int]] | None = None,
    ) -> None:
        self.device, self.memory = device, memory or _device_memory
        self.on_host = offload == "cpu" and device.type == "cuda"
        self._may_move = offload == "auto" and device.type == "cuda"
        self._parts: list[Prefix] = []
        self._num_bytes = 0

    def add(self, prefix: Prefix) -> None:
        """Keeps one round's prefix."""
        self._num_bytes += prefix.num_bytes
        self._parts.append(_to_host(prefix) if self.on_host else prefix)
        if self._may_move and not self.on_host:
            free, whole = self.memory(self.device)
            if free < max(self._num_bytes, RESERVED * whole):
                self.on_host = True
                for number, part in enumerate(self._parts):
                    self._parts[number] = _to_host(part)

    def join(self, places: Sequence[Tensor] | None = None) -> Prefix:
        """All prefixes as one; the store is empty then. Pieces are freed tensor by tensor.

        Args:
            places: For each round where its rows go, see `join_rows`; None: in the order they were added.

        Raises:
            ValueError: If there is none, or they do not hold the same tensors.
        """
        parts, self._parts, self._num_bytes = self._parts, [], 0
        if self.on_host and self._may_move:
            self.on_host = False  # the next rollout is judged anew
        joined = Prefix.concatenate(parts, places, consume=True)
        homes = {part.device for part in parts if isinstance(part, HostPrefix)}
        if not homes:
            return joined
        return HostPrefix(_pinned(joined.tensors), joined.token_axes, homes.pop())


def join_rows(parts: Sequence[Tensor], places: Sequence[Tensor]) -> Tensor:
    """Row i of part p becomes row places[p][i] of the result, on the parts' device.

    Args:
        parts: Tensors of shape (B_p, ...), of one dtype.
        places: int64 (B_p,) each; together every row from 0 to the last once.
    """
    joined = parts[0].new_empty((sum(len(part) for part in parts), *parts[0].shape[1:]))
    for part, rows in zip(parts, places, strict=True):
        joined[rows.to(joined.device)] = part
    return joined


def _device_memory(device: torch.device) -> tuple[int, int]:
    free, whole = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free + unused, whole


def _to_host(prefix: Prefix) -> HostPrefix:
    device = next(iter(prefix.tensors.values())).device
    return HostPrefix(
        {name: tensor.to("cpu", copy=True) for name, tensor in prefix.tensors.items()},
        prefix.token_axes,
        device,
    )


def _pinned(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    if not torch.cuda.is_available():
        return dict(tensors)
    return {name: tensor.pin_memory() for name, tensor in tensors.items()}


def _gather(tensor: Tensor, index: Tensor) -> Tensor:
    out = tensor.new_empty((len(index), *tensor.shape[1:]), pin_memory=torch.cuda.is_available())
    return torch.index_select(tensor, 0, index, out=out)


def _pad_axis(tensor: Tensor, axis: int, length: int) -> Tensor:
    missing = length - tensor.shape[axis]
    if missing == 0:
        return tensor
    shape = list(tensor.shape)
    shape[axis] = missing
    return torch.cat([tensor, tensor.new_zeros(shape)], dim=axis)
