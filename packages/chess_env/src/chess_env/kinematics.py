"""Forward and inverse kinematics of the arm: damped least squares with the analytic Jacobian.

The arm has five joints before the gripper, so a grasp pose has five numbers: where a point of the gripper is (3),
how far the fingers tilt from the vertical, outwards (1), and the horizontal direction in which the jaws
close (1). World frame, [m], [rad].
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import mujoco
import numpy as np
from numpy.typing import ArrayLike, NDArray

from chess_env import so101

NUM_ARM_JOINTS = 5
_LIMIT_MARGIN = 0.01  # solutions stay this far inside the joint limits [rad]
# A millimetre weighs as much as 6 degrees: where a joint limit forbids the tilt, the position is kept.
_POSITION_WEIGHT, _ANGLE_WEIGHT = 300.0, 3.0
_DONE_COST = 1e-4  # 0.03 mm
_MAX_ITERATIONS = 40
_IDENTITY = np.eye(NUM_ARM_JOINTS)

Triple = tuple[float, float, float]


@dataclass(frozen=True)
class GraspPose:
    """What inverse kinematics aims at.

    Attributes:
        point_w: Where the gripper's point goes [m], shape (3,).
        tilt: Angle of the fingers from straight down, outwards from the pan axis [rad].
        jaw_w: Horizontal unit vector from the fixed towards the moving jaw, shape (2,).
    """

    point_w: NDArray[np.float64]
    tilt: float
    jaw_w: NDArray[np.float64]


@dataclass(frozen=True)
class Solution:
    """Joint angles [rad], shape (5,), the remaining distance [m], and the residual's squared norm."""

    qpos: NDArray[np.float64]
    error: float
    cost: float


def radial(point: ArrayLike) -> NDArray[np.float64]:
    """Horizontal unit vector from the pan axis to ``point``, shape (2,)."""
    away = np.asarray(point, dtype=np.float64)[:2] - so101.PAN_AXIS_XY
    return away / np.sqrt(away @ away)


def jaw_direction(point: ArrayLike, yaw: float) -> NDArray[np.float64]:
    """Closing direction at ``point`` for a jaw ``yaw`` [rad] from tangential, shape (2,).

    Yaw 0 has the moving jaw on the arm's right and the wrist camera outwards (wrist_roll near -1.5 rad).
    """
    x, y = radial(point)
    cosine, sine = np.cos(yaw), np.sin(yaw)
    return np.array([cosine * y - sine * x, -cosine * x - sine * y])


class ArmKinematics:
    """Kinematics of one arm model, with its own scratch data: not to be shared between threads."""

    def __init__(self, robot: str | Path | None = None) -> None:
        self.model = so101.build_arm_model(robot)
        self._data = mujoco.MjData(self.model)
        self._gripper = self.model.body(so101.GRIPPER_BODY).id
        self._low = so101.JOINT_LOW[:NUM_ARM_JOINTS] + _LIMIT_MARGIN
        self._high = so101.JOINT_HIGH[:NUM_ARM_JOINTS] - _LIMIT_MARGIN
        self._jac_pos = np.zeros((3, self.model.nv))
        self._jac_rot = np.zeros((3, self.model.nv))

    def forward(self, qpos: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Gripper rotation (3, 3) and position [m] (3,) in the world, of joint angles [rad], shape (5,) or (6,)."""
        self._data.qpos[:NUM_ARM_JOINTS] = np.asarray(qpos, dtype=np.float64)[:NUM_ARM_JOINTS]
        mujoco.mj_kinematics(self.model, self._data)
        return self._data.xmat[self._gripper].reshape(3, 3).copy(), self._data.xpos[self._gripper].copy()

    def pose(self, qpos: ArrayLike, local: ArrayLike = so101.GRASP_POINT) -> GraspPose:
        """The grasp pose of joint angles [rad], shape (5,) or (6,), for the gripper's point ``local`` [m]."""
        rotation, position = self.forward(qpos)
        point = position + rotation @ np.asarray(local)
        down = -rotation[:, 2]
        jaw = rotation[:2, 0] / max(float(np.hypot(*rotation[:2, 0])), 1e-9)
        return GraspPose(point, float(np.arctan2(down[:2] @ radial(point), -down[2])), jaw)

    def solve(
        self, target: GraspPose, local: ArrayLike, start: ArrayLike, free_tilt: bool = False
    ) -> Solution:
        """Joint angles that bring the gripper's point ``local`` [m] to ``target``, searched from ``start`` [rad].

        ``free_tilt`` leaves the tilt open, and so takes the smallest movement of the joints that reaches the place.
        Never raises for an unreachable target: the caller reads ``error``.
        Source: Levenberg-Marquardt with adapted damping, Nocedal and Wright (2006), section 10.3.
        """
        goal = _Goal.of(target, local, 0.0 if free_tilt else _ANGLE_WEIGHT)
        q = np.asarray(start, dtype=np.float64)[:NUM_ARM_JOINTS]
        q = np.minimum(np.maximum(q, self._low), self._high)
        residual, cost = self._residual(q, goal)
        damping = 1e-3
        for _ in range(_MAX_ITERATIONS):
            if cost < _DONE_COST:
                break
            jacobian = self._jacobian(goal)
            gradient, hessian = jacobian.T @ residual, jacobian.T @ jacobian
            # A joint at its limit that the step would push further is held there: the others do the work.
            held = ((q <= self._low) & (gradient > 0)) | ((q >= self._high) & (gradient < 0))
            if held.any():
                gradient[held], hessian[held], hessian[:, held] = 0.0, 0.0, 0.0
            for _ in range(6):
                step = np.linalg.solve(hessian + damping * _IDENTITY, gradient)
                candidate = np.minimum(np.maximum(q - step, self._low), self._high)
                new_residual, new_cost = self._residual(candidate, goal)
                if new_cost < cost:
                    break
                damping *= 5
            else:
                break
            gain = cost - new_cost
            q, residual, cost = candidate, new_residual, new_cost
            if gain < 1e-6:
                break
            damping = max(damping * 0.3, 1e-6)
        return Solution(q, math.sqrt(residual[:3] @ residual[:3]) / _POSITION_WEIGHT, cost)

    # The two functions below compute with plain floats: on vectors of three, NumPy's call overhead is most of the time.

    def _residual(self, q: NDArray[np.float64], goal: _Goal) -> tuple[NDArray[np.float64], float]:
        """Residual, shape (5,), and its squared norm; leaves the data at ``q``."""
        data = self._data
        data.qpos[:NUM_ARM_JOINTS] = q
        mujoco.mj_kinematics(self.model, data)
        point, down, jaw = self._gripper_vectors(goal)
        tilt = math.atan2(down[0] * goal.out[0] + down[1] * goal.out[1], -down[2])
        # The turn in the horizontal plane, and not its sine: the opposite direction is no solution.
        turn = math.atan2(
            goal.jaw[0] * jaw[1] - goal.jaw[1] * jaw[0], goal.jaw[0] * jaw[0] + goal.jaw[1] * jaw[1]
        )
        residual = np.array(
            [
                (point[0] - goal.point[0]) * _POSITION_WEIGHT,
                (point[1] - goal.point[1]) * _POSITION_WEIGHT,
                (point[2] - goal.point[2]) * _POSITION_WEIGHT,
                (tilt - goal.tilt) * goal.tilt_weight,
                turn * _ANGLE_WEIGHT,
            ]
        )
        return residual, float(residual @ residual)

    def _jacobian(self, goal: _Goal) -> NDArray[np.float64]:
        """Derivative (5, 5) of the residual where the data is. A rotating vector v changes by omega x v, and
        u . (omega x v) = omega . (v x u)."""
        data = self._data
        point, down, jaw = self._gripper_vectors(goal)
        mujoco.mj_comPos(self.model, data)
        mujoco.mj_jac(self.model, data, self._jac_pos, self._jac_rot, np.array(point), self._gripper)
        jacobian = np.empty((5, NUM_ARM_JOINTS))
        jacobian[:3] = self._jac_pos[:, :NUM_ARM_JOINTS] * _POSITION_WEIGHT
        out = (*goal.out, 0.0)
        y, x = down[0] * out[0] + down[1] * out[1], -down[2]
        d_tilt = _combine(x, _cross(down, out), y, _cross(down, (0.0, 0.0, 1.0)), x * x + y * y)
        along, across = (*goal.jaw, 0.0), (-goal.jaw[1], goal.jaw[0], 0.0)
        y, x = jaw[0] * across[0] + jaw[1] * across[1], jaw[0] * along[0] + jaw[1] * along[1]
        d_turn = _combine(x, _cross(jaw, across), -y, _cross(jaw, along), max(x * x + y * y, 1e-9))
        weights = np.array([[goal.tilt_weight], [_ANGLE_WEIGHT]])
        jacobian[3:] = (weights * np.array([d_tilt, d_turn])) @ self._jac_rot[:, :NUM_ARM_JOINTS]
        return jacobian

    def _gripper_vectors(self, goal: _Goal) -> tuple[Triple, Triple, Triple]:
        """The gripper's point [m], its fingers' and its jaws' direction, in the world."""
        r = self._data.xmat[self._gripper].tolist()
        p = self._data.xpos[self._gripper].tolist()
        a, b, c = goal.local
        point = (
            p[0] + r[0] * a + r[1] * b + r[2] * c,
            p[1] + r[3] * a + r[4] * b + r[5] * c,
            p[2] + r[6] * a + r[7] * b + r[8] * c,
        )
        return point, (-r[2], -r[5], -r[8]), (r[0], r[3], r[6])


@dataclass(frozen=True)
class _Goal:
    """A grasp pose in plain floats."""

    point: Triple
    tilt: float
    jaw: tuple[float, float]
    out: tuple[float, float]
    local: Triple
    tilt_weight: float

    @staticmethod
    def of(target: GraspPose, local: ArrayLike, tilt_weight: float) -> _Goal:
        out = radial(target.point_w)
        return _Goal(
            point=_triple(target.point_w),
            tilt=float(target.tilt),
            jaw=(float(target.jaw_w[0]), float(target.jaw_w[1])),
            out=(float(out[0]), float(out[1])),
            local=_triple(local),
            tilt_weight=tilt_weight,
        )


def _triple(vector: ArrayLike) -> Triple:
    x, y, z = np.asarray(vector, dtype=np.float64).tolist()
    return x, y, z


def _cross(a: Triple, b: Triple) -> Triple:
    return a[1] * b[2] - a[2] * b[1], a[2] * b[0] - a[0] * b[2], a[0] * b[1] - a[1] * b[0]


def _combine(x: float, a: Triple, y: float, b: Triple, scale: float) -> Triple:
    return (x * a[0] + y * b[0]) / scale, (x * a[1] + y * b[1]) / scale, (x * a[2] + y * b[2]) / scale
