"""A small Gymnasium environment with chunked actions, which honours what flowrl reads of an environment. No torch here."""

import random
import time
from typing import Any, ClassVar

import gymnasium
import numpy as np

CHUNK_SIZE, ACTION_DIM = 4, 2
SUCCESS_RADIUS = 0.35
NUM_DECISIONS = 3


class ToyReachEnv(gymnasium.Env):
    """A point has to come within 0.35 of a goal in three chunks; the mean of a chunk's targets moves it.

    Observation `agent_pos`: goal minus point, (2,) float32. Action: (4, 2) float32. Reward 1 at success, or with
    `reward="shift"` the mean of joint 0 over the chunk. An episode ends at success (terminated), after three chunks
    (truncated), or with early stop as soon as the point is 3 away.
    """

    metadata: ClassVar[dict[str, Any]] = {
        "render_modes": [],
        "render_fps": 30,
        "reset_options": ("index", "early_stop"),
        "reward_weights": {"success": 1.0},
        "log_metrics": {
            "success": ("success", "mean"),
            "distance_median": ("distance", "median"),
            "success_left": ("success", "mean", ("side", "left")),
        },
    }

    def __init__(self, seconds: float = 20.0, chunk_size: int = CHUNK_SIZE, reward: str = "success") -> None:
        self.observation_space = gymnasium.spaces.Dict(
            {"agent_pos": gymnasium.spaces.Box(-10, 10, (ACTION_DIM,), np.float32)}
        )
        self.action_space = gymnasium.spaces.Box(-5, 5, (chunk_size, ACTION_DIM), np.float32)
        self.reward = reward

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[dict, dict]:
        super().reset(seed=seed)
        options = options or {}
        self.index = int(options.get("index", 0))
        self.early_stop = bool(options.get("early_stop", False))
        rng = np.random.default_rng([seed or 0, self.index])
        self.goal = rng.uniform(-1, 1, ACTION_DIM)
        self.point = np.zeros(ACTION_DIM)
        self.decision = 0
        torch_seed = int(rng.integers(2**63))
        return self._observation(), {
            "task": "reach",
            "index": self.index,
            "seed": seed,
            "torch_seed": torch_seed,
        }

    def step(self, action: np.ndarray) -> tuple[dict, float, bool, bool, dict]:
        if not np.isfinite(action).all():
            raise ValueError("action is not finite")
        self.point = self.point + action.mean(axis=0)
        self.decision += 1
        distance = float(np.linalg.norm(self.goal - self.point))
        success = distance < SUCCESS_RADIUS
        lost = self.early_stop and distance > 3.0
        terminated = bool(success or lost)
        truncated = bool(self.decision >= NUM_DECISIONS and not terminated)
        info: dict[str, Any] = {"is_success": success, "num_executed_frames": 2 if success else len(action)}
        if terminated or truncated:
            side = "left" if self.goal[0] < 0 else "right"
            info["episode_metrics"] = {"success": success, "distance": distance, "side": side}
        reward = float(action[:, 0].mean()) if self.reward == "shift" else float(success)
        return self._observation(), reward, terminated, truncated, info

    def _observation(self) -> dict[str, np.ndarray]:
        return {"agent_pos": (self.goal - self.point).clip(-10, 10).astype(np.float32)}


class BareEnv(gymnasium.Env):
    """An environment of another library: no index, no metrics, no task; raises when stepped after its end."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": []}

    def __init__(self) -> None:
        self.observation_space = gymnasium.spaces.Dict(
            {"agent_pos": gymnasium.spaces.Box(-10, 10, (ACTION_DIM,), np.float32)}
        )
        self.action_space = gymnasium.spaces.Box(-5, 5, (CHUNK_SIZE, ACTION_DIM), np.float32)
        self.ended = True

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[dict, dict]:
        super().reset(seed=seed)
        self.length = int(self.np_random.integers(1, 4))
        self.start = self.np_random.uniform(-1, 1, ACTION_DIM).astype(np.float32)
        self.ended = False
        return {"agent_pos": self.start}, {}

    def step(self, action: np.ndarray) -> tuple[dict, float, bool, bool, dict]:
        if self.ended:
            raise RuntimeError("stepped after the end")
        self.length -= 1
        self.ended = self.length == 0
        return {"agent_pos": self.start}, 1.0, self.ended, False, {"is_success": self.ended}


class DyingEnv(ToyReachEnv):
    """Its process dies in the second step of scene 2."""

    def step(self, action: np.ndarray) -> tuple[dict, float, bool, bool, dict]:
        if self.index == 2 and self.decision == 1:
            import os

            os._exit(3)
        return super().step(action)


class JitterEnv(ToyReachEnv):
    """Resets and steps take up to 30 ms, another time in every run."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[dict, dict]:
        time.sleep(0.03 * random.random())
        return super().reset(seed=seed, options=options)

    def step(self, action: np.ndarray) -> tuple[dict, float, bool, bool, dict]:
        time.sleep(0.03 * random.random())
        return super().step(action)


KWARGS = {"seconds": 20.0, "chunk_size": CHUNK_SIZE, "reward": "success"}
gymnasium.register("ToyReach-v0", entry_point="toy_env:ToyReachEnv", kwargs=KWARGS)
gymnasium.register("ToyBare-v0", entry_point="toy_env:BareEnv")
gymnasium.register("ToyJitter-v0", entry_point="toy_env:JitterEnv", kwargs=KWARGS)
gymnasium.register("ToyDying-v0", entry_point="toy_env:DyingEnv", kwargs=KWARGS)
