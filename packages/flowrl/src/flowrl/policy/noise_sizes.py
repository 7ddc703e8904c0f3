"""Standard deviations of the exploration noise, one for every denoising step: fixed, trained, or read from the observation."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from flowrl.errors import FlowRLError

HIDDEN = 64
"""Width of the noise head's hidden layer."""


class NoiseSizes(nn.Module, ABC):
    """Where the sizes of the K steps come from; a new kind of noise is one more subclass."""

    needs_features = False

    @abstractmethod
    def forward(self, features: Tensor | None) -> Tensor:
        """Sizes, float32, normalized action units, > 0.

        Args:
            features: (B, F), `FlowPolicy.prefix_features`; read only where `needs_features`.

        Returns:
            (K, 1): one for all joints. (K, A): one for each joint. (B, K, A): also for each observation.
        """


class FixedSizes(NoiseSizes):
    """A schedule that is never trained.

    Args:
        schedule: K sizes.
    """

    schedule: Tensor

    def __init__(self, schedule: Sequence[float]) -> None:
        super().__init__()
        sizes = torch.tensor(schedule, dtype=torch.float64)[:, None]
        self.register_buffer("schedule", sizes.float(), persistent=False)

    def forward(self, features: Tensor | None) -> Tensor:
        """(K, 1)."""
        return self.schedule


class _BoundedSizes(NoiseSizes):
    """Sizes that start exactly at a schedule and stay within [0.5 * its smallest, 1.5 * its largest].

    sigma = low * (high / low)^sigmoid(start + raw): a sigmoid in log sigma, so nothing is clamped and the gradient
    vanishes towards the bounds. raw = 0 is the schedule.
    """

    schedule: Tensor
    start_position: Tensor

    def __init__(self, schedule: Sequence[float], action_dim: int) -> None:
        super().__init__()
        low, high = 0.5 * min(schedule), 1.5 * max(schedule)
        self.log_range = math.log(high / low)
        self.action_dim = action_dim
        sizes = torch.tensor(schedule, dtype=torch.float64)[:, None]
        position = (sizes / low).log() / self.log_range
        self.register_buffer("schedule", sizes.float(), persistent=False)
        self.register_buffer("start_position", position.logit().float(), persistent=False)

    def bounded(self, raw: Tensor) -> Tensor:
        """Unbounded values (..., K, A) -> sizes of the same shape."""
        # Both sigmoids in one shape, so that they round alike and the start is exactly the schedule.
        start = self.start_position.expand_as(raw).contiguous()
        shift = torch.sigmoid(start + raw) - torch.sigmoid(start)
        return self.schedule * torch.exp(self.log_range * shift)


class LearnedSizes(_BoundedSizes):
    """One trained value for every step and joint.

    Args:
        schedule: K sizes, where they start.
        action_dim: A.
    """

    def __init__(self, schedule: Sequence[float], action_dim: int) -> None:
        super().__init__(schedule, action_dim)
        self.raw_sigma = nn.Parameter(torch.zeros(len(schedule), action_dim))

    def forward(self, features: Tensor | None) -> Tensor:
        """(K, A)."""
        return self.bounded(self.raw_sigma)


class HeadSizes(_BoundedSizes):
    """A small network that reads the observation and the step: sigma_k(o) for every joint.

    raw_k(o) = W_2 silu(W_1 layer_norm(f(o)) + e_k), with f(o) the policy's prefix features, detached, and e_k a trained
    vector of step k. W_2 starts at zero, so the noise starts exactly at the schedule, whatever the observation. The first
    weights are the same in every run, and the global random generator is not drawn from.

    Source: Zhang et al. 2025, "ReinFlow: Fine-tuning flow matching policy with online reinforcement learning" (arXiv 2505.22094):
    its noise injection network sigma(t_k, o) is trained with the policy and dropped afterwards. Ours reads the frozen
    VLM's features in place of an encoding of its own, and is bounded in log sigma, as ReinFlow's is by its two ends.

    Args:
        schedule: K sizes, where they start.
        action_dim: A.
        num_features: Width of the prefix features.
    """

    needs_features = True

    def __init__(self, schedule: Sequence[float], action_dim: int, num_features: int) -> None:
        super().__init__(schedule, action_dim)
        self.num_features = num_features
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.norm = nn.LayerNorm(num_features)
            self.observation = nn.Linear(num_features, HIDDEN)
            self.step = nn.Parameter(torch.randn(len(schedule), HIDDEN))
            self.output = nn.Linear(HIDDEN, action_dim)
        nn.init.zeros_(self.output.weight)
        nn.init.zeros_(self.output.bias)

    def forward(self, features: Tensor | None) -> Tensor:
        """(B, K, A).

        Raises:
            FlowRLError: The features are missing or have another width.
        """
        if features is None or features.shape[-1] != self.num_features:
            given = "none" if features is None else features.shape[-1]
            raise FlowRLError(
                f"the noise head reads {self.num_features} features of an observation, got {given}; "
                "use the policy that it was made for"
            )
        seen = self.observation(self.norm(features.detach().float()))
        return self.bounded(self.output(nn.functional.silu(seen[:, None, :] + self.step)))
