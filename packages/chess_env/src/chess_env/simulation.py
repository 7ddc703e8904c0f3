"""One scene in motion: builds the scene of (seed, index), steps it frame by frame, and redraws what is unusable."""

from dataclasses import replace

import mujoco
import numpy as np
from numpy.typing import NDArray

from chess_env import board, so101
from chess_env.config import EnvConfig, Randomization
from chess_env.errors import SceneError
from chess_env.expert import Expert, ExpertConfig
from chess_env.layout import Layout, PieceLayout, Variation, draw_layout
from chess_env.looks import Looks
from chess_env.pieces import BLACK_RGBA, WHITE_RGBA
from chess_env.position import PositionPiece
from chess_env.scene import ChessScene, Placement, build_scene
from chess_env.state import read_state
from chess_env.task import End, Episode, Measures, Snapshot, take_snapshot

MAX_ATTEMPTS = 20
SETTLE_S = 0.3
SETTLED_OFFSET_M = 0.002  # a settled piece is this near to where it was put
SETTLED_UPRIGHT = 0.995
SETTLED_SPEED = 0.05  # of the pieces, [m/s] and [rad/s]


class Simulation:
    """The compiled scene and its state. Compiling waits for the first `begin`.

    Attributes:
        layout: The scene that stands now.
        episode: Its progress.
        measures: Its distances, None when `config.measure` is off.
        expert_ok: Whether the expert solved it; None when that was not asked.
    """

    layout: Layout
    episode: Episode
    measures: Measures | None = None
    expert_ok: bool | None = None

    def __init__(self, config: EnvConfig) -> None:
        self.config = config
        self._scene: ChessScene | None = None
        self._data: mujoco.MjData | None = None
        self._expert: Expert | None = None
        self._steps_per_frame = config.physics_steps_per_frame
        self.target_slot = 0
        self.distractor_slots: tuple[int, ...] = ()
        self._distractor_bodies: NDArray[np.intp] = np.empty(0, np.intp)

    @property
    def scene(self) -> ChessScene:
        """The compiled scene, compiled when it is first asked for."""
        if self._scene is None:
            self._scene = build_scene(
                num_distractors_max=self.config.distractors[1],
                kinds=self.config.pieces,
                physics_timestep=self.config.physics_timestep,
                image_size=self.config.image_size,
                offsamples=self.config.offsamples,
                robot=self.config.robot,
            )
            self._data = mujoco.MjData(self._scene.model)
        return self._scene

    @property
    def data(self) -> mujoco.MjData:
        """The state."""
        _ = self.scene
        assert self._data is not None
        return self._data

    def begin(
        self,
        seed: int,
        index: int,
        early_stop: bool,
        check_expert: bool = False,
        position: tuple[PositionPiece, ...] | None = None,
        square: str | None = None,
    ) -> None:
        """Build the scene of (seed, index), with the pieces of `position` and the target on `square` if given, and let
        it settle.

        A scene that does not settle, or with `check_expert` one that the expert does not solve, is drawn again, up to
        20 times in an order that (seed, index) alone decides. If the expert solves none, the first that settled stands
        and `expert_ok` is False.

        Raises:
            SceneError: No draw settles.
        """
        config = self.config
        fallback: Layout | None = None
        for attempt in range(MAX_ATTEMPTS):
            layout = draw_layout(
                seed, index, config.distractors, attempt,
                kinds=config.pieces, task=config.task, position=position, square=square,
            )  # fmt: skip
            if not self._place(layout, early_stop):
                continue
            if not check_expert:
                self.expert_ok = None
                return
            fallback = fallback or layout
            if self._expert_solves():
                self._place(layout, early_stop)
                self.expert_ok = True
                return
        if fallback is None:
            raise SceneError(
                f"no scene of seed {seed}, index {index} settles in {MAX_ATTEMPTS} draws: "
                "use another index, or a physics_timestep of 1/240"
            )
        self._place(fallback, early_stop)
        self.expert_ok = False

    def restart(self, arm_qpos: NDArray[np.float64], early_stop: bool = False) -> None:
        """Stand the present layout up again with the arm somewhere else, and begin its episode anew.

        Args:
            arm_qpos: Joint angles [rad], shape (6,), inside the limits.
            early_stop: End the episode when the target topples or a distractor is disturbed.

        Raises:
            SceneError: The arm starts inside a piece, so that the scene does not settle.
        """
        if not self._place(self.layout, early_stop, arm_qpos):
            raise SceneError(
                f"the scene does not settle with the arm at {np.round(arm_qpos, 3).tolist()} rad: start it elsewhere"
            )

    def run_frame(self, target: NDArray[np.float64]) -> End | None:
        """Hold one joint target [rad], shape (6,), for one control frame; says how the episode ended, if it did."""
        if self.measures is not None:
            self.measures.before_frame(float(target[5]))
        self.data.ctrl[self.scene.actuator_ids] = target
        mujoco.mj_step(self.scene.model, self.data, self._steps_per_frame)
        end = self.episode.update(self.take_snapshot(self.episode.start))
        if self.measures is not None and end != "unstable":
            self.measures.after_frame(self.episode)
        return end

    def take_snapshot(self, start: Snapshot | None) -> Snapshot:
        """The task's state now."""
        return take_snapshot(self.scene, self.data, self.target_slot, self._distractor_bodies, start)

    def read_state(self) -> NDArray[np.float32]:
        """The privileged state now, as a vector; see `state_names`."""
        return read_state(
            self.scene, self.data, self.target_slot, self.distractor_slots, self.config.distractors[1]
        )

    def restore_finite_state(self) -> None:
        """After an unstable frame: put the model into its initial pose, so that nothing read of it is NaN."""
        if not (np.isfinite(self.data.qpos).all() and np.isfinite(self.data.qvel).all()):
            mujoco.mj_resetData(self.scene.model, self.data)
        mujoco.mj_forward(self.scene.model, self.data)

    def _place(self, layout: Layout, early_stop: bool, arm_qpos: NDArray[np.float64] | None = None) -> bool:
        """Stand up a layout and begin an episode; False when it did not settle."""
        scene, data, config = self.scene, self.data, self.config
        scene.apply_looks(_looks(layout.variation, config.randomization))
        placements = _placements(scene, layout, config.randomization)
        arm = _arm_start(layout.variation, config.randomization) if arm_qpos is None else arm_qpos
        scene.place(data, placements, arm, settle_steps=round(SETTLE_S / config.physics_timestep))
        self.layout = layout
        self.target_slot, *others = [placement.piece_slot for placement in placements]
        self.distractor_slots = tuple(others)
        self._distractor_bodies = np.array([scene.pieces[slot].body_id for slot in others], np.intp)
        start = self.take_snapshot(None)
        self.episode = Episode(start, config.max_frames, early_stop)
        self.measures = Measures(scene, data, self.target_slot) if config.measure else None
        return start.stable and self._is_settled(placements, start)

    def _is_settled(self, placements: list[Placement], start: Snapshot) -> bool:
        """Every piece stands where it was put, at rest and untouched by the arm."""
        positions = np.vstack([start.target_w, start.distractors_w])
        offsets = positions[:, :2] - np.array([placement.xy_m for placement in placements])
        uprights = np.array([start.target_axis_w[2], *start.distractors_upright])
        pieces = [self.scene.pieces[placement.piece_slot] for placement in placements]
        speeds = [self.data.qvel[piece.dof_adr : piece.dof_adr + 6] for piece in pieces]
        touched = any(any(self.scene.touched_by_arm(self.data, piece.slot)) for piece in pieces)
        return bool(
            np.abs(offsets).max() < SETTLED_OFFSET_M
            and uprights.min() > SETTLED_UPRIGHT
            and np.abs(speeds).max() < SETTLED_SPEED
            and not touched
        )

    def _expert_solves(self) -> bool:
        """Run the scripted expert in the scene that stands now: True for a clean lift."""
        if self._expert is None:
            self._expert = Expert(self.scene, ExpertConfig(variety=0.0))
        layout = self.layout
        rng = np.random.default_rng([layout.seed, layout.index, layout.attempt])
        plan = self._expert.plan(self.data, self.target_slot, rng)
        if plan is None:
            return False
        for target in plan:
            if self.run_frame(target) is not None:
                break
        return self.episode.success and not self.episode.disturbed


def _placements(scene: ChessScene, layout: Layout, ranges: Randomization) -> list[Placement]:
    """The target's placement, then the distractors', in slots of the pool by kind; a kind's target slot comes last."""
    target, variation = layout.target, layout.variation
    rgba = {
        "white": _colour(
            WHITE_RGBA,
            variation.piece_brightness,
            variation.piece_tint,
            0,
            ranges.piece_colour,
            ranges.piece_tint,
        ),
        "black": _colour(
            BLACK_RGBA,
            variation.piece_brightness,
            variation.piece_tint,
            1,
            ranges.piece_colour,
            ranges.piece_tint,
        ),
    }
    free = {
        kind: iter(
            [*scene.distractor_slots(kind), *([scene.target_slot(kind)] if kind != target.kind else [])]
        )
        for kind in scene.kinds
    }
    placements = [_placement(scene.target_slot(target.kind), target, rgba[target.side])]
    placements += [
        _placement(next(free[piece.kind]), piece, rgba[piece.side]) for piece in layout.distractors
    ]
    return placements


def _placement(slot: int, piece: PieceLayout, rgba: tuple[float, float, float, float]) -> Placement:
    x, y = board.square_center(piece.square) + np.array(piece.offset_m)
    return Placement(slot, (float(x), float(y)), piece.yaw, rgba)


def _colour(
    nominal: tuple[float, ...],
    brightness: tuple[float, ...],
    tint: tuple[float, ...],
    which: int,
    brightness_range: float,
    tint_range: float,
) -> tuple[float, float, float, float]:
    """A colour (red, green, blue, opacity) moved by its draws; `which` of them is its own."""
    shift = np.array(tint[3 * which : 3 * which + 3]) * tint_range
    rgb = np.clip(np.array(nominal[:3]) + brightness[which] * brightness_range + shift, 0.0, 1.0)
    return float(rgb[0]), float(rgb[1]), float(rgb[2]), 1.0


def _arm_start(variation: Variation, ranges: Randomization) -> NDArray[np.float64]:
    """Start pose [rad]: the home pose with each joint moved by its own draw, inside the limits."""
    units = so101.to_units(so101.HOME_QPOS) + np.array(variation.arm_start) * ranges.arm_start_deg
    return np.clip(so101.from_units(units), so101.JOINT_LOW, so101.JOINT_HIGH)


def _looks(variation: Variation, ranges: Randomization) -> Looks:
    nominal = Looks()
    brightness = 1.0 + variation.light_intensity * ranges.light_intensity
    light = np.array(nominal.light_position_m) + np.array(variation.light_position) * ranges.light_position_m
    shift = np.array(variation.camera_position) * ranges.camera_position_m
    turn = np.array(variation.camera_angle) * np.radians(ranges.camera_angle_deg)
    squares = [
        _colour(
            rgb,
            variation.board_brightness,
            variation.board_tint,
            which,
            ranges.board_colour,
            ranges.board_tint,
        )
        for which, rgb in enumerate((nominal.light_square_rgb, nominal.dark_square_rgb))
    ]
    return replace(
        nominal,
        headlight_ambient=nominal.headlight_ambient * brightness,
        headlight_diffuse=nominal.headlight_diffuse * brightness,
        light_diffuse=nominal.light_diffuse * brightness,
        light_position_m=tuple(light.tolist()),
        light_square_rgb=squares[0][:3],
        dark_square_rgb=squares[1][:3],
        top_offset_m=tuple(shift[:3].tolist()),
        top_turn_rad=tuple(turn[:3].tolist()),
        wrist_offset_m=tuple(shift[3:].tolist()),
        wrist_turn_rad=tuple(turn[3:].tolist()),
        piece_friction_scale=1.0 + variation.piece_friction * ranges.piece_friction,
        piece_mass_scale=1.0 + variation.piece_mass * ranges.piece_mass,
        servo_gain_scale=1.0 + variation.servo_gain * ranges.servo_gain,
        joint_damping_scale=1.0 + variation.joint_damping * ranges.joint_damping,
    )
