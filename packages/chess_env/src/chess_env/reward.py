"""The reward: a weighted sum of named terms, each a pure function of two snapshots of the task.

Shaping is potential-based, `F = discount * potential(s') - potential(s)` with a potential of zero after a terminal
state, so that it changes no policy's rank and cannot be farmed.

Source: Ng, Harada, Russell, "Policy invariance under reward transformations" (1999), theorem 1.
"""

from dataclasses import dataclass

from chess_env.config import RewardConfig

REACH_RANGE_M = 0.40  # the far side of the board from the home pose: the reach potential is 0 there
LIFT_RANGE_M = 0.04  # the height of a success: the lift potential is 1 there

TERM_NAMES = ("success", "reach", "lift", "disturb", "topple")


@dataclass(frozen=True)
class RewardState:
    """What the reward reads of one moment.

    Attributes:
        distance_m: Distance of the jaws' grasp point from the target's grasp point [m].
        held_height_m: Height of the target above where it stood while both jaws hold it [m], else 0.
        success: The target was lifted and held long enough.
        disturbed: A distractor was moved too far or fell, now or earlier in this episode.
        toppled: The target fell over, now or earlier in this episode.
        terminal: The episode ended here by itself (a timeout is not such an end).
    """

    distance_m: float
    held_height_m: float
    success: bool
    disturbed: bool
    toppled: bool
    terminal: bool


def reach_potential(state: RewardState) -> float:
    """1 at the grasp point, 0 at `REACH_RANGE_M` and farther."""
    return 1.0 - min(max(state.distance_m, 0.0), REACH_RANGE_M) / REACH_RANGE_M


def lift_potential(state: RewardState) -> float:
    """0 on the board or not held, 1 when held `LIFT_RANGE_M` above it and higher."""
    return min(max(state.held_height_m, 0.0), LIFT_RANGE_M) / LIFT_RANGE_M


def potential_term(before: float, after: float, discount: float, terminal: bool) -> float:
    """`discount * after - before`, where the potential after a terminal state is 0."""
    return (0.0 if terminal else discount * after) - before


def reward_terms(before: RewardState, after: RewardState, config: RewardConfig) -> dict[str, float]:
    """Weighted terms of one environment step, by name; their sum is the reward.

    `success`, `disturb` and `topple` are paid once, at the step where they first hold.
    """
    reach = potential_term(reach_potential(before), reach_potential(after), config.discount, after.terminal)
    lift = potential_term(lift_potential(before), lift_potential(after), config.discount, after.terminal)
    return {
        "success": config.success * float(after.success and not before.success),
        "reach": config.reach * reach if config.reach else 0.0,
        "lift": config.lift * lift if config.lift else 0.0,
        "disturb": -config.disturb if after.disturbed and not before.disturbed else 0.0,
        "topple": -config.topple if after.toppled and not before.toppled else 0.0,
    }
