"""The scripted expert: above, down, close, lift. It reads the simulator's state and gives 30 Hz joint targets.

It has variety (speed, closing direction, waypoint noise that decays on the way in, short pauses), so that cloning it
gives a policy that has seen more than one path. ``ExpertConfig`` can also make it sloppy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import gymnasium
import mujoco
import numpy as np
from numpy.typing import NDArray

from chess_env import board, so101
from chess_env.errors import ConfigError
from chess_env.grasp import (
    HOVER_DISTANCE,
    Grasp,
    GraspPlanner,
    seed_qpos,
    tilt_at,
)  # fmt: skip
from chess_env.kinematics import NUM_ARM_JOINTS, GraspPose, jaw_direction
from chess_env.motion import Path
from chess_env.pieces import PIECE_KINDS
from chess_env.scene import ChessScene

LIFT_HEIGHT = 0.080
JOINT_SPEED = 1.5  # [rad/s]
HOVER_FRAME = 50
"""From a distant start the descent begins about here, so that an observation at frame 50 shows the hover."""
_HOVER_AT_LEAST = 36  # frames of the way to the hover
_DESCENT_FRAMES, _DWELL_FRAMES, _CLOSE_FRAMES, _SQUEEZE_FRAMES = 16, 2, 5, 4
_LIFT_FRAMES, _HOLD_FRAMES = 11, 20
_LATERAL_NOISE, _LATERAL_LIMIT = 0.006, 0.015  # of the hover [m]
_CLEAR_OF_NOISE = 0.002  # a noisy way comes no nearer to a neighbour [m]
_STANDING_COSINE = 0.97
_ON_BOARD = 0.004  # a standing piece is within this of the board's height [m]
_NEAR_HEIGHT = 0.140  # finger tips below this are near the pieces [m above the board]
_SAFE_HEIGHT = 0.085  # finger tips above this clear every piece [m above the board]
_HOLDING_ANGLE = 0.06  # gripper command below which a touching gripper is holding [rad]


@dataclass(frozen=True)
class ExpertConfig:
    """Variety of a good expert, and imperfections of a sloppy one."""

    variety: float = 1.0
    """Scale of the random variety; 0 gives one path per scene."""
    aim_error_mm: float = 0.0
    """Constant error of the aim per episode [mm], standard deviation of each horizontal direction."""
    hesitation_frames: int = 0
    """Longest extra pause before the descent [frames], drawn evenly from 0."""
    close_early_late_frames: int = 0
    """The gripper closes up to this many frames early or late, drawn evenly."""

    def __post_init__(self) -> None:
        for name in ("variety", "aim_error_mm", "hesitation_frames", "close_early_late_frames"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
                raise ConfigError(f"expert {name}={value!r}: a finite number of at least 0 is needed")


class Expert:
    """Plans picks in one scene. Holds scratch data: one per process, not to be shared between threads."""

    def __init__(self, scene: ChessScene, config: ExpertConfig | None = None) -> None:
        self.scene = scene
        self.config = config or ExpertConfig()
        self.planner = GraspPlanner(scene)

    def plan(self, data: mujoco.MjData, target: int, rng: np.random.Generator) -> NDArray[np.float64] | None:
        """Joint targets [rad] at 30 Hz, shape (num_frames, 6), from the arm's present state to a held lift.

        Works from any state of the arm: at a distance (the home pose), near the piece, after a failed try,
        or already holding the piece. ``so101.to_units`` turns the targets into actions.

        Args:
            data: State of the scene; only read.
            target: Slot of the piece to pick.
            rng: Source of the variety; the same state and generator give the same plan.

        Returns:
            None when the piece does not stand on the board within reach, or no grasp is possible.
        """
        start = data.ctrl[self.scene.actuator_ids].copy()
        if start[5] < _HOLDING_ANGLE and all(self.scene.touched_by_arm(data, target)):
            return self._lift_from_hold(start, rng)
        if not self._stands_within_reach(data, target):
            return None
        variety = self.config.variety
        grasp = self.planner.plan(data, target, yaw_shift=variety * rng.uniform(-0.1, 0.1))
        if grasp is None:
            return None
        aim_error = rng.normal(size=2) * self.config.aim_error_mm * 1e-3
        return self._pick(start, _shifted(grasp, aim_error), target, rng)

    def sample_near_start(
        self, data: mujoco.MjData, target: int, rng: np.random.Generator
    ) -> NDArray[np.float64]:
        """A start pose [rad], shape (6,), with the finger tips around the piece, touching nothing.

        Args:
            data: A placed scene, with the arm out of the way; only read.
            target: Slot of the piece.
            rng: Source of the pose.

        Returns:
            The home pose when 20 draws all collide.
        """
        probe, arm = self.planner.probe, self.planner.arm
        probe.set_pieces(data)
        piece = data.xpos[self.scene.pieces[target].body_id]
        for _ in range(20):
            angle, distance = rng.uniform(-np.pi, np.pi), rng.uniform(0.0, 0.05)
            height = rng.uniform(0.022, 0.11)
            point = piece + np.array([distance * np.cos(angle), distance * np.sin(angle), height])
            tilt = tilt_at(point) + rng.uniform(-0.15, 0.15)
            pose = GraspPose(point, tilt, jaw_direction(point, rng.uniform(-0.6, 0.6)))
            gripper = rng.choice([-0.05, 0.1, 0.25, 0.4]) + rng.uniform(-0.05, 0.05)
            solution = arm.solve(pose, so101.GRASP_POINT, seed_qpos(point))
            if solution.error < 0.003:
                qpos = np.append(solution.qpos, gripper)
                if min(probe.distances(qpos, target)) >= 0.001:
                    return qpos
        return so101.HOME_QPOS.copy()

    def _stands_within_reach(self, data: mujoco.MjData, target: int) -> bool:
        body = self.scene.pieces[target].body_id
        upright = data.xmat[body].reshape(3, 3)[2, 2] > _STANDING_COSINE
        on_board = abs(data.xpos[body][2] - board.BOARD_TOP_Z) < _ON_BOARD
        return bool(upright and on_board and 0.12 < board.reach_of(data.xpos[body]) < 0.42)

    def _pick(
        self,
        start: NDArray[np.float64],
        grasp: Grasp,
        target: int,
        rng: np.random.Generator,
    ) -> NDArray[np.float64] | None:
        variety = self.config.variety
        speed = JOINT_SPEED * (1 + variety * rng.uniform(-0.2, 0.3))
        path = Path(start, speed)
        gripper = grasp.gripper + variety * rng.uniform(-0.01, 0.03)
        hover = HOVER_DISTANCE + variety * rng.uniform(-0.006, 0.010)
        lateral = np.clip(variety * rng.normal(size=2) * _LATERAL_NOISE, -_LATERAL_LIMIT, _LATERAL_LIMIT)
        tips = self.planner.arm.pose(start).point_w
        present = self.planner.arm.pose(start, grasp.local)
        aligned = self._offset_of_aligned(present, grasp, start[5], hover, target)
        if aligned is not None:  # already above the piece, open: straight down from here
            hover, lateral = aligned
            gripper = start[5]
            grasp = replace(grasp, pose=replace(grasp.pose, jaw_w=present.jaw_w))
            way = self._way_down(grasp, hover, lateral, start[:NUM_ARM_JOINTS])
            if way is None:
                return None
            way[0] = start[:NUM_ARM_JOINTS]
        else:
            way = self._way_down(grasp, hover, lateral, grasp.qpos)
            if way is None or self._clearance(way, gripper, target) < min(_CLEAR_OF_NOISE, grasp.clearance):
                # The noise has left the reach or come near a neighbour; the planner has checked the plain way.
                gripper, hover, lateral = grasp.gripper, HOVER_DISTANCE, np.zeros(2)
                way = self._way_down(grasp, hover, lateral, grasp.qpos)
                if way is None:
                    return None
            qpos_hover = way[0]
            above_board = tips[2] - board.BOARD_TOP_Z
            if above_board < _SAFE_HEIGHT:
                self._rise(path, gripper)
            near = above_board < _NEAR_HEIGHT
            least = 10 if near else _HOVER_AT_LEAST + int(variety * rng.integers(-4, 8))
            path.ease(np.append(qpos_hover, gripper), least)
            jitter = variety * rng.uniform(-1.0, 1.0)
            pause = round(5 + 3 * jitter) if near else max(2, HOVER_FRAME + round(jitter) - len(path))
            path.hold(pause + int(rng.integers(0, self.config.hesitation_frames + 1)))
        self._descend_and_close(path, way, hover, gripper, rng)
        self._lift(path, grasp.pose, grasp.local, rng)
        return path.targets()

    def _descend_and_close(
        self,
        path: Path,
        way: NDArray[np.float64],
        hover: float,
        gripper: float,
        rng: np.random.Generator,
    ) -> None:
        frames = _DESCENT_FRAMES + self.config.variety * rng.integers(-3, 6)
        path.follow(way, gripper, max(int(frames * min(hover / HOVER_DISTANCE, 1.2)), 4))
        path.hold(_DWELL_FRAMES)
        shift = int(self.config.close_early_late_frames)
        path.close(_CLOSE_FRAMES, shift=int(rng.integers(-shift, shift + 1)))
        path.hold(_SQUEEZE_FRAMES)

    def _lift_from_hold(self, start: NDArray[np.float64], rng: np.random.Generator) -> NDArray[np.float64]:
        path = Path(start, JOINT_SPEED)
        path.close(1)
        path.hold(3)
        self._lift(path, self.planner.arm.pose(start), so101.GRASP_POINT, rng)
        return path.targets()

    def _lift(
        self, path: Path, pose: GraspPose, local: NDArray[np.float64], rng: np.random.Generator
    ) -> None:
        """Straight up; the tilt gives way, since far squares are at the edge of the reach."""
        qpos = path.last[:NUM_ARM_JOINTS]
        nodes = [qpos]
        for height in np.linspace(0, LIFT_HEIGHT, 7)[1:]:
            raised = replace(pose, point_w=pose.point_w + np.array([0, 0, height]))
            qpos = self.planner.arm.solve(raised, local, qpos, free_tilt=True).qpos
            nodes.append(qpos)
        path.follow(
            np.array(nodes), path.last[5], _LIFT_FRAMES + int(self.config.variety * rng.integers(-2, 4))
        )
        path.hold(_HOLD_FRAMES)

    def _rise(self, path: Path, gripper: float) -> None:
        """Straight up from between the pieces, opening on the way."""
        pose = self.planner.arm.pose(path.last)
        top = np.array([*pose.point_w[:2], board.BOARD_TOP_Z + _SAFE_HEIGHT])
        solution = self.planner.arm.solve(GraspPose(top, pose.tilt, pose.jaw_w), so101.GRASP_POINT, path.last)
        if solution.error < 0.006:
            path.ease(np.append(solution.qpos, gripper), 8)

    def _way_down(
        self, grasp: Grasp, hover: float, lateral: NDArray[np.float64], start: NDArray[np.float64]
    ) -> NDArray[np.float64] | None:
        """Arm poses [rad], shape (7, 5), from the hover straight to the grasp; the sideways offset decays on the way.

        None when the hover is out of reach.
        """
        first = self.planner.way_in(_shifted(grasp, lateral), hover, start)
        if first is None:
            return None
        nodes = [first]
        for part in np.linspace(0, 1, 7)[1:]:
            beside = _shifted(grasp, lateral * max(0.0, 1 - 2 * part))
            reached = self.planner.way_in(beside, hover * (1 - part), nodes[-1])
            nodes.append(nodes[-1] if reached is None else reached)
        return np.array(nodes)

    def _clearance(self, way: NDArray[np.float64], gripper: float, target: int) -> float:
        """Smallest distance to a neighbour [m] in the upper half of the way, where the noise is."""
        poses = [np.append(qpos, gripper) for qpos in way[:4]]
        return min(self.planner.probe.distances(pose, target)[0] for pose in poses)

    def _offset_of_aligned(
        self, present: GraspPose, grasp: Grasp, gripper: float, hover: float, target: int
    ) -> tuple[float, NDArray[np.float64]] | None:
        """(distance back along the approach, sideways offset) of a gripper that can go straight down, else None."""
        offset = present.point_w - grasp.pose.point_w
        back = float(-offset @ grasp.approach)
        sideways = offset + back * grasp.approach
        shape = PIECE_KINDS[self.scene.pieces[target].kind]
        is_open = so101.gripper_opening(gripper) > 2 * shape.grasp_radius + 0.010
        in_cone = -0.006 < back < hover + 0.02 and np.linalg.norm(sideways) < 0.003 + 0.35 * max(back, 0.0)
        turned = float(present.jaw_w @ grasp.pose.jaw_w) > 0.9
        if not (is_open and in_cone and turned and abs(present.tilt - grasp.pose.tilt) < 0.3):
            return None
        return max(back, 1e-3), sideways[:2]


def _shifted(grasp: Grasp, lateral: NDArray[np.float64]) -> Grasp:
    """The same grasp ``lateral`` [m], shape (2,), beside its place."""
    point = grasp.pose.point_w + np.array([*lateral, 0.0])
    return replace(grasp, pose=replace(grasp.pose, point_w=point))


class ExpertAgent:
    """The expert of one scene, chunk by chunk: every call gives the next chunk of actions, of which the first
    ``n_action_steps`` (None: all) are taken as executed.

    A plan that has run out, because the lift failed, is made anew from the state at hand.
    """

    def __init__(self, expert: Expert, chunk_size: int = 50, n_action_steps: int | None = None) -> None:
        self.expert = expert
        self.chunk_size = chunk_size
        self.n_action_steps = chunk_size if n_action_steps is None else n_action_steps
        self._rest: NDArray[np.float64] = np.empty((0, so101.NUM_JOINTS))

    def reset(self) -> None:
        """Forget the plan: a new episode has begun."""
        self._rest = self._rest[:0]

    def act(self, data: mujoco.MjData, target: int, rng: np.random.Generator) -> NDArray[np.float32]:
        """Joint targets in LeRobot's units ([deg], gripper 0 to 100), shape (chunk_size, 6), float32.

        The last target of a plan is repeated to fill its last chunk; without a plan the arm holds still.
        """
        if len(self._rest) == 0:
            plan = self.expert.plan(data, target, rng)
            held = data.ctrl[self.expert.scene.actuator_ids][None].copy()
            self._rest = held if plan is None else plan
        chunk, self._rest = self._rest[: self.chunk_size], self._rest[self.n_action_steps :]
        padding = np.repeat(chunk[-1:], self.chunk_size - len(chunk), axis=0)
        return so101.to_units(np.concatenate([chunk, padding])).astype(np.float32)


def expert_targets(
    env: gymnasium.Env, *, seed: int = 0, config: ExpertConfig | None = None
) -> Iterator[NDArray[np.float32]]:
    """The expert's joint targets at 30 Hz for the episode that ``env`` has begun, without end.

    A pick takes about 100 targets. Whenever a plan has run out and the caller goes on, because the lift failed, the
    next one starts from the state at hand; without a plan the arm holds still. With one target a step:

        env = gymnasium.make("chess_env:ChessPickStep-v0")
        env.reset(seed=7)
        for target in expert_targets(env):
            *_, terminated, truncated, info = env.step(target)
            if terminated or truncated:
                break

    Args:
        env: An environment of this package, after ``reset``; wrappers do not matter.
        seed: Of the expert's variety; the same scene and seed give the same targets.
        config: Variety and imperfections.

    Yields:
        Targets as actions: five joints [deg], gripper 0 to 100; shape (6,), float32.
    """
    simulation = env.unwrapped.simulation
    expert, rng = Expert(simulation.scene, config), np.random.default_rng(seed)
    agent = ExpertAgent(expert, chunk_size=1)
    while True:
        yield agent.act(simulation.data, simulation.target_slot, rng)[0]


class ChunkedExpert:
    """The expert as an agent for ``ChessPick-v0``: actions of the environment's own shape.

        env = gymnasium.make("chess_env:ChessPick-v0")
        expert = ChunkedExpert(env)
        env.reset(seed=7)
        expert.reset(seed=0)
        while True:
            *_, terminated, truncated, info = env.step(expert.act())
            if terminated or truncated:
                break

    Args:
        env: An environment of this package; wrappers do not matter.
        config: Variety and imperfections.
    """

    def __init__(self, env: gymnasium.Env, config: ExpertConfig | None = None) -> None:
        self._env, self._config = env, config
        self._agent: ExpertAgent | None = None
        self._rng = np.random.default_rng(0)

    def reset(self, seed: int = 0) -> None:
        """A new episode has begun; ``seed`` is that of the variety."""
        self._rng = np.random.default_rng(seed)
        if self._agent is not None:
            self._agent.reset()

    def act(self) -> NDArray[np.float32]:
        """The next action, float32, of the shape of the environment's action space: (chunk_size, 6) or (6,)."""
        simulation = self._env.unwrapped.simulation
        if self._agent is None:
            sizes = simulation.config
            self._agent = ExpertAgent(
                Expert(simulation.scene, self._config), sizes.chunk_size, sizes.n_action_steps
            )
        chunk = self._agent.act(simulation.data, simulation.target_slot, self._rng)
        return chunk.reshape(self._env.unwrapped.action_space.shape)
