"""What runs inside the worker of an environment that brings no vector class of its own. No torch here: workers import it."""

from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector.utils import create_empty_array


class SubEnvironment(gymnasium.Wrapper):
    """One environment of a plain AsyncVectorEnv: picks its own reset options, and rests between its episodes.

    Options that are arrays of one entry per environment are replaced by the own entry. After the end of an episode, and
    before the first, a step returns the last observation and reward 0 without calling the environment.
    """

    def __init__(self, env: gymnasium.Env, number: int) -> None:
        super().__init__(env)
        self.number = number
        nothing = select_rows(create_empty_array(env.observation_space, n=1, fn=np.zeros), 0)
        self._last: tuple[Any, float, bool, bool, dict[str, Any]] = (nothing, 0.0, True, False, {})
        self._resting = True

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        own = {
            name: value[self.number].item() if isinstance(value, np.ndarray) else value
            for name, value in (options or {}).items()
        }
        self._resting = False
        return self.env.reset(seed=seed, options=own)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        if self._resting:
            return self._last
        observation, reward, terminated, truncated, info = self.env.step(action)
        self._resting = bool(terminated or truncated)
        self._last = (observation, 0.0, bool(terminated), bool(truncated), {})
        return observation, reward, terminated, truncated, info


class SubEnvironmentMaker:
    """Makes one SubEnvironment inside its worker; a class, so that it can be sent there."""

    def __init__(self, env_id: str, number: int, env_kwargs: dict[str, Any]) -> None:
        self.env_id, self.number, self.env_kwargs = env_id, number, env_kwargs

    def __call__(self) -> gymnasium.Env:
        return SubEnvironment(gymnasium.make(self.env_id, **self.env_kwargs), self.number)


def select_rows(tree: Any, rows: np.ndarray | int) -> Any:
    """Rows of every array of a batched observation, which may be a nested dict."""
    if isinstance(tree, Mapping):
        return {name: select_rows(value, rows) for name, value in tree.items()}
    return tree[rows]
