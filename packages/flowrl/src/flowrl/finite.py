"""Rewards and advantages that are not finite are told with their scene, before they reach a record or a weight."""

from collections.abc import Iterable, Sequence

import numpy as np

from flowrl.episode import Episode
from flowrl.errors import FlowRLError


def check_rewards(episodes: Iterable[Episode]) -> None:
    """Raises FlowRLError for a reward, or a sum of an episode's rewards, that is NaN or infinite."""
    for episode in episodes:
        place = f"scene {episode.scene.seed}:{episode.scene.index}"
        for decision, reward in enumerate(episode.rewards):
            if not np.isfinite(reward):
                raise FlowRLError(
                    f"the environment's reward is {reward} in {place}, decision {decision}; rewards must be finite. "
                    "Mend the environment; what was written before is complete"
                )
        if not np.isfinite(episode.return_):
            raise FlowRLError(
                f"the environment's rewards in {place} are too large to be summed: {episode.return_}"
            )


def check_advantages(advantages: np.ndarray, numbers: np.ndarray, episodes: Sequence[Episode]) -> None:
    """Raises FlowRLError for an advantage that is NaN or infinite though the rewards are finite.

    Args:
        advantages: (N,), of all decisions.
        numbers: (N,), the number of each decision's episode.
        episodes: The episodes.
    """
    wrong = np.nonzero(~np.isfinite(advantages))[0]
    if len(wrong) == 0:
        return
    scene = next(e.scene for e in episodes if e.number == numbers[wrong[0]])
    raise FlowRLError(
        f"{len(wrong)} of {len(advantages)} advantages are not finite, the first in scene {scene.seed}:{scene.index}: the "
        "critic has diverged, or read an observation that is not finite. Lower --critic-lr or --reward-scale; the last "
        "checkpoint is good"
    )
