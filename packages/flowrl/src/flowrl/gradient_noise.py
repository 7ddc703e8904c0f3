"""Whether an iteration has enough episodes: how much of the policy gradient is signal.

The gradient g of n episodes is a mean of independent contributions, so |g|^2 = |G|^2 + tr(S) / n on average, with G the
gradient of infinitely many episodes and S the covariance of one. Episodes are dealt to M groups with the contributions c_m,
g = mean c_m, which gives estimates without bias:

    noise  = (mean |c_m|^2 - |g|^2) / (M - 1)           of tr(S) / n
    signal = |g|^2 - noise                              of |G|^2
    episodes needed = n * noise / signal                B_simple = tr(S) / |G|^2, the gradient noise scale

With n = B_simple half of |g|^2 is signal; training at that batch size takes about twice the fewest updates and twice the
fewest episodes. Far below it more episodes an iteration cost nothing in episodes; far above they buy little.

Source: McCandlish et al. 2018, "An empirical model of large-batch training", section 2.2 and appendix A.1 (there with two batch
sizes; here n / M and n). As advised there, signal and noise are averaged over iterations before they are divided.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

NUM_GROUPS = 16


@dataclass(frozen=True)
class GradientNoise:
    """Estimates of one iteration; noisy, since they come from one batch.

    Attributes:
        cosine: Between the gradients of the two halves of the groups.
        signal: Estimate of |G|^2; negative when the noise hides it.
        noise: Estimate of tr(S) / n.
        num_episodes: n.
    """

    cosine: float
    signal: float
    noise: float
    num_episodes: int

    @property
    def signal_fraction(self) -> float | None:
        """signal / |g|^2: 1 without noise, about 0 (or below) when the gradient is all noise; None for no gradient."""
        total = self.signal + self.noise
        return self.signal / total if total > 0 else None


def episode_groups(episode: np.ndarray) -> list[np.ndarray]:
    """Deals decisions to groups by their episodes, round robin: an even number of groups, at most `NUM_GROUPS`.

    Args:
        episode: (N,), the number of each decision's episode.

    Returns:
        Indices of decisions, one array a group; empty for fewer than two episodes.
    """
    numbers, rank = np.unique(episode, return_inverse=True)
    num_groups = min(NUM_GROUPS, len(numbers)) // 2 * 2
    return [np.nonzero(rank % num_groups == group)[0] for group in range(num_groups)]


class GradientSums:
    """What the estimates need of the groups' contributions, so that no more than two gradients are kept."""

    def __init__(self) -> None:
        self.halves: list[Tensor] = []
        self.squares: list[Tensor] = []

    def add(self, contribution: Tensor) -> None:
        """Takes c_m, flat: M times the group's part of the gradient."""
        number = len(self.squares)
        self.squares.append(contribution.square().sum())
        if number < 2:
            self.halves.append(contribution)
        else:
            self.halves[number % 2] += contribution

    def estimate(self, num_episodes: int) -> GradientNoise:
        """The estimates; one wait for the device."""
        num_groups = len(self.squares)
        even, odd = self.halves
        values = [((even + odd) / num_groups).square().sum(), torch.stack(self.squares).mean()]
        values.append(torch.nn.functional.cosine_similarity(even, odd, dim=0))
        square, mean_square, cosine = torch.stack(values).tolist()
        noise = (mean_square - square) / (num_groups - 1)
        return GradientNoise(cosine, square - noise, noise, num_episodes)


@dataclass
class NoiseScale:
    """Signal and noise summed over iterations, divided at the end.

    Attributes:
        signal: Sum of the estimates of |G|^2.
        scale: Sum of the estimates of tr(S).
    """

    signal: float = 0.0
    scale: float = 0.0

    def add(self, estimate: GradientNoise) -> None:
        self.signal += estimate.signal
        self.scale += estimate.num_episodes * estimate.noise

    @property
    def episodes_needed(self) -> float | None:
        """tr(S) / |G|^2; None while the signal is not above 0."""
        return self.scale / self.signal if self.signal > 0 else None
