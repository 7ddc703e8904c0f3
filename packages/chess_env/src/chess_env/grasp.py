"""How to take hold of a piece: closing direction, tilt, opening and a straight way in that touches no neighbour.

Candidates are ordered by a cheap rule and tried with inverse kinematics and MuJoCo's own collision detection, until
one is clear of everything. World frame, [m], [rad].

Source of the numbers: lifts measured in simulation over 40 layouts of 16 pieces; tips 18 to 32 mm above
the board all hold.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import mujoco
import numpy as np
from numpy.typing import NDArray

from chess_env import board, so101
from chess_env.kinematics import ArmKinematics, GraspPose, jaw_direction, radial
from chess_env.pieces import PIECE_KINDS
from chess_env.scene import ChessScene

FIXED_JAW_CLEARANCE = 0.009  # the piece stands midway: as much room for an error on both sides
MOVING_JAW_CLEARANCE = 0.009
HOVER_DISTANCE = 0.055  # back along the approach
# Outward tilt of the fingers by distance from the pan axis: straight down reaches only 0.14 to 0.22 m.
_TILT_DISTANCE = (0.13, 0.28, 0.33, 0.36, 0.385, 0.41)
_TILT_DEG = (15.0, 15.0, 30.0, 40.0, 45.0, 55.0)
_YAW_DEG = (0.0, -12.0, 12.0, -24.0, 24.0, -37.0, 37.0, -50.0, 50.0)
_TILT_CHANGE_DEG = (0.0, -8.0, 8.0)
_MAX_CANDIDATES = 9
_TALL = 0.055  # the hand passes over pieces of this height; beside taller ones every candidate is tried [m]
_FIRM = 0.0015  # weakness of a grasp that needs no search for a better one [m of clearance]
_MAX_SLOPE = np.radians(30.0)
_SAFE_DISTANCE = 0.004  # clearance that is good enough
_PROBE_BIT = 4  # of the collision masks of the probe's model
_SAFE_GAP = 0.001  # between two standing pieces
_MAX_ERROR = 0.002  # of inverse kinematics
_FINGER_DEPTH = 0.008  # half thickness of a finger, for the cheap rule
_PATH_POINTS = (0.33, 0.66, 1.0)  # of the hover distance, where the way in is checked


def tilt_at(point_w: NDArray[np.float64]) -> float:
    """Usual tilt of the fingers from straight down, outwards, at a place of the board [rad]."""
    return float(np.radians(np.interp(board.reach_of(point_w), _TILT_DISTANCE, _TILT_DEG)))


def approach_direction(point_w: NDArray[np.float64], tilt: float) -> NDArray[np.float64]:
    """Unit vector in which the fingers point at ``point_w``, shape (3,)."""
    return np.array([*(np.sin(tilt) * radial(point_w)), -np.cos(tilt)])


def seed_qpos(point_w: NDArray[np.float64]) -> NDArray[np.float64]:
    """Joint angles [rad], shape (5,), from which inverse kinematics finds the pose with the camera outwards."""
    away = np.asarray(point_w)[:2] - so101.PAN_AXIS_XY
    return np.array([-np.arctan2(away[1], away[0]), -0.2, 0.3, 1.3, -1.5])


@dataclass(frozen=True)
class Grasp:
    """A way to take hold of a piece.

    Attributes:
        pose: Where ``local`` goes: the piece's axis at grasp height.
        local: The point of the gripper that goes there [m], gripper frame.
        gripper: Gripper angle of the approach [rad].
        qpos: Joint angles at the grasp [rad], shape (5,).
        clearance: Smallest distance to a neighbour on the way in [m], at most ``_SAFE_DISTANCE``; negative: touches.
    """

    pose: GraspPose
    local: NDArray[np.float64]
    gripper: float
    qpos: NDArray[np.float64]
    clearance: float

    @property
    def approach(self) -> NDArray[np.float64]:
        """Direction of the way in, shape (3,)."""
        return approach_direction(self.pose.point_w, self.pose.tilt)


class _Candidate(NamedTuple):
    """A closing direction and a tilt to try, in the order of trying.

    Both guesses are in metres of clearance: ``badness`` with the neighbours, ``weakness`` without them.
    """

    badness: float
    weakness: float
    yaw: float
    tilt_change: float


class CollisionProbe:
    """Distances between the arm and the pieces in a copy of the scene, without touching the scene itself."""

    def __init__(self, scene: ChessScene) -> None:
        self._scene = scene
        model = copy.copy(scene.model)
        model.opt.enableflags &= ~int(mujoco.mjtEnableBit.mjENBL_SLEEP)
        arm = np.isin(model.geom_bodyid, list(scene.arm_body_ids)) & (model.geom_contype > 0)
        model.geom_contype[arm] |= _PROBE_BIT
        model.body_contype[list(scene.arm_body_ids)] |= _PROBE_BIT
        for piece in scene.pieces:  # they meet the arm alone: a resting piece's contacts would only cost time
            solid = list(piece.solid_geom_ids)
            model.geom_contype[list(piece.geom_ids)] = model.geom_conaffinity[list(piece.geom_ids)] = 0
            model.body_contype[piece.body_id], model.body_conaffinity[piece.body_id] = 0, _PROBE_BIT
            model.geom_conaffinity[solid] = _PROBE_BIT
            model.geom_margin[solid] = _SAFE_DISTANCE
        self._model, self._data = model, mujoco.MjData(model)
        self._piece_of_body = np.full(model.nbody, -1)
        for piece in scene.pieces:
            self._piece_of_body[piece.body_id] = piece.slot
        self._is_arm = np.zeros(model.nbody, dtype=bool)
        self._is_arm[list(scene.arm_body_ids)] = True

    def set_pieces(self, data: mujoco.MjData) -> None:
        """Take over where the pieces are."""
        self._data.qpos[:] = data.qpos

    def distances(self, arm_qpos: NDArray[np.float64], target: int) -> tuple[float, float, float]:
        """Smallest distance [m] from the arm to the neighbours, to the target, and to the rest of the scene.

        Values above ``_SAFE_DISTANCE`` are reported as that (0 for the rest: touching or not).
        """
        data = self._data
        data.qpos[: so101.NUM_JOINTS] = arm_qpos
        mujoco.mj_kinematics(self._model, data)
        mujoco.mj_collision(self._model, data)
        neighbours = own = rest = _SAFE_DISTANCE
        if data.ncon == 0:
            return neighbours, own, rest
        bodies = self._model.geom_bodyid[data.contact.geom]
        arm = self._is_arm[bodies]
        for (first, second), distance in zip(bodies[arm.any(axis=1)], data.contact.dist[arm.any(axis=1)]):
            piece = max(self._piece_of_body[first], self._piece_of_body[second])
            if piece == target:
                own = min(own, distance)
            elif piece >= 0:
                neighbours = min(neighbours, distance)
            else:
                rest = min(rest, distance)
        return float(neighbours), float(own), float(rest)


class GraspPlanner:
    """Finds a grasp for a standing piece among its neighbours."""

    def __init__(self, scene: ChessScene) -> None:
        self.scene = scene
        self.arm = ArmKinematics(scene.robot)
        self.probe = CollisionProbe(scene)

    def plan(self, data: mujoco.MjData, target: int, yaw_shift: float = 0.0) -> Grasp | None:
        """The first grasp that is clear of everything and firm, else the best; None when the arm reaches none.

        Args:
            data: The scene's state.
            target: Slot of the piece.
            yaw_shift: Added to the preferred closing direction [rad], for variety.
        """
        self.probe.set_pieces(data)
        best: Grasp | None = None
        best_margin = -np.inf
        tall = any(PIECE_KINDS[self.scene.pieces[slot].kind].height > _TALL for slot in self.scene.active)
        for number, candidate in enumerate(sorted(self._candidates(data, target, yaw_shift))):
            if number >= _MAX_CANDIDATES and not (tall and (best is None or best.clearance < 0)):
                break
            grasp = self._try(data, target, candidate, best_margin + candidate.weakness)
            if grasp is not None:
                best, best_margin = grasp, grasp.clearance - candidate.weakness
                if grasp.clearance >= _SAFE_DISTANCE and candidate.weakness <= _FIRM:
                    break
        return best

    def way_in(self, grasp: Grasp, hover: float, start: NDArray[np.float64]) -> NDArray[np.float64] | None:
        """Joint angles [rad], shape (5,), ``hover`` [m] back along the approach; None when out of reach."""
        pose = GraspPose(grasp.pose.point_w - hover * grasp.approach, grasp.pose.tilt, grasp.pose.jaw_w)
        solution = self.arm.solve(pose, grasp.local, start)
        return solution.qpos if solution.error < _MAX_ERROR else None

    def _candidates(self, data: mujoco.MjData, target: int, yaw_shift: float) -> Iterator[_Candidate]:
        position = data.xpos[self.scene.pieces[target].body_id]
        tilt = tilt_at(position)
        neighbours = [self.scene.pieces[slot] for slot in self.scene.active if slot != target]
        for yaw_deg in _YAW_DEG:
            yaw = np.radians(yaw_deg) + yaw_shift
            jaw = jaw_direction(position, yaw)
            fixed, moving = self._side_widths(data, target, jaw)
            wide = max(fixed + moving - 0.024, 0.0)  # a snout across the jaws
            badness = 4e-5 * abs(yaw_deg)
            for piece in neighbours:
                apart = data.xpos[piece.body_id][:2] - position[:2]
                if apart @ apart > 0.08**2:
                    continue
                radius = PIECE_KINDS[piece.kind].base_radius
                for side in (
                    -jaw * (fixed + FIXED_JAW_CLEARANCE + 0.006),
                    jaw * (moving + MOVING_JAW_CLEARANCE + 0.006),
                ):
                    gap = float(np.linalg.norm(apart - side)) - radius - _FINGER_DEPTH
                    badness += max(_SAFE_DISTANCE - gap, 0.0)
            for change_deg in _TILT_CHANGE_DEG:
                change = float(np.radians(change_deg))
                # Tilted fingers that also turn close on a slope, and lift one side of the base.
                slope = abs(np.arctan(np.sin(yaw) * np.tan(tilt + change)))
                if slope < _MAX_SLOPE:
                    weakness = float(wide + 0.03 * slope * slope)
                    yield _Candidate(badness + weakness + 2e-4 * abs(change_deg), weakness, yaw, change)

    def _side_widths(
        self, data: mujoco.MjData, target: int, jaw_w: NDArray[np.float64]
    ) -> tuple[float, float]:
        """How far the piece extends from its axis towards the fixed and the moving jaw [m], above the base."""
        piece = self.scene.pieces[target]
        shape = PIECE_KINDS[piece.kind]
        if shape.snout is None:
            return shape.grasp_radius, shape.grasp_radius
        half_width, half_length, centre = shape.snout
        rotation = data.xmat[piece.body_id].reshape(3, 3)[:2, :2]
        x, y = rotation.T @ jaw_w
        extent, shift = abs(x) * half_width + abs(y) * half_length, y * centre
        return max(extent - shift, shape.grasp_radius), max(extent + shift, shape.grasp_radius)

    def _try(self, data: mujoco.MjData, target: int, candidate: _Candidate, worst: float) -> Grasp | None:
        """The grasp of one candidate; None when it is out of reach or no clearer than ``worst`` [m]."""
        position = data.xpos[self.scene.pieces[target].body_id]
        point = position + np.array([0.0, 0.0, PIECE_KINDS[self.scene.pieces[target].kind].grasp_height])
        jaw = jaw_direction(point, candidate.yaw)
        fixed, moving = self._side_widths(data, target, jaw)
        local = np.array([so101.FIXED_JAW_X + fixed + FIXED_JAW_CLEARANCE, 0.0, so101.TIP_Z])
        gripper = so101.gripper_angle(fixed + moving + FIXED_JAW_CLEARANCE + MOVING_JAW_CLEARANCE)
        pose = GraspPose(point, tilt_at(point) + candidate.tilt_change, jaw)
        solution = self.arm.solve(pose, local, seed_qpos(point))
        if solution.error > _MAX_ERROR or solution.cost > 0.1:
            return None
        qpos = solution.qpos
        clearance = min(
            self._clearance(qpos, gripper, target), self._closing_clearance(data, target, qpos, jaw, fixed)
        )
        grasp = Grasp(pose, local, gripper, qpos, clearance)
        for part in _PATH_POINTS:
            if grasp.clearance <= worst:
                return None
            step = self.way_in(grasp, part * HOVER_DISTANCE, qpos)
            if step is None:
                return None
            qpos = step
            grasp = replace(grasp, clearance=min(grasp.clearance, self._clearance(qpos, gripper, target)))
        return grasp if grasp.clearance > worst else None

    def _closing_clearance(
        self,
        data: mujoco.MjData,
        target: int,
        qpos: NDArray[np.float64],
        jaw_w: NDArray[np.float64],
        fixed: float,
    ) -> float:
        """Distance to the neighbours of the closed jaws, and of the piece that they have pushed to the fixed one."""
        shape = PIECE_KINDS[self.scene.pieces[target].kind]
        closed = so101.gripper_angle(2 * shape.grasp_radius)
        clearance, _, _ = self.probe.distances(np.append(qpos, closed), target)
        push = fixed + FIXED_JAW_CLEARANCE - shape.grasp_radius
        pushed_to = data.xpos[self.scene.pieces[target].body_id][:2] - push * jaw_w
        for slot in self.scene.active:
            if slot != target:
                piece = self.scene.pieces[slot]
                apart = data.xpos[piece.body_id][:2] - pushed_to
                gap = math.sqrt(apart @ apart) - shape.base_radius - PIECE_KINDS[piece.kind].base_radius
                clearance = min(clearance, gap + _SAFE_DISTANCE - _SAFE_GAP)
        return clearance

    def _clearance(self, qpos: NDArray[np.float64], gripper: float, target: int) -> float:
        neighbours, own, rest = self.probe.distances(np.append(qpos, gripper), target)
        return min(neighbours, own if own < 0 else _SAFE_DISTANCE, rest)
