"""What may differ between scenes and is no state: light, colours, cameras, friction, masses and gains.

The model is compiled once; every scene writes these fields of it anew, from the compiled values and ``Looks`` alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mujoco
import numpy as np
from numpy.typing import NDArray

from chess_env import board, so101_looks
from chess_env.pieces import Piece

Rgb = tuple[float, float, float]
Vector3 = tuple[float, float, float]

TOP_CAMERA = "top"
WRIST_CAMERA = "wrist"


@dataclass(frozen=True)
class Looks:
    """What may differ between scenes and is no state: light, colours (0..1), camera jitter, factors of the physics."""

    headlight_ambient: float = 0.35
    headlight_diffuse: float = 0.15
    light_diffuse: float = 0.40
    light_position_m: Vector3 = (0.15, -0.40, 1.20)
    """The light is directional: from here to the board's centre."""
    light_square_rgb: Rgb = (0.70, 0.55, 0.36)
    dark_square_rgb: Rgb = (0.36, 0.22, 0.13)
    border_rgb: Rgb = (0.25, 0.16, 0.10)
    table_rgb: Rgb = (0.33, 0.38, 0.42)
    plastic_rgb: Rgb = so101_looks.PLASTIC_RGBA[:3]
    top_offset_m: Vector3 = (0.0, 0.0, 0.0)
    """Shift of the top camera [m], world frame."""
    top_turn_rad: Vector3 = (0.0, 0.0, 0.0)
    """Turn of the top camera about its own axes, a rotation vector [rad]."""
    wrist_offset_m: Vector3 = (0.0, 0.0, 0.0)
    """Shift of the wrist camera [m], gripper frame."""
    wrist_turn_rad: Vector3 = (0.0, 0.0, 0.0)
    piece_friction_scale: float = 1.0
    """Sliding friction of pieces on the board and on each other, as a factor. The fingers keep their own."""
    piece_mass_scale: float = 1.0
    servo_gain_scale: float = 1.0
    joint_damping_scale: float = 1.0


class ModelLooks:
    """Writes ``Looks`` into one compiled model."""

    def __init__(
        self,
        model: mujoco.MjModel,
        pieces: Sequence[Piece],
        joint_ids: NDArray[np.int64],
        actuator_ids: NDArray[np.int64],
    ) -> None:
        self._model = model
        self._plastic = [
            g for g in range(model.ngeom) if model.geom(g).name.startswith(so101_looks.PLASTIC_PREFIX)
        ]
        self._cameras = {
            name: (model.camera(name).id, model.camera(name).pos.copy(), model.camera(name).quat.copy())
            for name in (TOP_CAMERA, WRIST_CAMERA)
        }
        self._geoms = np.array([g for piece in pieces for g in piece.geom_ids], dtype=np.int64)
        self._friction = model.geom_friction[self._geoms, 0].copy()
        bodies = np.array([piece.body_id for piece in pieces], dtype=np.int64)
        dofs = np.array([piece.dof_adr + i for piece in pieces for i in range(6)], dtype=np.int64)
        # What the compiler derives from a free body's mass is proportional to it or to its inverse.
        self._of_mass = {
            name: (ids, getattr(model, name)[ids].copy(), power)
            for name, ids, power in (
                ("body_mass", bodies, 1), ("body_inertia", bodies, 1), ("body_subtreemass", bodies, 1),
                ("dof_M0", dofs, 1), ("body_invweight0", bodies, -1), ("dof_invweight0", dofs, -1),
            )
        }  # fmt: skip
        self._total_mass, self._piece_mass = (
            float(model.body_subtreemass[0]),
            float(model.body_mass[bodies].sum()),
        )
        self._actuators, self._arm_dofs = actuator_ids, model.jnt_dofadr[joint_ids]
        self._gain = model.actuator_gainprm[self._actuators].copy()
        self._bias = model.actuator_biasprm[self._actuators].copy()
        self._damping = model.dof_damping[self._arm_dofs].copy()

    def apply(self, looks: Looks) -> None:
        """Set everything that ``looks`` names; what an earlier call set is forgotten."""
        model = self._model
        model.vis.headlight.ambient[:] = looks.headlight_ambient
        model.vis.headlight.diffuse[:] = looks.headlight_diffuse
        light = model.light("sun").id
        model.light_diffuse[light] = looks.light_diffuse
        toward = np.array([*board.CENTER_XY, 0.0]) - np.array(looks.light_position_m)
        model.light_pos[light] = looks.light_position_m
        model.light_dir[light] = toward / np.linalg.norm(toward)
        for name, rgb in (
            ("light_squares", looks.light_square_rgb), ("dark_squares", looks.dark_square_rgb),
            ("board", looks.border_rgb), ("table", looks.table_rgb),
        ):  # fmt: skip
            model.geom_rgba[model.geom(name).id, :3] = rgb
        model.geom_rgba[self._plastic, :3] = looks.plastic_rgb
        self._turn_camera(TOP_CAMERA, looks.top_offset_m, looks.top_turn_rad)
        self._turn_camera(WRIST_CAMERA, looks.wrist_offset_m, looks.wrist_turn_rad)
        model.geom_friction[self._geoms, 0] = self._friction * looks.piece_friction_scale
        for name, (ids, values, power) in self._of_mass.items():
            getattr(model, name)[ids] = values * looks.piece_mass_scale**power
        model.body_subtreemass[0] = self._total_mass + (looks.piece_mass_scale - 1.0) * self._piece_mass
        model.actuator_gainprm[self._actuators] = self._gain * looks.servo_gain_scale
        model.actuator_biasprm[self._actuators] = self._bias * looks.servo_gain_scale
        model.dof_damping[self._arm_dofs] = self._damping * looks.joint_damping_scale

    def _turn_camera(self, name: str, offset: Vector3, turn: Vector3) -> None:
        camera, pos, quat = self._cameras[name]
        angle = float(np.linalg.norm(turn))
        rotation, turned = np.array([1.0, 0.0, 0.0, 0.0]), np.empty(4)
        if angle > 0:
            mujoco.mju_axisAngle2Quat(rotation, np.array(turn) / angle, angle)
        mujoco.mju_mulQuat(turned, quat, rotation)
        self._model.cam_pos[camera] = pos + np.array(offset)
        self._model.cam_quat[camera] = turned
