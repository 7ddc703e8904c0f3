"""Range of the commanded actions against the action space's: a policy that hardly moves, or that is pressed against its limits."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from flowrl.episode import Episode

LOW_COVERAGE, STILL = 0.05, 0.01
"""A joint is still when it covers less than this part of its range over all episodes, and spreads less within a typical one."""
SATURATED = 0.2
"""Part of a joint's targets at a limit from which on that is told."""
AT_LIMIT = 1e-3
"""A target this near to a limit, as a part of the range, or beyond it, is at the limit."""


@dataclass(frozen=True)
class JointRange:
    """One joint's executed targets over all episodes, in the environment's units.

    Attributes:
        joint: Its number, from 0.
        low, high: Limits of the action space; None where it has none, and then the shares are None too.
        min, max: Of the targets.
        coverage: (max - min) / (high - low).
        spread: Standard deviation within an episode, as a part of the range; the median over episodes.
        at_limits: Share of the targets at a limit.
    """

    joint: int
    low: float | None
    high: float | None
    min: float
    max: float
    coverage: float | None
    spread: float | None
    at_limits: float | None

    @property
    def still(self) -> bool:
        """It hardly moves."""
        return (
            self.coverage is not None
            and self.spread is not None
            and self.coverage < LOW_COVERAGE
            and self.spread < STILL
        )

    @property
    def saturated(self) -> bool:
        """It is at a limit too often."""
        return self.at_limits is not None and self.at_limits > SATURATED


def executed_targets(episodes: Iterable[Episode]) -> list[np.ndarray]:
    """The targets of each episode that ran, float32 (targets, A)."""
    return [
        np.concatenate([chunk[:count] for chunk, count in zip(episode.actions, episode.num_executed)])
        for episode in episodes
    ]


def joint_ranges(targets: Sequence[np.ndarray], low: np.ndarray, high: np.ndarray) -> list[JointRange]:
    """Every joint's range.

    Args:
        targets: Of each episode, (targets, A), at least one.
        low, high: Limits of a target, (A,); infinite where there is none.
    """
    everything = np.concatenate(targets).astype(np.float64)
    ranges = []
    for joint, (bottom, top) in enumerate(zip(low.astype(np.float64), high.astype(np.float64))):
        values = everything[:, joint]
        size = float(top - bottom)
        known = np.isfinite(size) and size > 0
        margin = AT_LIMIT * size
        ranges.append(
            JointRange(
                joint=joint,
                low=float(bottom) if np.isfinite(bottom) else None,
                high=float(top) if np.isfinite(top) else None,
                min=float(values.min()),
                max=float(values.max()),
                coverage=float(np.ptp(values)) / size if known else None,
                spread=float(np.median([t[:, joint].std(dtype=np.float64) for t in targets])) / size
                if known
                else None,
                at_limits=float(((values <= bottom + margin) | (values >= top - margin)).mean())
                if known
                else None,
            )
        )
    return ranges


def warn_of_ranges(ranges: Sequence[JointRange]) -> list[str]:
    """A line for each problem: joints that hardly move, joints that are pressed against a limit."""
    lines = []
    if still := [r for r in ranges if r.still]:
        who = "the policy hardly moves" if len(still) == len(ranges) else f"{_joints(still)} hardly moves"
        lines.append(
            f"warning: {who}: its targets cover {_shares(r.coverage for r in still)} of the range in all episodes "
            f"together, below {LOW_COVERAGE:.0%}; compare with zero actions, and look at normalization, units and cameras"
        )
    if pressed := [r for r in ranges if r.saturated]:
        lines.append(
            f"warning: {_joints(pressed)} is at a limit of the action space in {_shares(r.at_limits for r in pressed)} of its "
            f"targets, above {SATURATED:.0%}; look at normalization and units of the actions"
        )
    return lines


def describe_ranges(ranges: Sequence[JointRange]) -> str:
    """One line: what part of each joint's range the targets cover; empty where no range is known."""
    known = [r.coverage for r in ranges if r.coverage is not None]
    return f"actions cover {_shares(known)} of the joints' ranges" if known else ""


def _joints(ranges: Sequence[JointRange]) -> str:
    return ("joint " if len(ranges) == 1 else "each of joints ") + ", ".join(str(r.joint) for r in ranges)


def _shares(values: Iterable[float | None]) -> str:
    return ", ".join(f"{value:.1%}" for value in values if value is not None)
