"""The compiled scene: what place() leaves behind, how pieces rest, where things are and how they look."""

import dataclasses
import hashlib

import mujoco
import numpy as np
import pytest
from python_process import run_python

from chess_env import board, so101
from chess_env.config import PIECES
from chess_env.errors import ConfigError, SceneError
from chess_env.looks import Looks
from chess_env.pieces import BLACK_RGBA, PIECE_KINDS, PIECE_MASS
from chess_env.rendering import OffscreenRenderer
from chess_env.scene import HIDDEN_GROUP, PIECE_GROUP, ChessScene, Placement, build_scene

SQUARES = ("e4", "d4", "b2", "h8", "a7", "f3", "g6", "c5")


@pytest.fixture(scope="module")
def scene() -> ChessScene:
    return build_scene(num_distractors_max=4)


@pytest.fixture(scope="module")
def all_kinds() -> ChessScene:
    return build_scene(num_distractors_max=1, kinds=PIECES)


def placements(scene: ChessScene, num: int = 8) -> list[Placement]:
    slots = [0, *scene.distractor_slots("pawn"), *scene.distractor_slots("knight")][:num]
    return [
        Placement(
            slot, tuple(board.square_center(square)), 0.7 * slot, BLACK_RGBA if slot else (0.9, 0.9, 0.9, 1.0)
        )
        for slot, square in zip(slots, SQUARES)
    ]


def state_of(scene: ChessScene, data: mujoco.MjData) -> bytes:
    size = mujoco.mj_stateSize(scene.model, mujoco.mjtState.mjSTATE_INTEGRATION)
    state = np.empty(size)
    mujoco.mj_getState(scene.model, data, state, mujoco.mjtState.mjSTATE_INTEGRATION)
    return state.tobytes()


def test_place_is_bit_identical_whatever_came_before(scene):
    data = mujoco.MjData(scene.model)
    scene.place(data, placements(scene), so101.HOME_QPOS)
    first = state_of(scene, data)
    group, rgba = scene.model.geom_group.copy(), scene.model.geom_rgba.copy()
    data.ctrl[:] = [1.0, 0.5, 0.5, 0.5, 0.5, 1.0]
    data.qfrc_applied[:] = 0.1
    data.xfrc_applied[:] = 0.1
    mujoco.mj_step(scene.model, data, 300)
    scene.place(data, placements(scene, 2), so101.HOME_QPOS + 0.1)
    scene.place(data, placements(scene), so101.HOME_QPOS)
    assert state_of(scene, data) == first
    np.testing.assert_array_equal(scene.model.geom_group, group)
    np.testing.assert_array_equal(scene.model.geom_rgba, rgba)
    other = build_scene(num_distractors_max=4)
    other_data = mujoco.MjData(other.model)
    other.place(other_data, placements(other), so101.HOME_QPOS)
    assert state_of(other, other_data) == first


def test_place_is_bit_identical_in_another_process(scene):
    data = mujoco.MjData(scene.model)
    chosen = placements(scene)
    scene.place(data, chosen, so101.HOME_QPOS)
    code = (
        "import hashlib, mujoco, numpy\n"
        "from chess_env import so101\n"
        "from chess_env.scene import Placement, build_scene\n"
        "scene = build_scene(num_distractors_max=4)\n"
        "data = mujoco.MjData(scene.model)\n"
        f"chosen = [Placement(*values) for values in {[(p.piece_slot, tuple(map(float, p.xy_m)), p.yaw_rad, p.rgba) for p in chosen]!r}]\n"
        "scene.place(data, chosen, so101.HOME_QPOS)\n"
        "print(hashlib.sha256(data.qpos.tobytes() + data.qvel.tobytes()).hexdigest())\n"
    )
    expected = hashlib.sha256(data.qpos.tobytes() + data.qvel.tobytes()).hexdigest()
    assert run_python(code).stdout.strip() == expected


def test_placed_pieces_stand_where_they_were_put_and_sleep(scene):
    data = mujoco.MjData(scene.model)
    chosen = placements(scene)
    scene.place(data, chosen, so101.HOME_QPOS)
    for placement in chosen:
        piece = scene.pieces[placement.piece_slot]
        np.testing.assert_allclose(data.xpos[piece.body_id][:2], placement.xy_m, atol=2e-4)
        assert data.xpos[piece.body_id][2] == pytest.approx(board.BOARD_TOP_Z, abs=2e-4)
        assert data.xmat[piece.body_id].reshape(3, 3)[2, 2] > 0.99999
        yaw = 2 * np.arctan2(data.qpos[piece.qpos_adr + 6], data.qpos[piece.qpos_adr + 3])
        assert np.cos(yaw - placement.yaw_rad) > 0.9999
    assert data.ntree_awake == 1  # the arm
    np.testing.assert_allclose(data.qpos[:6], so101.HOME_QPOS, atol=0.02)


def test_unused_pieces_are_parked_asleep_and_hidden(scene):
    data = mujoco.MjData(scene.model)
    scene.place(data, placements(scene, 3), so101.HOME_QPOS)
    mujoco.mj_step(scene.model, data, 240)
    for piece in scene.pieces:
        groups = set(scene.model.geom_group[list(piece.drawn_geom_ids)])
        if piece.slot in scene.active:
            assert groups == {PIECE_GROUP}
        else:
            assert groups == {HIDDEN_GROUP}
            assert data.xpos[piece.body_id][0] < -0.9
            np.testing.assert_array_equal(data.qvel[piece.dof_adr : piece.dof_adr + 6], 0)


def test_a_sleeping_piece_wakes_when_it_is_pushed(scene):
    data = mujoco.MjData(scene.model)
    scene.place(data, placements(scene, 1), so101.HOME_QPOS)
    body = scene.pieces[0].body_id
    before = data.xpos[body].copy()
    data.xfrc_applied[body, 0] = 0.5
    mujoco.mj_step(scene.model, data, 60)
    assert np.linalg.norm(data.xpos[body] - before) > 0.005


@pytest.mark.parametrize(
    ("slots", "arm", "message"),
    [
        ([0, 0], so101.HOME_QPOS, r"slots \[0, 0\]"),
        ([99], so101.HOME_QPOS, r"below 10"),
        ([0], np.zeros(5), r"6 joint angles"),
        ([0], np.full(6, 5.0), r"inside the joint limits"),
        ([0], np.full(6, np.nan), r"inside the joint limits"),
    ],
)
def test_place_refuses_what_it_cannot_place(scene, slots, arm, message):
    with pytest.raises(SceneError, match=message):
        scene.place(mujoco.MjData(scene.model), [Placement(slot, (0.3, 0.0), 0.0) for slot in slots], arm)


def test_looks_replace_each_other_completely(scene):
    fields = (
        "geom_rgba", "geom_friction", "cam_pos", "cam_quat", "light_diffuse", "light_dir", "body_mass", "body_inertia",
        "body_subtreemass", "body_invweight0", "dof_M0", "dof_invweight0", "actuator_gainprm", "actuator_biasprm",
        "dof_damping",
    )  # fmt: skip
    scene.apply_looks(Looks())
    nominal = {name: getattr(scene.model, name).copy() for name in fields}
    scene.apply_looks(
        Looks(
            0.1,
            0.1,
            0.9,
            (1.0, 1.0, 1.0),
            *[(0.1, 0.2, 0.3)] * 5,
            *[(0.01, 0.02, 0.03)] * 4,
            piece_friction_scale=0.5,
            piece_mass_scale=0.5,
            servo_gain_scale=0.5,
            joint_damping_scale=0.5,
        )
    )
    for name in fields:
        assert not np.array_equal(getattr(scene.model, name), nominal[name]), name
    scene.apply_looks(Looks())
    for name in fields:
        np.testing.assert_array_equal(getattr(scene.model, name), nominal[name])


def test_every_field_of_looks_changes_the_model(scene):
    def fingerprint() -> bytes:
        model = scene.model
        arrays = (
            model.geom_rgba,
            model.geom_friction,
            model.cam_pos,
            model.cam_quat,
            model.light_diffuse,
            model.light_dir,
            model.body_mass,
            model.actuator_gainprm,
            model.dof_damping,
        )
        head = model.vis.headlight
        return b"".join(np.asarray(a).tobytes() for a in (*arrays, head.ambient, head.diffuse))

    scene.apply_looks(Looks())
    nominal = fingerprint()
    for field in dataclasses.fields(Looks):
        value = (0.11, 0.12, 0.13) if isinstance(field.default, tuple) else 0.77
        scene.apply_looks(Looks(**{field.name: value}))
        assert fingerprint() != nominal, field.name
    scene.apply_looks(Looks())


def test_squares_are_where_hand_arithmetic_puts_them():
    np.testing.assert_allclose(board.square_center("a1"), [0.14, 0.14])
    np.testing.assert_allclose(board.square_center("h8"), [0.42, -0.14])
    np.testing.assert_allclose(board.square_center("e4"), [0.26, -0.02])
    assert len(board.SQUARES) == 64 and len(board.REACHABLE_SQUARES) == 58
    for square in board.SQUARES:
        assert board.square_at(board.square_center(square) + np.array([0.019, -0.019])) == square
    assert board.square_at(np.array([0.1, 0.0])) is None
    assert board.square_at(np.array([0.3, 0.17])) is None


@pytest.mark.parametrize("square", ["i1", "a9", "a", "", "E4"])
def test_unknown_square_is_named(square):
    with pytest.raises(ConfigError, match="e4"):
        board.square_center(square)


def project(scene: ChessScene, data: mujoco.MjData, camera: str, point_w: np.ndarray) -> np.ndarray:
    """Pinhole projection to (column, row) in [0, 1] of a square image; independent of the renderer."""
    cam = data.camera(camera)
    x, y, z = cam.xmat.reshape(3, 3).T @ (point_w - cam.xpos)
    assert z < 0
    scale = 0.5 / np.tan(np.radians(float(scene.model.camera(camera).fovy[0])) / 2)
    return np.array([0.5 + scale * x / -z, 0.5 - scale * y / -z])


def test_top_camera_sees_the_whole_board_and_the_tips(scene):
    data = mujoco.MjData(scene.model)
    scene.place(data, [], so101.HOME_QPOS)
    corners = {square: project(scene, data, "top", np.array([*board.square_center(square), 0.012])) for square in
               ("a1", "h1", "a8", "h8")}  # fmt: skip
    for corner in corners.values():
        assert np.all((corner > 0.04) & (corner < 0.96))
    assert corners["a8"][1] > corners["a1"][1]  # the arm's side is up in the image
    assert corners["a1"][0] > corners["h1"][0]  # the camera looks at the arm: its left is on the right
    tips = project(scene, data, "top", scene.grasp_point_w(data))
    assert np.all((tips > 0) & (tips < 1))


def test_near_plane_stays_before_the_fingers_whatever_the_pool():
    """At 24 mm, the default pool's plane, the wrist camera shows whole fingers; at 55 mm it cuts them open."""
    for kinds, most in ((("pawn",), 0), (("pawn", "knight"), 15), (PIECES, 15)):
        model = build_scene(num_distractors_max=most, kinds=kinds).model
        assert model.vis.map.znear * model.stat.extent < 0.025


def test_wrist_camera_sees_both_tips_and_the_piece_below(scene):
    data = mujoco.MjData(scene.model)
    scene.place(data, [], so101.HOME_QPOS)
    gripper, jaw = data.body("gripper"), data.body("moving_jaw_so101_v1")
    fixed_tip = gripper.xpos + gripper.xmat.reshape(3, 3) @ np.array([-0.010, 0, -0.100])
    moving_tip = jaw.xpos + jaw.xmat.reshape(3, 3) @ np.array([-0.010, -0.078, 0.019])
    piece = gripper.xpos + gripper.xmat.reshape(3, 3) @ np.array([0.006, 0, -0.150])
    for point in (fixed_tip, moving_tip, piece):
        seen = project(scene, data, "wrist", point)
        assert np.all((seen > 0.02) & (seen < 0.98))


def test_images_show_the_target_where_it_projects_and_do_not_clip(scene):
    data = mujoco.MjData(scene.model)
    scene.apply_looks(Looks())
    square = "d5"
    scene.place(data, [Placement(0, tuple(board.square_center(square)), 0.0)], so101.HOME_QPOS)
    renderer = OffscreenRenderer(scene.model, (256, 256))
    image = renderer.render(data, "top", (256, 256)).astype(int)
    renderer.close()
    column, row = project(scene, data, "top", data.xpos[scene.pieces[0].body_id] + [0, 0, 0.040]) * 256
    assert image[int(row), int(column)].min() > 150
    column, row = project(scene, data, "top", np.array([*board.square_center("a1"), 0.012])) * 256
    assert 30 < image[int(row), int(column)].max() < 130  # a1 is dark
    column, row = project(scene, data, "top", np.array([*board.square_center("h1"), 0.012])) * 256
    assert 130 < image[int(row), int(column)].max() < 220  # h1 is light
    assert image.max() < 255


def drawn_top(model: mujoco.MjModel, geom: int, pos: np.ndarray, rotation: np.ndarray) -> float:
    """Highest point of a primitive that stands at ``pos`` [m]; from its half sizes, independent of the shapes' table."""
    size, kind = model.geom_size[geom], model.geom_type[geom]
    up = np.abs(rotation[2])
    if kind == mujoco.mjtGeom.mjGEOM_SPHERE:
        return float(pos[2] + size[0])
    if kind == mujoco.mjtGeom.mjGEOM_ELLIPSOID:
        return float(pos[2] + np.linalg.norm(rotation[2] * size))
    if kind == mujoco.mjtGeom.mjGEOM_CAPSULE:
        return float(pos[2] + size[0] + up[2] * size[1])
    if kind == mujoco.mjtGeom.mjGEOM_CYLINDER:
        return float(pos[2] + up[2] * size[1] + np.hypot(up[0], up[1]) * size[0])
    return float(pos[2] + up @ size)


def test_heights_follow_staunton_and_are_those_that_the_table_says(all_kinds):
    heights = {kind: shape.height for kind, shape in PIECE_KINDS.items()}
    assert sorted(heights, key=heights.__getitem__) == ["rook", "pawn", "knight", "bishop", "queen", "king"]
    assert (heights["pawn"], heights["knight"]) == (0.0485, 0.055)
    assert 0.075 <= heights["king"] <= 0.080
    data = mujoco.MjData(all_kinds.model)
    for slot, kind in enumerate(all_kinds.kinds):
        all_kinds.place(data, [Placement(slot, (0.30, 0.0), 0.0)], so101.HOME_QPOS)
        tops = [
            drawn_top(all_kinds.model, geom, data.geom_xpos[geom], data.geom_xmat[geom].reshape(3, 3))
            for geom in all_kinds.pieces[slot].drawn_geom_ids
        ]
        assert max(tops) - board.BOARD_TOP_Z == pytest.approx(heights[kind], abs=5e-4), kind


def test_pieces_weigh_what_they_should(all_kinds):
    model = all_kinds.model
    masses = [model.body_mass[piece.body_id] for piece in all_kinds.pieces[: len(all_kinds.kinds)]]
    np.testing.assert_allclose(masses, [PIECE_KINDS[kind].mass for kind in all_kinds.kinds])
    assert masses[0] == masses[1] == pytest.approx(PIECE_MASS) and max(masses) == masses[-1] < 0.04
    for (
        piece
    ) in all_kinds.pieces:  # the weight is in the base, and no principal moment exceeds the others' sum
        assert 0.004 < model.body_ipos[piece.body_id][2] < 0.4 * PIECE_KINDS[piece.kind].height
        moments = np.sort(model.body_inertia[piece.body_id])
        assert moments[0] > 0 and moments[2] <= moments[0] + moments[1] + 1e-12


@pytest.mark.parametrize("slot", range(6))
def test_every_kind_stands_asleep_and_returns_from_a_lean_of_ten_degrees(all_kinds, slot):
    data = mujoco.MjData(all_kinds.model)
    all_kinds.place(data, [Placement(slot, (0.30, 0.0), 0.4)], so101.HOME_QPOS)
    piece = all_kinds.pieces[slot]
    assert data.ntree_awake == 1  # the arm
    assert data.xpos[piece.body_id][2] == pytest.approx(board.BOARD_TOP_Z, abs=2e-4)
    half = np.radians(10) / 2
    data.qpos[piece.qpos_adr + 2 : piece.qpos_adr + 7] = [
        board.BOARD_TOP_Z + 0.003,
        np.cos(half),
        np.sin(half),
        0,
        0,
    ]
    mujoco.mj_step(all_kinds.model, data, 480)
    assert data.xmat[piece.body_id][8] > 0.9999


def test_heads_pass_between_the_open_jaws_and_below_the_hand():
    """The hand's box begins 66 mm above the finger tips (its lower side at z -0.037 of the gripper frame)."""
    for kind, shape in PIECE_KINDS.items():
        assert shape.height - shape.grasp_height < 0.066 - 0.008, kind
        for part in shape.parts:
            if part.pos[2] > shape.grasp_height + 0.008 and part.collides and kind != "knight":
                assert max(part.size[:1]) < shape.grasp_radius + 0.006, kind


def test_scaled_masses_leave_what_the_compiler_would_derive(all_kinds):
    names = ("body_mass", "body_inertia", "body_subtreemass", "dof_M0", "body_invweight0", "dof_invweight0")
    all_kinds.apply_looks(Looks(piece_mass_scale=1.25))
    scaled = {name: getattr(all_kinds.model, name).copy() for name in names}
    mujoco.mj_setConst(all_kinds.model, mujoco.MjData(all_kinds.model))
    for name in names:
        np.testing.assert_allclose(
            scaled[name], getattr(all_kinds.model, name), rtol=1e-6, atol=1e-12, err_msg=name
        )
    all_kinds.apply_looks(Looks())
    first = all_kinds.pieces[0].body_id
    assert all_kinds.model.body_mass[first] == pytest.approx(PIECE_MASS)


@pytest.mark.parametrize("slot", [0, 1])
def test_bases_touch_each_other_and_the_arm(scene, slot):
    data = mujoco.MjData(scene.model)
    scene.place(data, [Placement(slot, (0.30, 0.0), 0.0), Placement(2, (0.34, 0.0), 0.0)], so101.HOME_QPOS)
    body = scene.pieces[slot].body_id
    data.xfrc_applied[body, 0] = 0.3  # along the board into the other one
    mujoco.mj_step(scene.model, data, 40)
    other = scene.pieces[2].body_id
    assert data.xpos[other][0] > 0.341
    assert data.xpos[other][0] - data.xpos[body][0] > 0.0265
    arm = [g for g in range(scene.model.ngeom) if scene.model.geom_bodyid[g] in scene.arm_body_ids]
    solid = [g for g in arm if scene.model.geom_contype[g]]
    assert np.all(scene.model.geom_conaffinity[solid] & 2)


def test_a_fallen_piece_lies_on_the_board(scene):
    data = mujoco.MjData(scene.model)
    scene.place(data, placements(scene, 1), so101.HOME_QPOS)
    piece = scene.pieces[0]
    data.qpos[piece.qpos_adr + 2 : piece.qpos_adr + 7] = [0.03, np.cos(0.5), np.sin(0.5), 0, 0]  # 57 degrees
    mujoco.mj_step(scene.model, data, 480)
    assert data.xmat[piece.body_id].reshape(3, 3)[2, 2] < 0.4
    assert board.BOARD_TOP_Z < data.xpos[piece.body_id][2] < board.BOARD_TOP_Z + 0.016


def test_pressing_on_a_piece_does_not_push_it_into_the_board(scene):
    data = mujoco.MjData(scene.model)
    scene.place(data, placements(scene, 1), so101.HOME_QPOS)
    body = scene.pieces[0].body_id
    data.xfrc_applied[body, 2] = -10.0  # 3 N m at 0.3 m: what the arm can press with
    mujoco.mj_step(scene.model, data, 480)
    assert data.xpos[body][2] > board.BOARD_TOP_Z - 0.002
