"""Toy environments with cameras, for policies that need them. No torch here."""

from typing import Any, ClassVar

import gymnasium
import numpy as np

from toy_env import KWARGS, ToyReachEnv

SIDE = 16


class ToyCameraEnv(ToyReachEnv):
    """The observation also has `pixels`: one image, `top`, (16, 16, 3) uint8, whose brightness tells where the goal is."""

    def __init__(self, seconds: float = 20.0, chunk_size: int = 4, reward: str = "success") -> None:
        super().__init__(seconds, chunk_size, reward)
        image = gymnasium.spaces.Box(0, 255, (SIDE, SIDE, 3), np.uint8)
        self.observation_space = gymnasium.spaces.Dict(
            {
                "agent_pos": self.observation_space["agent_pos"],
                "pixels": gymnasium.spaces.Dict({"top": image}),
            }
        )

    def _observation(self) -> dict:
        state = super()._observation()
        image = np.zeros((SIDE, SIDE, 3), np.uint8)
        image[..., :2] = (127 + 12 * state["agent_pos"]).clip(0, 255).astype(np.uint8)
        return {**state, "pixels": {"top": image}}


gymnasium.register("ToyCamera-v0", entry_point="toy_camera_env:ToyCameraEnv", kwargs=KWARGS)


class ToyArmEnv(gymnasium.Env):
    """Six joints and two cameras that see noise, for a SmolVLA; a pure function of the scene and the actions.

    Action: (50, 6) targets. An episode takes one to three chunks, as the scene says; the reward is the mean target of joint 0.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": [], "reset_options": ("index",)}

    def __init__(self) -> None:
        image = gymnasium.spaces.Box(0, 255, (48, 64, 3), np.uint8)
        self.observation_space = gymnasium.spaces.Dict(
            {
                "agent_pos": gymnasium.spaces.Box(-1000, 1000, (6,), np.float32),
                "pixels": gymnasium.spaces.Dict({"top": image, "wrist": image}),
            }
        )
        self.action_space = gymnasium.spaces.Box(-1000, 1000, (50, 6), np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[dict, dict]:
        super().reset(seed=seed)
        self.rng = np.random.default_rng([seed or 0, int((options or {}).get("index", 0))])
        self.left = int(self.rng.integers(1, 4))
        self.joints = self.rng.normal(size=6).astype(np.float32) * 30
        return self._observation(), {"task": "reach"}

    def step(self, action: np.ndarray) -> tuple[dict, float, bool, bool, dict]:
        self.left -= 1
        self.joints = action[-1]
        return self._observation(), float(action[:, 0].mean()), self.left == 0, False, {"is_success": False}

    def _observation(self) -> dict:
        pixels = {name: self.rng.integers(0, 256, (48, 64, 3), dtype=np.uint8) for name in ("top", "wrist")}
        return {"agent_pos": self.joints.astype(np.float32), "pixels": pixels}


gymnasium.register("ToyArm-v0", entry_point="toy_camera_env:ToyArmEnv")
