"""Environments with plain spaces, as Gymnasium's classics have them: a state and one target a step. No torch here."""

from typing import Any

import gymnasium
import numpy as np


class CountEnv(gymnasium.Env):
    """Observes (steps, sum of targets, last target); the reward is the target itself. Terminates at the sum 3."""

    def __init__(self, actions: str = "box", images: bool = False) -> None:
        shape = (8, 8, 3) if images else (3,)
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, shape, np.float64)
        box = gymnasium.spaces.Box(np.array([-1.0]), np.array([2.0]), dtype=np.float64)
        self.action_space = box if actions == "box" else gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict]:
        super().reset(seed=seed)
        self.steps, self.sum, self.last = 0, 0.0, 0.0
        return self._observation(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        assert self.action_space.contains(action)
        self.last = float(np.sum(action))
        self.steps, self.sum = self.steps + 1, self.sum + self.last
        return self._observation(), self.last, self.sum >= 3, False, {"steps": self.steps}

    def _observation(self) -> np.ndarray:
        return np.broadcast_to([self.steps, self.sum, self.last], self.observation_space.shape).copy()


def make_vector(num_envs: int, **_: Any) -> gymnasium.vector.SyncVectorEnv:
    return gymnasium.vector.SyncVectorEnv([CountEnv] * num_envs)


gymnasium.register("ToyCount-v0", entry_point="toy_classic:CountEnv", max_episode_steps=5)
gymnasium.register(
    "ToyCountVector-v0", entry_point="toy_classic:CountEnv", vector_entry_point="toy_classic:make_vector"
)
