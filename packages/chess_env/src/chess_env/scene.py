"""The simulated scene: table, board, arm and a fixed pool of pieces, as one compiled MuJoCo model.

A process compiles one model. A new scene only writes state and a few model fields: pieces that are not needed
are parked asleep beside the table and hidden. ``ChessScene.place`` is the only way to begin a scene; what it
leaves in the model and the data depends on its arguments alone, never on what was simulated before.

Options. Source: measured lifts (plain friction pinch, 40 layouts): implicitfast, Newton with 10 iterations and 20
line searches, elliptic cones, impratio 10, 3 noslip iterations (slip 1.3 mm instead of 3.3); pyramidal
cones or impratio 1 drop pawns. Resting pieces sleep (a tolerance of 1e-4 never slept).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import mujoco
import numpy as np
from numpy.typing import ArrayLike, NDArray

from chess_env import board, so101
from chess_env.config import DEFAULT_PIECES, PieceKind
from chess_env.errors import SceneError
from chess_env.looks import TOP_CAMERA, WRIST_CAMERA, Looks, ModelLooks, Vector3
from chess_env.pieces import BASE_BIT, WHITE_RGBA, Piece, add_piece

SETTLE_STEPS = 72
"""Physics steps after placing: 0.3 s at 240 Hz, by when every piece rests."""
REST_HEIGHT = 0.0006
"""Pieces start this far above the board [m] and settle onto it."""
HIDDEN_GROUP = 5  # MuJoCo draws groups 0 to 2 by default
PIECE_GROUP = 0
CAMERA_NAMES = (TOP_CAMERA, WRIST_CAMERA)
# Parked pieces stand in rows: MuJoCo's near clipping plane grows with the whole scene's extent, up to the fingers.
_PARKING_X, _PARKING_STEP, _PARKING_ROW = -1.0, 0.1, 32
_SLEEP_TOLERANCE = 1e-3
_MAX_OFFSCREEN = 2048
_ARM_QPOS = slice(0, so101.NUM_JOINTS)

# Light and colours: the board differs from both piece colours; a white square must not clip at 255.
_TOP_CAMERA_POS: Vector3 = (0.64, 0.0, 0.54)
_TOP_CAMERA_QUAT = (
    0.67082039,
    0.22360680,
    0.22360680,
    0.67082039,
)  # opposite the arm, 53 degrees down; right is +y
_TOP_CAMERA_FOVY_DEG = 38.0


@dataclass(frozen=True)
class Placement:
    """A piece of the pool and where it stands.

    Attributes:
        piece_slot: Index into ``ChessScene.pieces``.
        xy_m: Position of its axis [m], world frame.
        yaw_rad: Turn about the vertical [rad]; a knight with yaw 0 looks along +y.
        rgba: Colour, each 0..1.
    """

    piece_slot: int
    xy_m: tuple[float, float]
    yaw_rad: float
    rgba: tuple[float, float, float, float] = WHITE_RGBA


class ChessScene:
    """A compiled model with the ids that its users need, and the one way to begin a scene in it.

    Attributes:
        model: The compiled model. Change it only through this class.
        kinds: Kinds of the pool.
        pieces: The pool: one target of each kind, then ``num_distractors_max`` distractors of each, kind by kind.
        active: Slots of the pieces on the board since the last ``place``.
        joint_ids, actuator_ids: Of the six joints, in ``so101.JOINT_NAMES`` order, int arrays of shape (6,).
        gripper_body_id, moving_jaw_body_id: The two jaws.
        arm_body_ids: Every body of the arm.
        camera_names: ("top", "wrist").
    """

    camera_names = CAMERA_NAMES

    def __init__(
        self,
        model: mujoco.MjModel,
        kinds: Sequence[PieceKind],
        num_distractors_max: int,
        robot: str | Path | None,
    ) -> None:
        self.model = model
        self.robot = robot
        self.kinds = tuple(kinds)
        self.num_distractors_max = num_distractors_max
        self.joint_ids = np.array([model.joint(name).id for name in so101.JOINT_NAMES])
        self.actuator_ids = np.array([model.actuator(name).id for name in so101.JOINT_NAMES])
        if list(model.jnt_qposadr[self.joint_ids]) != list(range(so101.NUM_JOINTS)):
            raise SceneError(
                f"robot={str(robot)!r}: its joints must be {', '.join(so101.JOINT_NAMES)}, in this order"
            )
        self.gripper_body_id = model.body(so101.GRIPPER_BODY).id
        self.moving_jaw_body_id = model.body(so101.MOVING_JAW_BODY).id
        self.pieces = tuple(
            self._find_piece(slot, kind) for slot, kind in enumerate(_pool(self.kinds, num_distractors_max))
        )
        self._piece_bodies = [piece.body_id for piece in self.pieces]
        self._piece_geoms = [geom for piece in self.pieces for geom in piece.geom_ids]
        self._drawn_geoms = [geom for piece in self.pieces for geom in piece.drawn_geom_ids]
        self.arm_body_ids = frozenset(range(1, model.nbody)) - set(self._piece_bodies)
        self.active: tuple[int, ...] = ()
        self._collision_bits = model.geom_contype.copy(), model.geom_conaffinity.copy()
        self._body_collision_bits = model.body_contype.copy(), model.body_conaffinity.copy()
        self._looks = ModelLooks(model, self.pieces, self.joint_ids, self.actuator_ids)
        self.apply_looks(Looks())

    def target_slot(self, kind: PieceKind) -> int:
        """Slot of the target of this kind."""
        return self.kinds.index(kind)

    def distractor_slots(self, kind: PieceKind) -> range:
        """Slots of the distractors of this kind."""
        first = len(self.kinds) + self.kinds.index(kind) * self.num_distractors_max
        return range(first, first + self.num_distractors_max)

    def place(
        self,
        data: mujoco.MjData,
        placements: Sequence[Placement],
        arm_qpos: ArrayLike,
        settle_steps: int = SETTLE_STEPS,
    ) -> None:
        """Begin a scene: reset ``data`` completely, stand the pieces on the board, and let everything settle.

        Args:
            data: A ``MjData`` of this scene's model; anything in it is overwritten.
            placements: The pieces on the board; all others are parked and hidden.
            arm_qpos: Joint angles [rad], shape (6,); the servos hold them.
            settle_steps: Physics steps to run.

        Raises:
            SceneError: an unknown or repeated slot, or an arm pose outside the joint limits.
        """
        arm = np.asarray(arm_qpos, dtype=np.float64)
        if arm.shape != (so101.NUM_JOINTS,) or not np.all(
            (arm >= so101.JOINT_LOW) & (arm <= so101.JOINT_HIGH)
        ):
            raise SceneError(f"arm_qpos={arm.tolist()}: needs 6 joint angles [rad] inside the joint limits")
        slots = [p.piece_slot for p in placements]
        if len(set(slots)) != len(slots) or not all(0 <= slot < len(self.pieces) for slot in slots):
            raise SceneError(f"piece slots {slots}: each must be different and below {len(self.pieces)}")
        mujoco.mj_resetData(self.model, data)
        self.model.geom_group[self._drawn_geoms] = HIDDEN_GROUP
        self._set_collision(slots)
        for placement in placements:
            piece = self.pieces[placement.piece_slot]
            self.model.geom_group[list(piece.drawn_geom_ids)] = PIECE_GROUP
            self.model.geom_rgba[list(piece.drawn_geom_ids)] = placement.rgba
            half = placement.yaw_rad / 2
            data.qpos[piece.qpos_adr : piece.qpos_adr + 7] = (
                *placement.xy_m, board.BOARD_TOP_Z + REST_HEIGHT, np.cos(half), 0.0, 0.0, np.sin(half),
            )  # fmt: skip
        self.active = tuple(slots)
        data.qpos[_ARM_QPOS] = arm
        data.ctrl[self.actuator_ids] = arm
        for _ in range(settle_steps):
            mujoco.mj_step(self.model, data)

    def apply_looks(self, looks: Looks) -> None:
        """Set everything that ``Looks`` names; what an earlier call set is forgotten."""
        self._looks.apply(looks)

    def grasp_point_w(self, data: mujoco.MjData) -> NDArray[np.float64]:
        """The point between the open finger tips [m], world frame, shape (3,)."""
        rotation = data.xmat[self.gripper_body_id].reshape(3, 3)
        return data.xpos[self.gripper_body_id] + rotation @ so101.GRASP_POINT

    def touched_by_arm(self, data: mujoco.MjData, slot: int) -> tuple[bool, bool]:
        """Whether the fixed and the moving jaw touch the piece in ``slot``."""
        body = self.pieces[slot].body_id
        pairs = self.model.geom_bodyid[data.contact.geom]
        others = set(pairs[(pairs == body).any(axis=1)].ravel().tolist()) if data.ncon else set()
        return self.gripper_body_id in others, self.moving_jaw_body_id in others

    def _find_piece(self, slot: int, kind: PieceKind) -> Piece:
        body = self.model.body(_piece_name(slot))
        joint = self.model.joint(_piece_name(slot))
        first, count = int(body.geomadr[0]), int(body.geomnum[0])
        geoms = tuple(range(first, first + count))
        drawn = tuple(geom for geom in geoms if self.model.geom_group[geom] == PIECE_GROUP)
        solid = tuple(geom for geom in drawn if self.model.geom_contype[geom] > 0)
        return Piece(
            slot, kind, int(body.id), int(joint.qposadr[0]), int(joint.dofadr[0]), geoms, drawn, solid
        )

    def _set_collision(self, slots: Sequence[int]) -> None:
        """A parked piece collides with nothing: that spares the broad phase a third of its time and changes no state."""
        model = self.model
        geoms = [geom for slot in slots for geom in self.pieces[slot].geom_ids]
        bodies = [self.pieces[slot].body_id for slot in slots]
        for values, original in zip((model.geom_contype, model.geom_conaffinity), self._collision_bits):
            values[self._piece_geoms] = 0
            values[geoms] = original[geoms]
        for values, original in zip((model.body_contype, model.body_conaffinity), self._body_collision_bits):
            values[self._piece_bodies] = 0
            values[bodies] = original[bodies]


def build_scene(
    *,
    num_distractors_max: int,
    kinds: Sequence[PieceKind] = DEFAULT_PIECES,
    physics_timestep: float = 1 / 240,
    image_size: tuple[int, int] | int = 256,
    offsamples: int = 0,
    robot: str | Path | None = None,
) -> ChessScene:
    """Compile the scene.

    Args:
        num_distractors_max: Distractors of each kind in the pool.
        kinds: Kinds of pieces in the pool.
        physics_timestep: Physics step [s].
        image_size: Largest image to be rendered offscreen [px], one side or (height, width).
        offsamples: Anti-aliasing samples; 0 keeps images reproducible.
        robot: An SO-101 MJCF file in place of the built-in arm.

    Raises:
        ConfigError: ``robot`` cannot be used, or its joints count otherwise than ours.
    """
    height, width = (image_size, image_size) if isinstance(image_size, int) else image_size
    spec = so101.arm_spec(robot)
    spec.modelname = "chess_pick"
    _set_options(spec, physics_timestep)
    _set_visual(spec, height, width, offsamples)
    for geom in spec.geoms:  # the arm's
        if geom.contype:
            geom.conaffinity |= BASE_BIT
    _add_table_and_board(spec)
    for slot, kind in enumerate(_pool(kinds, num_distractors_max)):
        row, place = divmod(slot, _PARKING_ROW)
        pos = [_PARKING_X - _PARKING_STEP * place, _PARKING_STEP * row, 0.0]
        body = spec.worldbody.add_body(name=_piece_name(slot), pos=pos)
        body.add_freejoint(name=_piece_name(slot))
        body.sleep = mujoco.mjtSleepPolicy.mjSLEEP_INIT
        add_piece(body, kind)
    spec.worldbody.add_camera(
        name=TOP_CAMERA, pos=_TOP_CAMERA_POS, quat=_TOP_CAMERA_QUAT, fovy=_TOP_CAMERA_FOVY_DEG
    )
    model = spec.compile()
    if robot is not None:
        so101.check_conventions(model, robot)
    return ChessScene(model, kinds, num_distractors_max, robot)


def _set_options(spec: mujoco.MjSpec, physics_timestep: float) -> None:
    option = spec.option
    option.timestep = physics_timestep
    option.integrator = mujoco.mjtIntegrator.mjINT_IMPLICITFAST
    option.solver = mujoco.mjtSolver.mjSOL_NEWTON
    option.cone = mujoco.mjtCone.mjCONE_ELLIPTIC
    option.impratio = 10
    option.iterations, option.ls_iterations, option.noslip_iterations = 10, 20, 3
    option.enableflags |= int(mujoco.mjtEnableBit.mjENBL_SLEEP)
    option.sleep_tolerance = _SLEEP_TOLERANCE


def _set_visual(spec: mujoco.MjSpec, height: int, width: int, offsamples: int) -> None:
    visual = spec.visual
    visual.quality.offsamples = offsamples
    visual.quality.shadowsize = 0
    visual.quality.numslices, visual.quality.numstacks, visual.quality.numquads = 14, 7, 1
    visual.global_.offheight, visual.global_.offwidth = height, width
    visual.headlight.specular = [0.0, 0.0, 0.0]
    visual.map.znear = 0.005


def _add_table_and_board(spec: mujoco.MjSpec) -> None:
    world = spec.worldbody
    world.add_light(
        name="sun", type=mujoco.mjtLightType.mjLIGHT_DIRECTIONAL, castshadow=False, specular=[0.1, 0.1, 0.1]
    )
    box, plane, mesh = mujoco.mjtGeom.mjGEOM_BOX, mujoco.mjtGeom.mjGEOM_PLANE, mujoco.mjtGeom.mjGEOM_MESH
    world.add_geom(name="table", type=plane, size=[2.0, 2.0, 0.01], rgba=[0.3, 0.4, 0.4, 1])
    top, half, border = board.BOARD_TOP_Z, board.HALF_WIDTH, board.BORDER_WIDTH
    x, y = board.CENTER_XY
    world.add_geom(
        name="board", type=box, size=[half + border, half + border, top / 2], pos=[x, y, top / 2],
        condim=3, friction=[0.8, 0.005, 0.0001],
    )  # fmt: skip
    # Drawn only: a dark plate, and the 32 light squares as one mesh of thin tiles on it.
    drawn = {"contype": 0, "conaffinity": 0, "mass": 0.0}
    world.add_geom(name="dark_squares", type=box, size=[half, half, 1e-4], pos=[x, y, top], **drawn)
    tiles = spec.add_mesh(name="light_squares")
    tiles.inertia = mujoco.mjtMeshInertia.mjMESH_INERTIA_SHELL
    vertices, faces = _light_square_tiles(top + 3e-4, thickness=2e-4)
    tiles.uservert, tiles.userface = vertices.ravel(), faces.ravel()
    world.add_geom(name="light_squares", type=mesh, meshname="light_squares", **drawn)


def _light_square_tiles(z_top: float, thickness: float) -> tuple[NDArray[np.float64], NDArray[np.int32]]:
    """Vertices (n, 3) and triangles (m, 3) of the 32 light squares' boxes without their bottoms; h1 is light."""
    corners = np.array([[-1, -1], [1, -1], [1, 1], [-1, 1]]) * board.SQUARE_SIZE / 2
    sides = [f for i in range(4) for f in ((i, (i + 1) % 4, 4 + (i + 1) % 4), (i, 4 + (i + 1) % 4, 4 + i))]
    box = np.array([(4, 5, 6), (4, 6, 7), *sides])
    vertices: list[NDArray[np.float64]] = []
    faces: list[NDArray[np.int64]] = []
    for square in board.SQUARES:
        if ("abcdefgh".index(square[0]) + int(square[1])) % 2 == 1:  # a1, file 0 and rank 1, is dark
            continue
        xy = board.square_center(square) + corners
        bottom = np.column_stack([xy, np.full(4, z_top - thickness)])
        upper = np.column_stack([xy, np.full(4, z_top)])
        faces.append(box + 8 * len(vertices))
        vertices.append(np.concatenate([bottom, upper]))
    return np.concatenate(vertices), np.concatenate(faces).astype(np.int32)


def _pool(kinds: Sequence[PieceKind], num_distractors_max: int) -> list[PieceKind]:
    """Kind of every slot: the targets, then the distractors kind by kind."""
    return [*kinds, *(kind for kind in kinds for _ in range(num_distractors_max))]


def _piece_name(slot: int) -> str:
    return f"piece_{slot}"
