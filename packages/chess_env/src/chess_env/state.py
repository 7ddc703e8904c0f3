"""The privileged state as a named vector, for libraries that learn without images.

World frame, lengths [m]. The vector is: the target, the gripper, the target relative to the jaws, then one block for
each distractor that the environment allows; the block of a distractor that is not on the board is zero.
"""

import mujoco
import numpy as np
from numpy.typing import NDArray

from chess_env.config import DEFAULT_PIECES, PieceKind
from chess_env.pieces import PIECE_KINDS
from chess_env.scene import ChessScene
from chess_env.so101 import gripper_opening

POSITION_LIMIT_M = 2.0  # nothing leaves the table by more; values beyond saturate
_XYZ = ("x", "y", "z")
_FIXED_NAMES = (
    *(f"target_position_{a}" for a in _XYZ),
    *(f"target_x_axis_{a}" for a in _XYZ),
    *(f"target_z_axis_{a}" for a in _XYZ),
    *(f"grasp_point_{a}" for a in _XYZ),
    *(f"gripper_x_axis_{a}" for a in _XYZ),
    *(f"gripper_z_axis_{a}" for a in _XYZ),
    *(f"target_from_grasp_point_{a}" for a in _XYZ),
    "jaw_opening",
)
_DISTRACTOR_NAMES = ("present", "position_x", "position_y", "position_z", "upright")


def state_names(num_distractors_max: int, kinds: tuple[PieceKind, ...] = DEFAULT_PIECES) -> tuple[str, ...]:
    """Name of each component; the target's kind is one of ``kinds``, of which the first is all zeros."""
    of_kind = tuple(f"target_is_{kind}" for kind in kinds[1:])
    return (
        _FIXED_NAMES
        + of_kind
        + tuple(f"distractor_{i}_{name}" for i in range(num_distractors_max) for name in _DISTRACTOR_NAMES)
    )


def read_state(
    scene: ChessScene,
    data: mujoco.MjData,
    target_slot: int,
    distractor_slots: tuple[int, ...],
    num_distractors_max: int,
) -> NDArray[np.float32]:
    """The vector, float32, shape (len(state_names),)."""
    target, jaw = scene.pieces[target_slot].body_id, scene.gripper_body_id
    target_r, jaw_r = data.xmat[target].reshape(3, 3), data.xmat[jaw].reshape(3, 3)
    grasp = scene.grasp_point_w(data)
    kind = scene.pieces[target_slot].kind
    others = np.zeros((num_distractors_max, len(_DISTRACTOR_NAMES)))
    for row, slot in enumerate(distractor_slots):
        body = scene.pieces[slot].body_id
        others[row] = (1.0, *data.xpos[body], data.xmat[body][8])
    vector = np.concatenate(
        [
            data.xpos[target],
            target_r[:, 0],
            target_r[:, 2],
            grasp,
            jaw_r[:, 0],
            jaw_r[:, 2],
            data.xpos[target] + PIECE_KINDS[kind].grasp_height * target_r[:, 2] - grasp,
            [gripper_opening(float(data.qpos[5]))],
            [float(kind == other) for other in scene.kinds[1:]],
            others.ravel(),
        ]
    )
    return np.clip(vector, -POSITION_LIMIT_M, POSITION_LIMIT_M).astype(np.float32)
