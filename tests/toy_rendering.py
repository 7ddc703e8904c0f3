"""The toy environment with pictures whose grey level counts: 20 at the start, 5 more with every picture."""

from typing import Any, ClassVar

import gymnasium
import numpy as np

from toy_env import KWARGS, ToyReachEnv

FIRST_GREY, GREY_STEP, SIZE = 20, 5, (31, 46)


def picture(number: int) -> np.ndarray:
    """The episode's picture of this number, from 0."""
    return np.full((*SIZE, 3), FIRST_GREY + GREY_STEP * number, np.uint8)


class ToyStepPictureEnv(ToyReachEnv):
    """Renders "rgb_array": a step is a picture."""

    metadata: ClassVar[dict[str, Any]] = {
        **ToyReachEnv.metadata,
        "render_modes": ["rgb_array"],
        "render_fps": 10,
    }

    def __init__(self, render_mode: str | None = None, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.render_mode = render_mode

    def render(self) -> np.ndarray:
        return picture(self.decision)


class ToyFramePicturesEnv(ToyStepPictureEnv):
    """Renders "rgb_array_list": every executed target of a chunk is a picture."""

    metadata: ClassVar[dict[str, Any]] = {**ToyReachEnv.metadata, "render_modes": ["rgb_array_list"]}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[dict, dict]:
        result = super().reset(seed=seed, options=options)
        self.frames, self.pictures = 0, [picture(0)]
        return result

    def step(self, action: np.ndarray) -> tuple[dict, float, bool, bool, dict]:
        result = super().step(action)
        for _ in range(result[-1]["num_executed_frames"]):
            self.frames += 1
            self.pictures.append(picture(self.frames))
        return result

    def render(self) -> list[np.ndarray]:  # type: ignore[override]
        pictures, self.pictures = self.pictures, []
        return pictures


class ForgetfulEnv(ToyStepPictureEnv):
    """No function of seed and actions: every environment starts elsewhere."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[dict, dict]:
        _, info = super().reset(seed=seed, options=options)
        self.goal = np.random.default_rng().uniform(-1, 1, 2)
        return self._observation(), info


gymnasium.register("ToyStepPicture-v0", entry_point="toy_rendering:ToyStepPictureEnv", kwargs=KWARGS)
gymnasium.register("ToyFramePictures-v0", entry_point="toy_rendering:ToyFramePicturesEnv", kwargs=KWARGS)
gymnasium.register("ToyForgetful-v0", entry_point="toy_rendering:ForgetfulEnv", kwargs=KWARGS)
