"""Forward and inverse kinematics of the arm: damped least squares with the analytic Jacobian.

The arm has five joints before the gripper, so a grasp pose has five numbers: where a point of the gripper is (3),
how far the fingers tilt from the vertical, outwards (1), and the horizontal direction in which the jaws
close (1). World frame, [m], [rad].
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import mujoco
import numpy as np
from numpy.typing import ArrayLike, NDArray

from chess_env import so101

NUM_ARM_JOINTS = 5
_LIMIT_MARGIN = 0.01  # solutions stay this far inside the joint limits [rad]
# One residual unit is 10 mm or 1/3 rad: a millimetre weighs as much as 2 degrees.
_POSITION_WEIGHT, _ANGLE_WEIGHT = 100.0, 3.0
_DONE_COST = 1e-6
_MAX_ITERATIONS = 40


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

    def solve(self, target: GraspPose, local: ArrayLike, start: ArrayLike) -> Solution:
        """Joint angles that bring the gripper's point ``local`` [m] to ``target``, searched from ``start`` [rad].

        Never raises for an unreachable target: the caller reads ``error``.
        Source: Levenberg-Marquardt, the damping adapted as in Nocedal and Wright (2006), section 10.3.
        """
        point_local = np.asarray(local, dtype=np.float64)
        out = np.array([*radial(target.point_w), 0.0])
        normal = np.array([-target.jaw_w[1], target.jaw_w[0], 0.0])
        q = np.clip(np.asarray(start, dtype=np.float64)[:NUM_ARM_JOINTS], self._low, self._high)
        residual, cost = self._residual(q, target, point_local, out, normal)
        damping = 1e-3
        for _ in range(_MAX_ITERATIONS):
            if cost < _DONE_COST:
                break
            jacobian = self._jacobian(point_local, out, normal)
            gradient, hessian = jacobian.T @ residual, jacobian.T @ jacobian
            for _ in range(6):
                step = np.linalg.solve(hessian + damping * np.eye(NUM_ARM_JOINTS), gradient)
                candidate = np.clip(q - step, self._low, self._high)
                new_residual, new_cost = self._residual(candidate, target, point_local, out, normal)
                if new_cost < cost:
                    break
                damping *= 5
            else:
                break
            gain = cost - new_cost
            q, residual, cost = candidate, new_residual, new_cost
            if gain < 1e-9:
                break
            damping = max(damping * 0.3, 1e-6)
        return Solution(q, float(np.linalg.norm(residual[:3])) / _POSITION_WEIGHT, float(cost))

    def _residual(
        self,
        q: NDArray[np.float64],
        target: GraspPose,
        local: NDArray[np.float64],
        out: NDArray[np.float64],
        normal: NDArray[np.float64],
    ) -> tuple[NDArray[np.float64], float]:
        data = self._data
        data.qpos[:NUM_ARM_JOINTS] = q
        mujoco.mj_kinematics(self.model, data)
        rotation = data.xmat[self._gripper].reshape(3, 3)
        down, jaw = -rotation[:, 2], rotation[:, 0]
        residual = np.empty(5)
        residual[:3] = (data.xpos[self._gripper] + rotation @ local - target.point_w) * _POSITION_WEIGHT
        residual[3] = (np.arctan2(down @ out, -down[2]) - target.tilt) * _ANGLE_WEIGHT
        # The angle in the horizontal plane, and not its sine: the opposite direction is no solution.
        along = jaw[0] * target.jaw_w[0] + jaw[1] * target.jaw_w[1]
        residual[4] = np.arctan2(jaw @ normal, along) * _ANGLE_WEIGHT
        return residual, float(residual @ residual)

    def _jacobian(
        self, local: NDArray[np.float64], out: NDArray[np.float64], normal: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Derivative (5, 5) of the residual at the data's joint angles: d(rotation column)/dq = omega x column."""
        data = self._data
        rotation = data.xmat[self._gripper].reshape(3, 3)
        point = data.xpos[self._gripper] + rotation @ local
        mujoco.mj_comPos(self.model, data)
        mujoco.mj_jac(self.model, data, self._jac_pos, self._jac_rot, point, self._gripper)
        spin = self._jac_rot[:, :NUM_ARM_JOINTS]
        down, jaw = -rotation[:, 2], rotation[:, 0]
        d_down, d_jaw = _cross_columns(spin, down), _cross_columns(spin, jaw)
        jacobian = np.empty((5, NUM_ARM_JOINTS))
        jacobian[:3] = self._jac_pos[:, :NUM_ARM_JOINTS] * _POSITION_WEIGHT
        y, x = down @ out, -down[2]
        jacobian[3] = (x * (out @ d_down) + y * d_down[2]) / (x * x + y * y) * _ANGLE_WEIGHT
        forward = np.array([normal[1], -normal[0], 0.0])
        y, x = jaw @ normal, jaw @ forward
        jacobian[4] = (
            (x * (normal @ d_jaw) - y * (forward @ d_jaw)) / max(x * x + y * y, 1e-9) * _ANGLE_WEIGHT
        )
        return jacobian


def _cross_columns(spin: NDArray[np.float64], vector: NDArray[np.float64]) -> NDArray[np.float64]:
    """omega x vector for every column omega of ``spin`` (3, n); far faster than ``np.cross`` on small arrays."""
    x, y, z = vector
    return np.stack([spin[1] * z - spin[2] * y, spin[2] * x - spin[0] * z, spin[0] * y - spin[1] * x])
