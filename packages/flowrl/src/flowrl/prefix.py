"""What the frozen part of a policy has computed from a batch of observations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


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

    def __getitem__(self, index: int | slice | Sequence[int] | Tensor) -> Prefix:
        """Rows of the batch; the batch dimension stays, also for a single integer."""
        if isinstance(index, int):
            index = [index]
        return self._map(lambda tensor: tensor[index])

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
    def concatenate(prefixes: Sequence[Prefix]) -> Prefix:
        """Joins batches in the order given.

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
        for name in first.tensors:
            parts = [prefix.tensors[name] for prefix in prefixes]
            axis = first.token_axes.get(name)
            if axis is not None:
                length = max(part.shape[axis] for part in parts)
                parts = [_pad_axis(part, axis, length) for part in parts]
            joined[name] = torch.cat(parts)
        return Prefix(joined, first.token_axes)

    def _map(self, function) -> Prefix:
        return Prefix({name: function(tensor) for name, tensor in self.tensors.items()}, self.token_axes)


def _pad_axis(tensor: Tensor, axis: int, length: int) -> Tensor:
    missing = length - tensor.shape[axis]
    if missing == 0:
        return tensor
    shape = list(tensor.shape)
    shape[axis] = missing
    return torch.cat([tensor, tensor.new_zeros(shape)], dim=axis)
