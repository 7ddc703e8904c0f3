"""The task: what is read of the simulation after each frame, when an episode ends and what is measured in it."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import mujoco
import numpy as np
from numpy.typing import NDArray

from chess_env.pieces import PIECE_KINDS
from chess_env.reward import RewardState
from chess_env.scene import ChessScene
from chess_env.so101 import FIXED_JAW_X, gripper_angle, gripper_opening

End = Literal["success", "toppled", "disturbed", "timeout", "unstable"]

LIFT_HEIGHT_M = 0.040
HOLD_FRAMES = 10
UPRIGHT_MIN = float(np.cos(np.pi / 4))  # a piece that leans by more than 45 degrees has fallen over
FALL_HEIGHT_M = 0.005  # a piece that stands this much lower has fallen off the board (12 mm high)
DISTURBED_M = 0.010
CLOSE_RANGE_M = 0.040  # a gripper that closes farther away than this does not close on the target
TOUCH_CHECK_M = 0.002  # contacts with the jaws are looked up only for a target that is off its place


@dataclass(frozen=True)
class Snapshot:
    """The task's state after one frame, world frame, lengths [m].

    Attributes:
        target_w: Base of the target, shape (3,).
        target_axis_w: Its own vertical, a unit vector of shape (3,).
        distractors_w: Bases of the distractors, shape (n, 3).
        distractors_upright: Cosine of each one's lean, shape (n,).
        grasp_point_w: Between the finger tips, shape (3,).
        held: Both jaws touch the target (looked up only when it is off its place).
        stable: Everything is finite and MuJoCo gave no warning.
        grasp_height_m: Where the fingers take the target, above its base.
    """

    target_w: NDArray[np.float64]
    target_axis_w: NDArray[np.float64]
    distractors_w: NDArray[np.float64]
    distractors_upright: NDArray[np.float64]
    grasp_point_w: NDArray[np.float64]
    held: bool
    stable: bool
    grasp_height_m: float

    @property
    def target_grasp_w(self) -> NDArray[np.float64]:
        """Where the fingers take the target, shape (3,)."""
        return self.target_w + self.grasp_height_m * self.target_axis_w

    @property
    def distance_m(self) -> float:
        """Distance of the jaws' grasp point from there."""
        offset = self.grasp_point_w - self.target_grasp_w
        return math.sqrt(offset.dot(offset))


def is_stable(data: mujoco.MjData) -> bool:
    """Positions and velocities are finite, their squares too, and MuJoCo has given no warning since the scene began."""
    squares = data.qpos.dot(data.qpos) + data.qvel.dot(data.qvel)  # quicker than isfinite of each
    return math.isfinite(squares) and not data.warning.number.any()


def take_snapshot(
    scene: ChessScene,
    data: mujoco.MjData,
    target_slot: int,
    distractor_bodies: NDArray[np.intp],
    start: Snapshot | None = None,
) -> Snapshot:
    """Read the task's state; `distractor_bodies` are body ids, `start` is the snapshot of the settled scene."""
    target = scene.pieces[target_slot].body_id
    xpos, xmat = data.xpos, data.xmat
    target_w = xpos[target].copy()
    axis_w = xmat[target, 2::3].copy()
    held = False
    if start is not None:
        moved = abs(target_w[2] - start.target_w[2]) > TOUCH_CHECK_M or axis_w[2] < UPRIGHT_MIN
        held = bool(moved) and all(scene.touched_by_arm(data, target_slot))
    return Snapshot(
        target_w=target_w,
        target_axis_w=axis_w,
        distractors_w=xpos[distractor_bodies],
        distractors_upright=xmat[distractor_bodies, 8],
        grasp_point_w=scene.grasp_point_w(data),
        held=held,
        stable=is_stable(data),
        grasp_height_m=PIECE_KINDS[scene.pieces[target_slot].kind].grasp_height,
    )


def is_toppled(start: Snapshot, now: Snapshot) -> bool:
    """The target leans by more than 45 degrees, or stands lower than the board, and is not held."""
    leans = now.target_axis_w[2] < UPRIGHT_MIN
    fell = now.target_w[2] < start.target_w[2] - FALL_HEIGHT_M
    return bool((leans or fell) and not now.held)


def is_disturbed(start: Snapshot, now: Snapshot) -> bool:
    """A distractor is more than 10 mm from where it stood, or leans by more than 45 degrees."""
    if not len(now.distractors_w):
        return False
    moved = now.distractors_w - start.distractors_w
    farthest = math.sqrt(np.add.reduce(moved * moved, axis=1).max())
    return bool(farthest > DISTURBED_M or now.distractors_upright.min() < UPRIGHT_MIN)


def is_lifted(start: Snapshot, now: Snapshot) -> bool:
    """The target is at least 40 mm above where it stood, between both jaws."""
    return bool(now.held and now.target_w[2] - start.target_w[2] >= LIFT_HEIGHT_M)


@dataclass
class Episode:
    """The progress of one episode: fed a snapshot after each frame, it knows the end and the latched flags.

    Attributes:
        start: The settled scene.
        max_frames: Frames until the timeout.
        early_stop: `toppled` and `disturbed` end the episode.
        end: How it ended, None while it runs.
    """

    start: Snapshot
    max_frames: int
    early_stop: bool
    frames: int = 0
    held_frames: int = 0
    toppled: bool = False
    disturbed: bool = False
    end: End | None = None
    now: Snapshot = field(init=False)

    def __post_init__(self) -> None:
        self.now = self.start

    @property
    def success(self) -> bool:
        """The episode ended with the target lifted and held."""
        return self.end == "success"

    def update(self, now: Snapshot) -> End | None:
        """Count one frame. Of several ends at one frame the first of unstable, success, toppled, disturbed, timeout
        holds; an unstable state is judged no further."""
        self.frames += 1
        if not now.stable:
            self.end = "unstable"
            return self.end
        self.now = now
        self.held_frames = self.held_frames + 1 if is_lifted(self.start, now) else 0
        self.toppled = self.toppled or is_toppled(self.start, now)
        self.disturbed = self.disturbed or is_disturbed(self.start, now)
        if self.held_frames >= HOLD_FRAMES:
            self.end = "success"
        elif self.early_stop and self.toppled:
            self.end = "toppled"
        elif self.early_stop and self.disturbed:
            self.end = "disturbed"
        elif self.frames >= self.max_frames:
            self.end = "timeout"
        return self.end

    def reward_state(self) -> RewardState:
        """What the reward reads of this moment."""
        height = float(self.now.target_w[2] - self.start.target_w[2]) if self.now.held else 0.0
        return RewardState(
            distance_m=self.now.distance_m,
            held_height_m=height,
            success=self.success,
            disturbed=self.disturbed,
            toppled=self.toppled,
            terminal=self.end is not None and self.end != "timeout",
        )


class Measures:
    """Distances of one episode that cost time and that nothing but the record needs."""

    def __init__(self, scene: ChessScene, data: mujoco.MjData, target_slot: int) -> None:
        self._scene, self._data, self._slot = scene, data, target_slot
        shape = PIECE_KINDS[scene.pieces[target_slot].kind]
        self._grip_angle, self._grasp_height = gripper_angle(2 * shape.grasp_radius), shape.grasp_height
        self._last_command = float(data.ctrl[scene.actuator_ids[5]])
        self._closing_mm: float | None = None
        self.closest_m = float("inf")
        self.lift_m = 0.0
        self.close_lateral_mm: float | None = None

    def before_frame(self, gripper_command: float) -> None:
        """Watch the gripper's command [rad]: a run of falling commands that goes below the piece's width is a closing,
        and the error counts where that run began. The first closing near the target is kept."""
        if self.close_lateral_mm is None:
            if gripper_command >= self._last_command:
                self._closing_mm = None
            elif self._closing_mm is None:
                self._closing_mm = self._lateral_mm()
            crossed = gripper_command < self._grip_angle <= self._last_command
            if crossed and self._closing_mm is not None and np.isfinite(self._closing_mm):
                self.close_lateral_mm = self._closing_mm
        self._last_command = gripper_command

    def after_frame(self, episode: Episode) -> None:
        """Distances after a frame."""
        now = episode.now
        self.closest_m = min(self.closest_m, now.distance_m)
        self.lift_m = max(self.lift_m, float(now.target_w[2] - episode.start.target_w[2]))

    def _lateral_mm(self) -> float:
        """Distance of the target's grasp point from the line midway between the jaws [mm]; infinite when far off."""
        scene, data = self._scene, self._data
        target = scene.pieces[self._slot].body_id
        point_w = data.xpos[target] + self._grasp_height * data.xmat[target].reshape(3, 3)[:, 2]
        if np.linalg.norm(scene.grasp_point_w(data) - point_w) > CLOSE_RANGE_M:
            return float("inf")
        jaw = scene.gripper_body_id
        x, y, _ = data.xmat[jaw].reshape(3, 3).T @ (point_w - data.xpos[jaw])
        opening = gripper_opening(float(data.qpos[5]))
        return float(np.hypot(x - (FIXED_JAW_X + opening / 2), y) * 1e3)


def episode_metrics(
    episode: Episode, measures: Measures | None, return_: float, piece: str, num_clipped_targets: int
) -> dict[str, Any]:
    """The record of a finished episode; what was not measured, or never happened, is None."""
    seen = measures is not None and np.isfinite(measures.closest_m)
    return {
        "success": episode.success,
        "end": episode.end,
        "clean_lift": episode.success and not episode.disturbed,
        "disturbed": episode.disturbed,
        "toppled": episode.toppled,
        "unstable": episode.end == "unstable",
        "frames": episode.frames,
        "closest_mm": measures.closest_m * 1e3 if measures is not None and seen else None,
        "close_lateral_mm": measures.close_lateral_mm if measures is not None else None,
        "lift_mm": measures.lift_m * 1e3 if measures is not None else None,
        "return": float(return_),
        "piece": piece,
        "num_clipped_targets": num_clipped_targets,
    }


def log_metrics(kinds: Iterable[str]) -> dict[str, tuple]:
    """What a trainer's log shows of `episode_metrics`: name -> (metric, reduction) or (metric, reduction, filter)."""
    return {
        "success": ("success", "mean"),
        "clean_lift": ("clean_lift", "mean"),
        "disturbed": ("disturbed", "mean"),
        "toppled": ("toppled", "mean"),
        "unstable": ("unstable", "mean"),
        **{f"success_{kind}": ("success", "mean", ("piece", kind)) for kind in kinds},
        "close_mm_median": ("close_lateral_mm", "median"),
    }
