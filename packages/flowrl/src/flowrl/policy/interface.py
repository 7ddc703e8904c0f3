"""What flowrl needs from a flow-matching policy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from flowrl.errors import FlowRLError
from flowrl.graphs import GraphCache
from flowrl.prefix import Prefix

ExpertDtype = Literal["float32", "loaded"]
"""Dtype of the trained weights: float32, or that of their file."""
VelocityField = Callable[[Tensor, Tensor], Tensor]
"""Velocity (B, T, D) at x_t (B, T, D) and time (B,)."""


@dataclass(frozen=True)
class FlowSpec:
    """Sizes of a flow-matching policy.

    Attributes:
        num_denoising_steps: K, Euler steps from noise (time 1) to actions (time 0).
        chunk_size: T, targets that one decision predicts.
        n_action_steps: Targets of a chunk that the policy means to be executed, at most T.
        action_dim: A, action size of the environment; these dimensions get noise and are scored.
        padded_action_dim: D >= A, action size of the network. The dimensions above A are carried through the
            denoising, because later steps read them, but get no noise and are not scored (an approximation).
    """

    num_denoising_steps: int
    chunk_size: int
    n_action_steps: int
    action_dim: int
    padded_action_dim: int


class FlowPolicy(ABC):
    """A policy that integrates a velocity field from noise to a chunk of actions.

    Data contract (B = batch, the other sizes are in `spec`):
        observation: a batched Gymnasium observation of numpy arrays,
            {"pixels": {camera: (B, H, W, 3) uint8}, "agent_pos": (B, S) float32 [the environment's units]}.
        tasks: B instruction strings.
        x_t: (B, T, D) float32, the noisy chunk, normalized units. time: (B,) float32, 1 = noise, 0 = actions.
        actions: (B, T, A) float32.

    The module is always in eval mode. Everything that the prefix depends on is frozen, so stored prefixes stay valid.
    """

    spec: FlowSpec
    device: torch.device
    module: nn.Module
    takes_instruction: bool = True
    """Whether `encode` reads the instructions. Where it does not, an environment needs to give none."""
    is_small: bool = False
    """Whether a whole minibatch goes through the velocity field at once, backward pass included, on a CPU too."""
    velocity_mode: str = "exact"
    """How the velocity is computed: "exact", or in another way of the policy's own; see `choose_velocity`."""
    graphs: GraphCache | None = None
    """Replays whole chains as CUDA graphs, where that is possible."""

    @abstractmethod
    def encode(self, observation: Mapping[str, Any], tasks: Sequence[str]) -> Prefix:
        """Runs the frozen part once: observations and instructions -> prefix, on `device`, without gradient."""

    @abstractmethod
    def velocity(self, x_t: Tensor, time: Tensor, prefix: Prefix) -> Tensor:
        """Velocity (B, T, D) float32 at (x_t, time); differentiable in the trainable parameters."""

    def velocity_field(self, prefix: Prefix, repeats: int = 1) -> VelocityField:
        """The velocity as a function of x_t and time alone, with what the prefix determines computed once.

        It holds only until the weights change.

        Args:
            prefix: B encoded observations.
            repeats: R, how many rows of x_t in a row belong to each of them; x_t then has B R rows.
        """
        rows = prefix if repeats == 1 else prefix.repeat_interleave(repeats)
        return lambda x_t, time: self.velocity(x_t, time, rows)

    def choose_velocity(self, mode: str, compile: str = "auto") -> None:
        """Computes the velocity in another way.

        Args:
            mode: "auto" (by the device), "exact" (the library's own operations), or a way of the policy's own.
            compile: "auto", "on" or "off", whether that way is compiled.

        Raises:
            FlowRLError: The policy has no such way.
        """
        if compile == "on":
            raise FlowRLError(f"--compile on: {type(self).__name__} has the exact velocity alone; use auto")
        if mode not in ("auto", "exact"):
            raise FlowRLError(f"--velocity {mode}: {type(self).__name__} has the exact one alone; use auto")

    @property
    def compiled(self) -> bool:
        """Whether its functions are compiled, all of them; see `flowrl.compiled`."""
        return False

    def sampling_batch(self, count: int) -> int:
        """Rows of the batch in which `count` chains are sampled, and rescored as sampled: at least `count`."""
        return count

    @abstractmethod
    def predict_action_chunk(
        self, observation: Mapping[str, Any], tasks: Sequence[str], x_0: Tensor
    ) -> Tensor:
        """The chunk by the policy's own library, for the same x_0 (B, T, D): (B, T, A) in the environment's units, on the CPU."""

    @abstractmethod
    def normalize(self, actions: Tensor) -> Tensor:
        """Actions (B, T, A) in the environment's units -> normalized units."""

    @abstractmethod
    def unnormalize(self, actions: Tensor) -> Tensor:
        """Normalized actions (B, T, A) -> the environment's units, on the CPU."""

    @abstractmethod
    def prefix_features(self, prefix: Prefix) -> Tensor:
        """What the critic reads: (B, F) float32, detached, independent of padding tokens."""

    @abstractmethod
    def trainable_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that an update may change, by their names in `module.named_parameters()`."""

    @abstractmethod
    def save(self, folder: Path | str, *, final_folder: Path | str | None = None) -> None:
        """Writes a complete policy folder that the policy's own library loads unchanged.

        Args:
            folder: An existing, empty folder.
            final_folder: Where the folder will lie in the end, if it is going to be renamed.
        """

    def reload_with_library(
        self, folder: Path | str, observation: Mapping[str, Any], tasks: Sequence[str], x_0: Tensor
    ) -> tuple[Mapping[str, Tensor], Tensor] | None:
        """A saved folder as the policy's own library loads it: its weights by name, and its chunk for x_0.

        None where there is no such library.
        """
        return None
