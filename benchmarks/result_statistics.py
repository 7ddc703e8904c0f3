"""What the tables of `results.py` say of several runs on the same scenes."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

import numpy as np

RESAMPLES, BOOTSTRAP_SEED = 10_000, 0
T_975 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
"""97.5 % quantiles of Student's t by degrees of freedom. Source: any statistical table, e.g. NIST/SEMATECH e-Handbook, 1.3.6.7.2."""


@dataclass(frozen=True)
class Estimate:
    """A mean and its 95 % interval; None where the data do not give one."""

    mean: float
    low: float | None
    high: float | None

    def points(self) -> str:
        """As a difference in percentage points: "+31.0 (+24.0 to +38.0)"."""
        interval = (
            ""
            if self.low is None or self.high is None
            else f" ({100 * self.low:+.1f} to {100 * self.high:+.1f})"
        )
        return f"{100 * self.mean:+.1f}{interval}"


def pooled_difference(runs: Sequence[np.ndarray], others: Sequence[np.ndarray]) -> Estimate:
    """Mean success of `runs` minus that of `others`, all on the same scenes.

    Runs share the scenes, and the start, so their differences are not independent: the interval is the percentile
    interval of a bootstrap over scenes of the mean over runs (Efron and Tibshirani 1993, ch. 13). It holds for these
    runs; what another seed of training would give is `between_runs`.

    Args:
        runs, others: Success of each policy on each scene, bool of shape (num_scenes,).

    Raises:
        ValueError: different numbers of scenes, or none.
    """
    if len({len(success) for success in (*runs, *others)}) != 1 or not len(runs[0]):
        raise ValueError("policies were not evaluated on the same scenes")
    difference = np.mean(runs, axis=0) - np.mean(others, axis=0)
    if len(difference) < 2:
        return Estimate(float(difference.mean()), None, None)
    generator = np.random.default_rng(BOOTSTRAP_SEED)
    means = np.empty(RESAMPLES)
    for first in range(0, RESAMPLES, 1000):
        rows = generator.integers(len(difference), size=(min(1000, RESAMPLES - first), len(difference)))
        means[first : first + len(rows)] = difference[rows].mean(axis=1)
    low, high = np.quantile(means, (0.025, 0.975))
    return Estimate(float(difference.mean()), float(low), float(high))


def between_runs(values: Sequence[float]) -> Estimate:
    """Mean over runs and Student's t interval of it: what further seeds of training may be expected to give."""
    mean = float(np.mean(values))
    if len(values) < 2:
        return Estimate(mean, None, None)
    half = T_975[len(values) - 1] * float(np.std(values, ddof=1)) / sqrt(len(values))
    return Estimate(mean, mean - half, mean + half)


def curve_band(curves: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean of curves of equal length, and the ends of the t interval at each place (NaN for a single curve)."""
    estimates = [between_runs([float(value) for value in column]) for column in np.stack(curves, axis=1)]
    ends = [[np.nan if end is None else end for end in (e.low, e.high)] for e in estimates]
    low, high = np.array(ends).T
    return np.array([e.mean for e in estimates]), low, high
