"""What LeRobot needs to know of chess_env: its arguments, its features, and how seeds become scenes."""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import gymnasium
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from lerobot.configs import FeatureType, PolicyFeature
from lerobot.envs.configs import EnvConfig
from lerobot.envs.utils import freeze_after_episode_end
from lerobot.utils.constants import ACTION, OBS_IMAGES, OBS_STATE

import chess_env
from chess_env.config import CONTROL_HZ, DEFAULT_ARGUMENTS
from chess_env.errors import ChessEnvError, ConfigError, OptionError

CAMERAS = ("top", "wrist")
NUM_JOINTS = 6


class ScenesOfOneSeed(gymnasium.Wrapper):
    """Takes the seed of a reset as the index of a scene: `reset(seed=i)` begins the episode of (scene_seed, i)."""

    def __init__(self, env: gymnasium.Env, scene_seed: int) -> None:
        super().__init__(env)
        self.scene_seed = scene_seed

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin the episode of (scene_seed, seed).

        Raises:
            OptionError: No seed is given.
        """
        if seed is None:
            raise OptionError(
                f"scene_seed={self.scene_seed} without a seed: the seed is the index of the first scene, give --seed=0"
            )
        return self.env.reset(seed=self.scene_seed, options={**(options or {}), "index": seed})


def make_one(gym_id: str, arguments: dict[str, Any], scene_seed: int | None) -> gymnasium.Env:
    """One environment with a target per step; `scene_seed` as in `ChessPickEnvConfig`."""
    env = gymnasium.make(gym_id, disable_env_checker=True, **arguments)
    return env if scene_seed is None else ScenesOfOneSeed(env, scene_seed)


@EnvConfig.register_subclass("chess_pick")
@dataclass
class ChessPickEnvConfig(EnvConfig):
    """`--env.type=chess_pick`: `ChessPickStep-v0`, one joint target per step, 30 steps a second.

    | feature      | policy                   | shape     | unit                                     |
    |--------------|--------------------------|-----------|------------------------------------------|
    | pixels/top   | observation.images.top   | (H, W, 3) | uint8 RGB; LeRobot makes it (3, H, W) in [0, 1] |
    | pixels/wrist | observation.images.wrist | (H, W, 3) | the same                                 |
    | agent_pos    | observation.state        | (6,)      | five joints [deg], gripper 0 closed to 100 open |
    | action       | action                   | (6,)      | the same                                 |

    Raises:
        ChessEnvError: An argument is outside what chess_env allows.
    """

    fps: int = CONTROL_HZ
    image_size: int = DEFAULT_ARGUMENTS["image_size"]
    """Height and width of both cameras' images [px]."""
    distractors: tuple[int, int] = DEFAULT_ARGUMENTS["distractors"]
    """Lowest and highest number of pieces beside the target."""
    task: str = DEFAULT_ARGUMENTS["task"]
    """white: the target is the one white piece. square: the instruction names its kind and square."""
    pieces: str = ",".join(DEFAULT_ARGUMENTS["pieces"])
    """Kinds of target and others, separated by commas, or all."""
    randomization: str = DEFAULT_ARGUMENTS["randomization"]
    """How far the scenes vary: none, default or wide."""
    seconds: float = DEFAULT_ARGUMENTS["seconds"]
    """Time limit of an episode [s]."""
    scene_seed: int | None = None
    """None: LeRobot's seed s is scene (s, 0). A number: it is scene (scene_seed, s), as in `flowrl-eval --seed`."""
    features: dict[str, PolicyFeature] = field(default_factory=dict)
    features_map: dict[str, str] = field(
        default_factory=lambda: {
            ACTION: ACTION,
            "agent_pos": OBS_STATE,
            **{f"pixels/{camera}": f"{OBS_IMAGES}.{camera}" for camera in CAMERAS},
        }
    )

    def __post_init__(self) -> None:
        arguments = {name: value for name, value in self.gym_kwargs.items() if name != "render_mode"}
        try:
            height, width = chess_env.EnvConfig.from_arguments(**arguments).image_size
        except ConfigError as error:
            # of a ValueError LeRobot's parser shows no message
            raise ChessEnvError(str(error)) from None
        self.features = {
            ACTION: PolicyFeature(type=FeatureType.ACTION, shape=(NUM_JOINTS,)),
            "agent_pos": PolicyFeature(type=FeatureType.STATE, shape=(NUM_JOINTS,)),
            **{
                f"pixels/{camera}": PolicyFeature(type=FeatureType.VISUAL, shape=(height, width, 3))
                for camera in CAMERAS
            },
        }

    @property
    def package_name(self) -> str:
        """The module that registers the environment with Gymnasium."""
        return chess_env.__name__

    @property
    def gym_id(self) -> str:
        """The environment's id in Gymnasium."""
        return chess_env.CHESS_PICK_STEP_ID

    @property
    def gym_kwargs(self) -> dict[str, Any]:
        """Arguments of `gymnasium.make`."""
        return {
            "image_size": self.image_size,
            "distractors": tuple(self.distractors),
            "task": self.task,
            "pieces": self.pieces if self.pieces == "all" else tuple(self.pieces.split(",")),
            "randomization": self.randomization,
            "seconds": self.seconds,
            "render_mode": "rgb_array",
        }

    def create_envs(self, n_envs: int, use_async_envs: bool = False) -> dict[str, dict[int, VectorEnv]]:
        """One suite with one task: `{"chess_pick": {0: vector environment}}`.

        As in LeRobot's own benchmarks, and unlike the inherited method, an environment whose episode has ended stands
        still until the next rollout; the inherited one would run and render new episodes that nobody counts.
        """
        make = freeze_after_episode_end(partial(make_one, self.gym_id, self.gym_kwargs, self.scene_seed))
        makers = [make] * n_envs
        if use_async_envs and n_envs > 1:
            vector: VectorEnv = AsyncVectorEnv(
                makers, context="forkserver", autoreset_mode=AutoresetMode.NEXT_STEP
            )
        else:
            vector = SyncVectorEnv(makers, autoreset_mode=AutoresetMode.NEXT_STEP)
        return {self.type: {0: vector}}
