"""A wrapper for libraries that take no dictionary inside a dictionary, such as Stable-Baselines3."""

from typing import Any

import gymnasium
from gymnasium import spaces


class FlatObservation(gymnasium.ObservationWrapper):
    """Puts the cameras beside `agent_pos`: `{"top": ..., "wrist": ..., "agent_pos": ...}`, the same arrays.

    With `observation="state"` nothing changes. For actions in [-1, 1] add `gymnasium.wrappers.RescaleAction`.
    """

    def __init__(self, env: gymnasium.Env) -> None:
        super().__init__(env)
        assert isinstance(env.observation_space, spaces.Dict)
        self.observation_space = spaces.Dict(self._flat(env.observation_space.spaces))

    @staticmethod
    def _flat(nested: dict[str, Any]) -> dict[str, Any]:
        outer = {name: value for name, value in nested.items() if name != "pixels"}
        return {**dict(nested.get("pixels", {}).items()), **outer}

    def observation(self, observation: dict[str, Any]) -> dict[str, Any]:
        """The same arrays, one level deep."""
        return self._flat(observation)
