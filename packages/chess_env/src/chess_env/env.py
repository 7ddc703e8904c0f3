"""The environment: a simulated SO-101 arm picks up one chess piece among others."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

from chess_env import opengl, so101
from chess_env.chunk import check_actions
from chess_env.config import CONTROL_HZ, DEFAULT_PIECES, RENDER_MODES, EnvConfig
from chess_env.errors import ConfigError, EpisodeError
from chess_env.layout import WHITE_INSTRUCTION, check_seed, instruction, torch_seed
from chess_env.options import RESET_OPTIONS, check_options
from chess_env.position import write_placement
from chess_env.rendering import OffscreenRenderer
from chess_env.reward import reward_terms
from chess_env.simulation import Simulation
from chess_env.spaces import (
    CAMERAS,
    MEASURED_MARGIN,
    chunk_space,
    joint_bounds,
    observation_space,
    target_space,
)
from chess_env.state import state_names
from chess_env.task import episode_metrics, log_metrics
from chess_env.view import EpisodeView

RENDER_SIZE = (480, 640)


class ChessPickEnv(gymnasium.Env[dict[str, Any], NDArray[np.float32]]):
    """Pick up the one white chess piece, a pawn or a knight, among 0 to 15 black ones; or, with `task="square"`, the
    piece that the instruction names.

    ## Action
    `Box(low, high, (chunk_size, 6), float32)`: a chunk of absolute joint targets in LeRobot's units, so that a policy
    trained here runs on the real arm. Each target holds for one control frame of 1/30 s; the first `n_action_steps` of
    the chunk are executed, up to the first frame that ends the episode.

    | index | joint         | unit             | min     | max    |
    |-------|---------------|------------------|---------|--------|
    | 0     | shoulder_pan  | deg              | -110.00 | 110.00 |
    | 1     | shoulder_lift | deg              | -100.00 | 100.00 |
    | 2     | elbow_flex    | deg              | -96.83  | 96.83  |
    | 3     | wrist_flex    | deg              | -95.00  | 95.00  |
    | 4     | wrist_roll    | deg              | -157.21 | 157.21 |
    | 5     | gripper       | 0 closed, 100 open | 0.00  | 100.00 |

    At 0, 50 and 100 the finger tips are 3, 75 and 107 mm apart along the jaws' axis. A target outside is clipped to the limits
    and counted in `info["num_clipped_targets"]`; a wrong shape or a value that is not finite is an `ActionError`, before
    anything moves.

    ## Observation
    | key                | shape     | dtype   | what                                                                     |
    |--------------------|-----------|---------|--------------------------------------------------------------------------|
    | pixels/top         | (H, W, 3) | uint8   | RGB of the camera that sees the whole board (`observation="pixels"`)     |
    | pixels/wrist       | (H, W, 3) | uint8   | RGB of the camera on the gripper                                         |
    | environment_state  | (n,)      | float32 | `observation="state"`, in place of the pixels; [m] and unit vectors, saturating at +-2; names in `metadata["environment_state_names"]` |
    | agent_pos          | (6,)      | float32 | measured joint positions, units as in the action; bounds 5 units wider   |

    ## Reward
    The sum of `info["reward_terms"]`, weighted by a `RewardConfig`:

    | term      | "sparse" | "shaped" | paid                                                                               |
    |-----------|----------|----------|------------------------------------------------------------------------------------|
    | `success` | 1.0      | 1.0      | once, when the target has been held 40 mm up for 10 frames                         |
    | `reach`   | 0.0      | 0.2      | for each step: change of a potential, 1 at the grasp point and 0 at 0.4 m from it  |
    | `lift`    | 0.0      | 0.3      | for each step: change of a potential, 0 on the board and 1 when held 40 mm up      |
    | `disturb` | 0.0      | 0.2      | negative, once, when another piece is disturbed                                    |
    | `topple`  | 0.0      | 0.2      | negative, once, when the target falls over                                         |

    ## Start
    A scene is a pure function of `(seed, index)`: `reset(seed=s, options={"index": i})`. `reset(seed=s)` starts at index 0 and
    every bare `reset()` takes the next index. A draw that does not settle is drawn again. The other options are for this
    episode alone; what they leave open is still a function of `(seed, index)`:

    | option         | value  | what                                                                                     |
    |----------------|--------|------------------------------------------------------------------------------------------|
    | `index`        | int    | which scene of the seed                                                                  |
    | `early_stop`   | bool   | in place of the argument                                                                 |
    | `check_expert` | bool   | draw again, up to 20 times, until the scripted expert solves it; `info["expert_ok"]`     |
    | `fen`          | str    | the position: a FEN or its first field; needs the package `chess` (`chess-env[fen]`)     |
    | `square`       | str    | where the target stands ("e4"); with `fen` the piece there is the target, without it one is drawn |

    White's first rank is next to the arm, file a on its left: the arm sits where White's player sits. An unknown option,
    a square that is empty or out of reach, or pieces that the environment does not have, is an `OptionError`.

    | `info`          | what                                                                            |
    |-----------------|---------------------------------------------------------------------------------|
    | seed, index     | the scene                                                                       |
    | piece, square, colour | the target: kind, square, "white" or "black"                              |
    | num_distractors | pieces beside the target                                                        |
    | placement       | the position as the first field of a FEN                                        |
    | task            | the instruction                                                                 |
    | `torch_seed`    | a 63-bit seed for the noise of a policy in this scene                           |
    | expert_ok       | with `check_expert`: whether the expert solved one of the draws                 |

    ## End
    | end         | flag         | when                                                                                   |
    |-------------|--------------|----------------------------------------------------------------------------------------|
    | `success`   | `terminated` | the target is at least 40 mm above where it stood, between both jaws, for 10 frames    |
    | `toppled`   | `terminated` | with `early_stop`: the target leans by more than 45 degrees or has left the board      |
    | `disturbed` | `terminated` | with `early_stop`: another piece moved by more than 10 mm or leans by more than 45 degrees |
    | `unstable`  | `terminated` | a value is NaN or infinite, or MuJoCo gave a warning; never a success                  |
    | `timeout`   | `truncated`  | after `seconds`                                                                        |

    Every step's info has `is_success`, `reward_terms`, `num_executed_frames` and `num_clipped_targets`; the last one also
    `episode_metrics`:

    | measure               | what                                                                                       |
    |-----------------------|--------------------------------------------------------------------------------------------|
    | `success`, `end`      | as above                                                                                   |
    | `clean_lift`          | a success with nothing disturbed                                                           |
    | `disturbed`, `toppled`, `unstable` | whether that happened, the first two also without `early_stop`                |
    | `frames`              | control frames run                                                                         |
    | `closest_mm`          | closest approach of the jaws' grasp point to the target's                                  |
    | `close_lateral_mm`    | sideways error of the jaws when they began to close on the target; None: they never did    |
    | `lift_mm`             | greatest height of the target above where it stood                                         |
    | `return`              | sum of the rewards                                                                         |
    | `piece`               | kind of the target                                                                         |
    | `num_clipped_targets` | numbers of all targets that were outside the limits                                        |

    ## Arguments
    | argument           | default              | what                                                                        |
    |--------------------|----------------------|-----------------------------------------------------------------------------|
    | `chunk_size`       | `50`                 | targets in a chunk                                                          |
    | `n_action_steps`   | `50`                 | how many of them are executed                                               |
    | `seconds`          | `20.0`               | the timeout                                                                 |
    | `image_size`       | `256`                | one size or (height, width) [px]                                            |
    | `distractors`      | `(0, 15)`            | lowest and highest number of pieces beside the target                       |
    | `pieces`           | `('pawn', 'knight')` | kinds of target and others; "all" adds `bishop`, `rook`, `queen` and `king`; "pawn,king" is a list too |
    | `task`             | `'white'`            | "white": the target is the one white piece ("Pick up the white chess piece."); "square": pieces of both colours, and the instruction names kind and square ("Pick up the knight on c3."), as it does for a position in which the target is not the one white piece |
    | `early_stop`       | `False`              | end at once when the target topples or another piece is disturbed           |
    | `observation`      | `'pixels'`           | or "state"                                                                  |
    | `reward`           | `'sparse'`           | "shaped", a dict of weights or a `RewardConfig`                             |
    | `randomization`    | `'default'`          | "none", "wide", a dict of ranges or a `Randomization`: arm start, light, colours of pieces and board, cameras, friction and mass of the pieces, servo gains and joint damping |
    | `physics_timestep` | `1/240`              | [s]; has to divide a frame                                                  |
    | `offsamples`       | `0`                  | anti-aliasing samples (0, 2, 4, 8); 0 keeps images reproducible             |
    | `measure`          | `True`               | False skips `closest_mm`, `close_lateral_mm` and `lift_mm`                  |
    | `robot`            | `None`               | path of an SO-101 MJCF in place of the built-in arm                         |
    | `render_mode`      | `None`               | "rgb_array" (the top camera at 480x640), "human" (MuJoCo's viewer) or "rgb_array_list" |

    With "rgb_array_list" `render()` gives a picture of the start and of every control frame since the last `render()` or
    `reset()`, uint8 (480, 880, 3): the scene with an arrow at the target, and both cameras. A second of them takes 38 MB
    until then.

    A copy made by pickle or deepcopy is a new environment with the same arguments, which needs a reset.

    ## Version history
    - v0: first.

    Raises:
        ConfigError: An argument is unknown or outside what is allowed.
    """

    metadata: dict[str, Any] = {  # noqa: RUF012 - Gymnasium's name and type
        "render_modes": list(RENDER_MODES),
        "render_fps": CONTROL_HZ,
        "reset_options": RESET_OPTIONS,
        "log_metrics": log_metrics(DEFAULT_PIECES),
        "joint_names": so101.JOINT_NAMES,
        "joint_units": ("deg", "deg", "deg", "deg", "deg", "0..100"),
    }

    def __init__(self, *, render_mode: str | None = None, **arguments: Any) -> None:
        if render_mode is not None and render_mode not in RENDER_MODES:
            raise ConfigError(
                f"render_mode={render_mode!r}: allowed are None, {', '.join(map(repr, RENDER_MODES))}"
            )
        self._arguments = {**arguments, "render_mode": render_mode}
        self.config = EnvConfig.from_arguments(**arguments)
        self.render_mode = render_mode
        names = state_names(self.config.distractors[1], self.config.pieces)
        modes = [mode for mode in RENDER_MODES if mode != "human" or opengl.has_display()]
        self.metadata = {
            **type(self).metadata,
            "reward_weights": asdict(self.config.reward),
            "render_modes": modes,
            "log_metrics": log_metrics(self.config.pieces),
            "environment_state_names": names,
        }
        self._low, self._high = joint_bounds()
        self.action_space = self._make_action_space()
        self.observation_space = observation_space(self.config)
        self._simulation = Simulation(self.config)
        self._renderer: OffscreenRenderer | None = None
        self.view = EpisodeView(render_mode, self._simulation)
        white = self.config.task == "white"
        self._task = WHITE_INSTRUCTION if white else "Pick up the <piece> on <square>."
        self._seed: int | None = None
        self._index = -1
        self._return = 0.0
        self._num_clipped = 0
        self._running = False
        self._closed = False

    def _make_action_space(self) -> gymnasium.spaces.Box:
        return chunk_space(self.config.chunk_size)

    # LeRobot reads these names.
    @property
    def task(self) -> str:
        """The instruction of the current scene; before the first reset its form."""
        return self._task

    @property
    def task_description(self) -> str:
        """The same, under LeRobot's name."""
        return self.task

    @property
    def _max_episode_steps(self) -> int:
        """Environment steps until the timeout."""
        return -(-self.config.max_frames // self.config.n_action_steps)

    @property
    def num_frames(self) -> int:
        """Control frames run in the present episode."""
        return self._simulation.episode.frames if self._index >= 0 else 0

    @property
    def simulation(self) -> Simulation:
        """The scene in motion, for scripted agents and tests: privileged, and not part of Gymnasium's interface."""
        return self._simulation

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Begin the episode of (seed, index); see "Start" in the class's manual.

        Raises:
            OptionError: An option is unknown, or a seed or index is not a whole number from 0 to 2**63 - 1.
            RenderingError: No OpenGL for images.
            SceneError: The scene does not settle in any of 20 draws.
        """
        if self._closed:
            raise EpisodeError("the environment is closed: make a new one")
        checked = check_options(options, self.config)
        if seed is not None:
            self._seed, self._index = check_seed(seed), -1
        elif self._seed is None:
            self._seed = int(np.random.SeedSequence().generate_state(1)[0])
        super().reset(seed=self._seed if seed is not None or self._index < 0 else None)
        self._index = self._index + 1 if checked.index is None else checked.index
        self._running = False  # until everything below has worked
        simulation = self._simulation
        simulation.begin(
            self._seed,
            self._index,
            early_stop=self.config.early_stop if checked.early_stop is None else checked.early_stop,
            check_expert=checked.check_expert,
            position=checked.position,
            square=checked.square,
        )
        self._return, self._num_clipped = 0.0, 0
        layout = simulation.layout
        self._task = instruction(layout, self.config.task)
        info: dict[str, Any] = {
            "seed": self._seed,
            "index": self._index,
            "piece": layout.target.kind,
            "square": layout.target.square,
            "colour": layout.target.side,
            "num_distractors": len(layout.distractors),
            "placement": write_placement(layout.pieces),
            "task": self.task,
            "torch_seed": torch_seed(self._seed, self._index),
        }
        if simulation.expert_ok is not None:
            info["expert_ok"] = simulation.expert_ok
        observation = self.observe()
        self.view.begin(self._open_renderer)
        self._running = True
        return observation, info

    def step(self, action: NDArray[np.float32]) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        """Execute a chunk of joint targets, shape (chunk_size, 6), up to the frame that ends the episode.

        Raises:
            ActionError: Another shape, or a value that is not finite.
            EpisodeError: Before reset(), or after the end of the episode.
        """
        if not self._running:
            raise EpisodeError("no episode is running: call reset() before step()")
        targets_given = check_actions(action, self.action_space.shape).reshape(-1, so101.NUM_JOINTS)
        chunk = targets_given[: self.config.n_action_steps]
        allowed = np.clip(chunk, self._low, self._high)
        targets = np.clip(so101.from_units(allowed), so101.JOINT_LOW, so101.JOINT_HIGH)
        episode = self._simulation.episode
        before = episode.reward_state()
        executed = 0
        for target in targets:
            executed += 1
            end = self._simulation.run_frame(target)
            if end == "unstable":
                self._simulation.restore_finite_state()
            self.view.show(self._open_renderer)
            if end is not None:
                break
        terms = reward_terms(before, episode.reward_state(), self.config.reward)
        reward = float(sum(terms.values()))
        num_clipped = int(np.count_nonzero(chunk[:executed] != allowed[:executed]))
        self._return += reward
        self._num_clipped += num_clipped
        info: dict[str, Any] = {
            "is_success": episode.success,
            "reward_terms": terms,
            "num_executed_frames": executed,
            "num_clipped_targets": num_clipped,
        }
        truncated = episode.end == "timeout"
        terminated = episode.end is not None and not truncated
        if episode.end is not None:
            self._running = False
            info["episode_metrics"] = episode_metrics(
                episode,
                self._simulation.measures,
                self._return,
                self._simulation.layout.target.kind,
                self._num_clipped,
            )
        return self.observe(), reward, terminated, truncated, info

    def observe(self) -> dict[str, Any]:
        """The observation of this moment; images are rendered here, once. For scripted agents that drive `simulation`."""
        simulation = self._simulation
        measured = so101.to_units(simulation.data.qpos[: so101.NUM_JOINTS]).astype(np.float32)
        agent_pos = np.clip(measured, self._low - MEASURED_MARGIN, self._high + MEASURED_MARGIN)
        if self.config.observation == "state":
            return {"environment_state": simulation.read_state(), "agent_pos": agent_pos}
        pixels = {name: self._render_camera(name, self.config.image_size) for name in CAMERAS}
        return {"pixels": pixels, "agent_pos": agent_pos}

    def _render_camera(self, camera: str, size: tuple[int, int]) -> NDArray[np.uint8]:
        return self._open_renderer().render(self._simulation.data, camera, size)

    def _open_renderer(self) -> OffscreenRenderer:
        if self._renderer is None:
            size = self.config.image_size
            if self.render_mode in ("rgb_array", "rgb_array_list"):
                size = (max(size[0], RENDER_SIZE[0]), max(size[1], RENDER_SIZE[1]))
            self._renderer = OffscreenRenderer(self._simulation.scene.model, size)
        return self._renderer

    def render(self) -> NDArray[np.uint8] | list[NDArray[np.uint8]] | None:
        """With "rgb_array" the top camera's image, with "rgb_array_list" the pictures since the last call, else None.

        Raises:
            EpisodeError: Before the first reset(), or after close().
            RenderingError: No OpenGL, or no display for "human".
        """
        if self._closed or self._index < 0:
            raise EpisodeError("nothing to render: call reset() first")
        if self.render_mode == "rgb_array":
            return self._render_camera(CAMERAS[0], RENDER_SIZE)
        if self.render_mode == "rgb_array_list":
            return self.view.take_pictures()
        self.view.show(self._open_renderer)
        return None

    def close(self) -> None:
        """Free the OpenGL context and the viewer; may be called more than once."""
        self._closed, self._running = True, False
        if self._renderer is not None:
            self._renderer.close()
            self._renderer = None
        self.view.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self._arguments)


class ChessPickStepEnv(ChessPickEnv):
    """`ChessPickStep-v0`: `ChessPickEnv` with one joint target per step, an action of shape (6,).

    For LeRobot's tools and for libraries without action chunks. Everything else is as in `ChessPickEnv`, without the
    arguments `chunk_size` and `n_action_steps`.
    """

    def __init__(self, *, render_mode: str | None = None, **arguments: Any) -> None:
        given = sorted({"chunk_size", "n_action_steps"} & set(arguments))
        if given:
            raise ConfigError(
                f"{', '.join(given)}: a step is one target here; use ChessPick-v0 for chunks of targets"
            )
        super().__init__(render_mode=render_mode, chunk_size=1, n_action_steps=1, **arguments)
        self._arguments = {**arguments, "render_mode": render_mode}

    def _make_action_space(self) -> gymnasium.spaces.Box:
        return target_space()


def _rebuild(env_class: type[ChessPickEnv], arguments: dict[str, Any]) -> ChessPickEnv:
    return env_class(**arguments)
