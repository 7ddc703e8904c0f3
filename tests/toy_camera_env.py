"""The toy environment with a camera, for policies that need one. No torch here."""

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
