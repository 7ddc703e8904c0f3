"""What runs around one environment: a common form of spaces, and a worker's bookkeeping. No torch here: workers import it."""

from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector.utils import create_empty_array


def make_environment(
    env_id: str, env_kwargs: Mapping[str, Any], chunk_size: int, n_action_steps: int
) -> gymnasium.Env:
    """An environment that executes chunks and names its observations, whichever spaces it has by itself.

    A plain state (Box of shape (S,)) is wrapped by `StateObservation`, an action of one target (Box of shape (A,)) by
    `ActionChunks`. Other spaces stay as they are; `vector_env.check_spaces` refuses those that cannot work.
    """
    env = gymnasium.make(env_id, **env_kwargs)
    if is_vector(env.observation_space):
        env = StateObservation(env)
    if is_vector(env.action_space):
        env = ActionChunks(env, chunk_size, n_action_steps)
    return env


def is_vector(space: gymnasium.Space) -> bool:
    """Whether a space is a Box of shape (n,)."""
    return isinstance(space, gymnasium.spaces.Box) and len(space.shape) == 1


class StateObservation(gymnasium.ObservationWrapper):
    """A plain state (S,) becomes {"agent_pos": (S,) float32}."""

    def __init__(self, env: gymnasium.Env) -> None:
        super().__init__(env)
        box = env.observation_space
        state = gymnasium.spaces.Box(
            box.low.astype(np.float32), box.high.astype(np.float32), box.shape, np.float32
        )
        self.observation_space = gymnasium.spaces.Dict({"agent_pos": state})

    def observation(self, observation: np.ndarray) -> dict[str, np.ndarray]:
        return {"agent_pos": np.asarray(observation, dtype=np.float32)}


class ActionChunks(gymnasium.Wrapper):
    """One step executes the first `n_action_steps` targets of a chunk (T, A), each of which is a step of the environment.

    The chunk stops at the first terminal step. The reward is the plain sum of the steps' rewards, not discounted inside
    the chunk, so that an episode's return is the environment's own; gamma discounts from one chunk to the next.
    Targets outside the action space are clipped to it and counted. The observation and `info` are those of the last step;
    `info` also holds `num_executed_frames` and `num_clipped_targets`.
    """

    def __init__(self, env: gymnasium.Env, chunk_size: int, n_action_steps: int) -> None:
        super().__init__(env)
        box = env.action_space
        self._low, self._high, self._dtype = box.low, box.high, box.dtype
        self._n_action_steps = n_action_steps
        self.action_space = gymnasium.spaces.Box(
            np.tile(box.low, (chunk_size, 1)), np.tile(box.high, (chunk_size, 1)), dtype=box.dtype
        )

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        total, executed, num_clipped = 0.0, 0, 0
        for target in np.asarray(action)[: self._n_action_steps]:
            allowed = np.clip(target, self._low, self._high)
            num_clipped += int(np.any(allowed != target))
            observation, reward, terminated, truncated, info = self.env.step(allowed.astype(self._dtype))
            total, executed = total + float(reward), executed + 1
            if terminated or truncated:
                break
        counts = {"num_executed_frames": executed, "num_clipped_targets": num_clipped}
        return observation, total, bool(terminated), bool(truncated), {**info, **counts}


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

    def __init__(
        self, env_id: str, number: int, env_kwargs: dict[str, Any], chunk_size: int, n_action_steps: int
    ) -> None:
        self.env_id, self.number, self.env_kwargs = env_id, number, env_kwargs
        self.chunk_size, self.n_action_steps = chunk_size, n_action_steps

    def __call__(self) -> gymnasium.Env:
        env = make_environment(self.env_id, self.env_kwargs, self.chunk_size, self.n_action_steps)
        return SubEnvironment(env, self.number)


def select_rows(tree: Any, rows: np.ndarray | int) -> Any:
    """Rows of every array of a batched observation, which may be a nested dict."""
    if isinstance(tree, Mapping):
        return {name: select_rows(value, rows) for name, value in tree.items()}
    return tree[rows]
