"""Numbers that are reported: intervals, paired comparisons, summaries of episodes, explained variance. Pure functions."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import comb, sqrt
from typing import Any

import numpy as np

Z_95 = 1.959963984540054  # two-sided 95 % quantile of the normal distribution


def wilson_interval(successes: int, num_episodes: int, z: float = Z_95) -> tuple[float, float]:
    """Score interval of a success rate, 95 % by default; (0, 1) for no episodes.

    Source: Wilson 1927, "Probable inference, the law of succession, and statistical inference".
    """
    if num_episodes == 0:
        return 0.0, 1.0
    rate = successes / num_episodes
    denominator = 1 + z**2 / num_episodes
    centre = (rate + z**2 / (2 * num_episodes)) / denominator
    half = z / denominator * sqrt(rate * (1 - rate) / num_episodes + z**2 / (4 * num_episodes**2))
    return max(0.0, centre - half), min(1.0, centre + half)


def mean_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """95 % interval of a mean, +- 1.96 standard errors; None for fewer than two values, which say nothing of their spread."""
    if len(values) < 2:
        return None
    mean, half = float(np.mean(values)), Z_95 * float(np.std(values, ddof=1)) / sqrt(len(values))
    return mean - half, mean + half


@dataclass(frozen=True)
class PairedComparison:
    """Two policies on the same scenes: difference of success rates, second minus first."""

    paired_difference: float
    ci95: tuple[float, float]
    mcnemar_p: float
    both: int
    only_first: int
    only_second: int
    neither: int


def paired_difference(first: Sequence[bool], second: Sequence[bool]) -> PairedComparison:
    """Compares success on the same scenes, in the same order.

    The interval is the mean of the differences +- 1.96 standard errors; p is `mcnemar_p` of the unequal pairs.

    Raises:
        ValueError: different or zero lengths.
    """
    if len(first) != len(second) or not first:
        raise ValueError(f"paired comparison of {len(first)} and {len(second)} episodes")
    a, b = np.asarray(first, dtype=bool), np.asarray(second, dtype=bool)
    differences = b.astype(float) - a.astype(float)
    mean = float(differences.mean())
    half = Z_95 * float(differences.std()) / sqrt(len(differences))
    only_first, only_second = int((a & ~b).sum()), int((~a & b).sum())
    return PairedComparison(
        paired_difference=mean,
        ci95=(mean - half, mean + half),
        mcnemar_p=mcnemar_p(only_first, only_second),
        both=int((a & b).sum()),
        only_first=only_first,
        only_second=only_second,
        neither=int((~a & ~b).sum()),
    )


def paired_mean_difference(
    first: Sequence[float], second: Sequence[float]
) -> tuple[float, tuple[float, float] | None]:
    """Mean of second minus first on the same scenes, and its `mean_interval`.

    Raises:
        ValueError: different or zero lengths.
    """
    if len(first) != len(second) or not first:
        raise ValueError(f"paired comparison of {len(first)} and {len(second)} episodes")
    differences = [b - a for a, b in zip(first, second)]
    return float(np.mean(differences)), mean_interval(differences)


def mcnemar_p(only_first: int, only_second: int) -> float:
    """Two-sided exact p of McNemar's test: a fair coin for the pairs that differ. 1 when none does."""
    num_unequal = only_first + only_second
    if num_unequal == 0:
        return 1.0
    tail = sum(comb(num_unequal, i) for i in range(min(only_first, only_second) + 1))
    return min(1.0, 2 * tail / 2**num_unequal)


def explained_variance(values: np.ndarray, returns: np.ndarray) -> float | None:
    """1 - Var(returns - values) / Var(returns): 1 for a perfect critic, 0 for a constant one; None for equal returns."""
    variance = float(np.var(returns))
    return 1.0 - float(np.var(returns - values)) / variance if variance > 0 else None


def spread(name: str, values: np.ndarray) -> dict[str, float]:
    """Mean, standard deviation and extremes of the values, as `<name>_mean`, `_std`, `_min`, `_max`."""
    numbers = {"mean": values.mean(), "std": values.std(), "min": values.min(), "max": values.max()}
    return {f"{name}_{statistic}": float(number) for statistic, number in numbers.items()}


LogMetrics = Mapping[str, Sequence[Any]]
"""log name -> (metric, "mean" or "median") or (metric, reduction, (other metric, its value))."""

_REDUCTIONS: dict[str, Callable[[Sequence[float]], Any]] = {"mean": np.mean, "median": np.median}
SUCCESS_ONLY: LogMetrics = {"success": ("success", "mean")}


def summarize_episodes(
    records: Sequence[Mapping[str, Any]], log_metrics: LogMetrics
) -> dict[str, float | None]:
    """One number for every name in `log_metrics`, as the environment's metadata declares them.

    A metric that is None in an episode, or that the episode does not have, is left out; None where nothing is left.
    """
    summary: dict[str, float | None] = {}
    for name, (metric, reduction, *condition) in log_metrics.items():
        chosen = [r for r in records if not condition or r.get(condition[0][0]) == condition[0][1]]
        values = [float(r[metric]) for r in chosen if r.get(metric) is not None]
        summary[name] = float(_REDUCTIONS[reduction](values)) if values else None
    return summary
