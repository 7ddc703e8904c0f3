"""One complete episode of a rollout or an evaluation."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from flowrl.scenes import Scene


@dataclass
class Episode:
    """One complete episode.

    `rewards`, `num_executed` (targets of the chunk that ran before the episode ended) and `actions` (the chunk, float32
    (T, A), in the environment's units) have an entry per decision.
    `metrics` is the environment's `info["episode_metrics"]`; `final_features` (F,) are the critic's features of the last
    observation, kept for truncated episodes that are bootstrapped.
    """

    number: int
    scene: Scene
    task: str
    torch_seed: int
    reset_info: dict[str, Any]
    rewards: list[float] = field(default_factory=list)
    num_executed: list[int] = field(default_factory=list)
    actions: list[np.ndarray] = field(default_factory=list)
    terminated: bool = False
    truncated: bool = False
    metrics: dict[str, Any] = field(default_factory=dict)
    final_features: Tensor | None = None

    @property
    def return_(self) -> float:
        """Undiscounted sum of the rewards."""
        return float(sum(self.rewards))

    def record(self) -> dict[str, Any]:
        """What is reported of the episode: scene, length, return, and the environment's own metrics."""
        own = {
            "index": self.scene.index,
            "seed": self.scene.seed,
            "decisions": len(self.rewards),
            "return": self.return_,
        }
        about: dict[str, Any] = {
            name: self.reset_info[name] for name in ("piece", "square", "task") if name in self.reset_info
        }
        return {**own, **about, **self.metrics}
