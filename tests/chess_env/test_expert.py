"""The scripted expert: it lifts cleanly from any state, with variety, and can be made sloppy."""

import mujoco
import numpy as np
import pytest

from chess_env import board, so101
from chess_env.config import PIECES
from chess_env.errors import ConfigError
from chess_env.expert import HOVER_FRAME, Expert, ExpertAgent, ExpertConfig
from chess_env.grasp import CollisionProbe, seed_qpos
from chess_env.kinematics import GraspPose, jaw_direction
from chess_env.motion import CLOSE_ANGLE
from chess_env.pieces import BLACK_RGBA, PIECE_KINDS
from chess_env.scene import ChessScene, Placement, build_scene

OUT_OF_REACH = (0.445, 0.155)  # the board's far corner
STEPS_PER_FRAME = 8  # 30 Hz in steps of 1/240 s


@pytest.fixture(scope="module")
def scene() -> ChessScene:
    return build_scene(num_distractors_max=15)


@pytest.fixture(scope="module")
def all_kinds() -> tuple[ChessScene, Expert]:
    scene = build_scene(num_distractors_max=4, kinds=PIECES)
    return scene, Expert(scene)


@pytest.fixture(scope="module")
def expert(scene) -> Expert:
    return Expert(scene)


def place_random(
    scene: ChessScene, data: mujoco.MjData, rng: np.random.Generator, num_distractors: int
) -> int:
    """A random scene like the environment's; the target's slot."""
    target = int(rng.integers(2))
    square = board.REACHABLE_SQUARES[rng.integers(len(board.REACHABLE_SQUARES))]
    free = [name for name in board.SQUARES if name != square]

    def placement(slot: int, name: str, rgba: tuple[float, ...]) -> Placement:
        return Placement(
            slot, tuple(board.square_center(name) + rng.uniform(-0.003, 0.003, 2)), rng.uniform(-3, 3), rgba
        )

    chosen = [placement(target, square, (0.95, 0.94, 0.90, 1.0))]
    slots = rng.permutation([*scene.distractor_slots("pawn"), *scene.distractor_slots("knight")])
    for slot, index in zip(slots[:num_distractors], rng.permutation(len(free))):
        chosen.append(placement(int(slot), free[index], BLACK_RGBA))
    scene.place(data, chosen, so101.HOME_QPOS)
    return target


def run(scene: ChessScene, data: mujoco.MjData, targets: np.ndarray) -> None:
    for target in targets:
        data.ctrl[:] = target
        mujoco.mj_step(scene.model, data, STEPS_PER_FRAME)


def lift_mm(scene: ChessScene, data: mujoco.MjData, slot: int) -> float:
    return 1e3 * (data.xpos[scene.pieces[slot].body_id][2] - board.BOARD_TOP_Z)


def one_pawn(scene: ChessScene, square: str = "d4") -> mujoco.MjData:
    data = mujoco.MjData(scene.model)
    scene.place(data, [Placement(0, tuple(board.square_center(square)), 0.0)], so101.HOME_QPOS)
    return data


def test_lifts_cleanly_in_crowded_scenes(scene, expert):
    data = mujoco.MjData(scene.model)
    for seed in range(16):
        rng = np.random.default_rng(seed)
        target = place_random(scene, data, rng, num_distractors=15)
        others = [scene.pieces[slot].body_id for slot in scene.active if slot != target]
        before = data.xpos[others].copy()
        run(scene, data, expert.plan(data, target, rng))
        assert lift_mm(scene, data, target) > 60, seed
        assert np.linalg.norm(data.xpos[others] - before, axis=1).max() < 0.010, seed
        assert data.xmat[others][:, 8].min() > 0.9, seed


def test_lifts_from_starts_near_the_piece(scene, expert):
    data = mujoco.MjData(scene.model)
    near = 0
    for seed in range(12):
        rng = np.random.default_rng(100 + seed)
        target = place_random(scene, data, rng, num_distractors=6)
        start = expert.sample_near_start(data, target, rng)
        near += not np.array_equal(start, so101.HOME_QPOS)
        data.qpos[:6] = data.ctrl[:] = start
        mujoco.mj_forward(scene.model, data)
        assert not any(scene.touched_by_arm(data, slot) != (False, False) for slot in scene.active)
        assert (
            np.linalg.norm(scene.grasp_point_w(data) - data.xpos[scene.pieces[target].body_id]) < 0.16
            or near < seed
        )
        run(scene, data, expert.plan(data, target, rng))
        assert lift_mm(scene, data, target) > 60, seed
    assert near >= 10


def test_tries_again_after_closing_beside_the_piece(scene, expert):
    data = one_pawn(scene)
    rng = np.random.default_rng(0)
    missed = expert.plan(data, 0, rng)[:60].copy()
    missed[:, 5] = CLOSE_ANGLE
    run(scene, data, missed)  # closed above the piece
    assert lift_mm(scene, data, 0) < 5
    run(scene, data, expert.plan(data, 0, rng))
    assert lift_mm(scene, data, 0) > 60


def test_goes_on_lifting_a_piece_that_it_holds(scene, expert):
    data = one_pawn(scene)
    rng = np.random.default_rng(1)
    plan = expert.plan(data, 0, rng)
    closed = int(np.argmax(plan[:, 5] <= CLOSE_ANGLE + 1e-9)) + 4
    run(scene, data, plan[:closed])
    rest = expert.plan(data, 0, rng)
    assert len(rest) < 50
    run(scene, data, rest)
    assert lift_mm(scene, data, 0) > 60


@pytest.mark.parametrize("slot", range(6))
def test_a_held_piece_slips_less_than_2_mm_in_10_s(all_kinds, slot):
    scene, expert = all_kinds
    data = mujoco.MjData(scene.model)
    scene.place(data, [Placement(slot, tuple(board.square_center("e5")), 0.4)], so101.HOME_QPOS)
    run(scene, data, expert.plan(data, slot, np.random.default_rng(2)))
    height = lift_mm(scene, data, slot)
    assert height > 60
    mujoco.mj_step(scene.model, data, 2400)
    assert abs(lift_mm(scene, data, slot) - height) < 2


@pytest.mark.parametrize("kind", PIECES)
def test_every_kind_is_lifted_from_between_kings_and_queens(all_kinds, kind):
    scene, expert = all_kinds
    data = mujoco.MjData(scene.model)
    target = scene.target_slot(kind)
    around = [(dx, dy) for dx in (-0.04, 0.0, 0.04) for dy in (-0.04, 0.0, 0.04) if dx or dy]
    slots = [*scene.distractor_slots("king"), *scene.distractor_slots("queen")]
    centre = board.square_center("d4")
    placements = [Placement(target, tuple(centre), 0.3)]
    placements += [Placement(slot, tuple(centre + shift), 0.0) for slot, shift in zip(slots, around)]
    scene.place(data, placements, so101.HOME_QPOS)
    others = [scene.pieces[placement.piece_slot].body_id for placement in placements[1:]]
    before = data.xpos[others].copy()
    run(scene, data, expert.plan(data, target, np.random.default_rng(3)))
    assert len(others) == 8 and lift_mm(scene, data, target) > 60
    assert np.linalg.norm(data.xpos[others] - before, axis=1).max() < 0.010


@pytest.mark.parametrize("kind", PIECES)
def test_finger_tips_take_each_kind_at_its_own_height(all_kinds, kind):
    scene, expert = all_kinds
    data = mujoco.MjData(scene.model)
    slot = scene.target_slot(kind)
    scene.place(data, [Placement(slot, tuple(board.square_center("d5")), 0.0)], so101.HOME_QPOS)
    grasp = expert.planner.plan(data, slot)
    tips = expert.planner.arm.pose(grasp.qpos, grasp.local).point_w
    assert tips[2] - board.BOARD_TOP_Z == pytest.approx(PIECE_KINDS[kind].grasp_height, abs=0.001)
    assert PIECE_KINDS[kind].grasp_height >= 0.024


def test_targets_stay_inside_the_limits_and_move_smoothly(scene, expert):
    data = mujoco.MjData(scene.model)
    for seed in range(10):
        rng = np.random.default_rng(seed)
        target = place_random(scene, data, rng, num_distractors=4)
        plan = np.vstack([data.ctrl[:], expert.plan(data, target, rng)])
        assert np.all(plan >= so101.JOINT_LOW) and np.all(plan <= so101.JOINT_HIGH)
        assert np.abs(np.diff(plan[:, :5], axis=0)).max() < 0.25  # [rad] a frame
        assert np.abs(plan[1] - plan[0]).max() < 0.05


def test_observation_at_frame_50_shows_the_hover_just_before_the_descent(scene, expert):
    for seed in range(6):
        data = one_pawn(scene, "d3")
        plan = expert.plan(data, 0, np.random.default_rng(seed))
        heights = [expert.planner.arm.pose(target).point_w[2] - board.BOARD_TOP_Z for target in plan]
        assert heights[HOVER_FRAME - 3] > 0.065  # tips still above the pieces
        assert heights[HOVER_FRAME + 20] < 0.035  # well on the way down


def test_planning_changes_neither_state_nor_model(scene, expert):
    data = one_pawn(scene)
    size = mujoco.mj_stateSize(scene.model, mujoco.mjtState.mjSTATE_INTEGRATION)
    before, after = np.empty(size), np.empty(size)
    mujoco.mj_getState(scene.model, data, before, mujoco.mjtState.mjSTATE_INTEGRATION)
    xpos, margin = data.xpos.copy(), scene.model.geom_margin.copy()
    expert.plan(data, 0, np.random.default_rng(0))
    expert.sample_near_start(data, 0, np.random.default_rng(0))
    mujoco.mj_getState(scene.model, data, after, mujoco.mjtState.mjSTATE_INTEGRATION)
    np.testing.assert_array_equal(before, after)
    np.testing.assert_array_equal(xpos, data.xpos)
    np.testing.assert_array_equal(margin, scene.model.geom_margin)


def test_plan_depends_on_state_and_generator_alone(scene, expert):
    data = one_pawn(scene)
    first = expert.plan(data, 0, np.random.default_rng(5))
    expert.plan(one_pawn(scene, "f6"), 0, np.random.default_rng(6))
    data = one_pawn(scene)
    np.testing.assert_array_equal(first, expert.plan(data, 0, np.random.default_rng(5)))
    np.testing.assert_array_equal(first, Expert(scene).plan(data, 0, np.random.default_rng(5)))
    other = expert.plan(data, 0, np.random.default_rng(7))
    assert other.shape != first.shape or not np.array_equal(other, first)


def test_a_probe_built_in_an_empty_scene_sees_the_pieces_of_later_ones(scene, expert):
    data = mujoco.MjData(scene.model)
    scene.place(data, [], so101.HOME_QPOS)
    early = CollisionProbe(scene)
    placements = [
        Placement(slot, tuple(board.square_center(f"{file}4")), 0.3) for slot, file in enumerate("de")
    ]
    scene.place(data, placements, so101.HOME_QPOS)
    point = np.array([*board.square_center("e4"), 0.04])  # in the neighbour's head
    inside = expert.planner.arm.solve(
        GraspPose(point, 0.3, jaw_direction(point, 0.0)), so101.GRASP_POINT, seed_qpos(point)
    )
    assert inside.error < 0.001
    seen = []
    for probe in (early, CollisionProbe(scene)):
        probe.set_pieces(data)
        seen.append(probe.distances(np.append(inside.qpos, 0.0), 0))
    assert seen[0] == seen[1]
    assert seen[0][0] < 0


def test_no_variety_is_one_path_for_any_generator(scene):
    calm = Expert(scene, ExpertConfig(variety=0.0))
    data = one_pawn(scene)
    plans = [calm.plan(data, 0, np.random.default_rng(seed)) for seed in (1, 2)]
    np.testing.assert_array_equal(plans[0], plans[1])


def test_no_plan_for_a_piece_that_fell_or_is_out_of_reach(scene, expert):
    data = one_pawn(scene)
    body, adr = scene.pieces[0].body_id, scene.pieces[0].qpos_adr
    data.qpos[adr + 2 : adr + 7] = [0.03, np.sqrt(0.5), np.sqrt(0.5), 0, 0]
    mujoco.mj_forward(scene.model, data)
    assert data.xmat[body][8] < 0.1
    assert expert.plan(data, 0, np.random.default_rng(0)) is None
    scene.place(data, [Placement(0, OUT_OF_REACH, 0.0)], so101.HOME_QPOS)
    assert expert.plan(data, 0, np.random.default_rng(0)) is None


def test_aim_error_moves_the_grasp_by_its_standard_deviation(scene):
    data = one_pawn(scene)
    aimed = Expert(scene, ExpertConfig(variety=0.0))
    sloppy = Expert(scene, ExpertConfig(variety=0.0, aim_error_mm=5.0))

    def grasp_point(plan: np.ndarray) -> np.ndarray:
        descended = plan[int(np.argmin(plan[:, 5] > 0)) - 4]
        return aimed.planner.arm.pose(descended).point_w[:2]

    right = grasp_point(aimed.plan(data, 0, np.random.default_rng(0)))
    errors = (
        np.array([grasp_point(sloppy.plan(data, 0, np.random.default_rng(i))) - right for i in range(40)])
        * 1e3
    )
    assert 3.5 < errors.std() < 6.5
    assert np.abs(errors.mean(axis=0)).max() < 2.5


def test_closing_comes_early_or_late_by_whole_frames(scene):
    data = one_pawn(scene)
    sloppy = Expert(scene, ExpertConfig(variety=0.0, close_early_late_frames=5))
    first_closed = {
        int(np.argmax(np.diff(sloppy.plan(data, 0, np.random.default_rng(seed))[55:, 5]) < -1e-6))
        for seed in range(90)
    }
    assert first_closed == set(range(min(first_closed), min(first_closed) + 11))


def test_hesitation_lengthens_the_pause(scene):
    data = one_pawn(scene)
    calm, slow = (Expert(scene, ExpertConfig(variety=0.0, hesitation_frames=frames)) for frames in (0, 30))
    lengths = [len(slow.plan(data, 0, np.random.default_rng(i))) - len(calm.plan(data, 0, np.random.default_rng(i)))
               for i in range(20)]  # fmt: skip
    assert min(lengths) >= 0 and 20 <= max(lengths) <= 32


@pytest.mark.parametrize("field", ["variety", "aim_error_mm", "hesitation_frames", "close_early_late_frames"])
@pytest.mark.parametrize("value", [-1, float("nan"), "3", True])
def test_config_refuses_what_makes_no_sense(field, value):
    with pytest.raises(ConfigError, match=field):
        ExpertConfig(**{field: value})


def test_agent_deals_out_the_plan_in_units(scene, expert):
    data = one_pawn(scene)
    plan = expert.plan(data, 0, np.random.default_rng(3))
    agent = ExpertAgent(expert, chunk_size=50)
    rng = np.random.default_rng(3)
    chunks = [agent.act(data, 0, rng) for _ in range(-(-len(plan) // 50))]
    assert all(chunk.shape == (50, 6) and chunk.dtype == np.float32 for chunk in chunks)
    dealt = np.concatenate(chunks)
    np.testing.assert_allclose(dealt[: len(plan)], so101.to_units(plan), rtol=1e-6, atol=1e-5)
    np.testing.assert_array_equal(
        dealt[len(plan) :], np.repeat(dealt[len(plan) - 1 :][:1], len(dealt) - len(plan), axis=0)
    )


def test_agent_holds_still_without_a_plan(scene, expert):
    data = mujoco.MjData(scene.model)
    scene.place(data, [Placement(0, OUT_OF_REACH, 0.0)], so101.HOME_QPOS)
    chunk = ExpertAgent(expert, chunk_size=10).act(data, 0, np.random.default_rng(0))
    np.testing.assert_allclose(so101.from_units(chunk), np.tile(so101.HOME_QPOS, (10, 1)), atol=1e-5)
