"""The environment against its manual: spaces, units, starts, ends, measures, and what must not go wrong."""

import copy
import json
import pickle
import re
import threading
import warnings
from dataclasses import fields
from pathlib import Path

import gymnasium
import mujoco
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from gymnasium.wrappers import FlattenObservation, RescaleAction, TimeLimit
from python_process import run_python

import chess_env
from chess_env.config import EnvConfig, Randomization, RewardConfig
from chess_env.env import ChessPickEnv, ChessPickStepEnv
from chess_env.errors import (
    ActionError,
    ChessEnvError,
    ConfigError,
    EpisodeError,
    OptionError,
    RenderingError,
)
from chess_env.expert import Expert
from chess_env.so101 import to_units
from chess_env.task import is_lifted

SMALL = {"image_size": 48}


@pytest.fixture(scope="module")
def env():
    """One environment without images for all tests that only need states: a reset begins from nothing."""
    made = ChessPickEnv(observation="state")
    yield made
    made.close()


@pytest.fixture(scope="module")
def pixel_env():
    made = ChessPickEnv(**SMALL)
    yield made
    made.close()


def hold(observation, chunk_size=50):
    """The chunk that stays where the arm is."""
    return np.repeat(observation["agent_pos"][None], chunk_size, axis=0)


def full_state(env):
    model, data = env.simulation.scene.model, env.simulation.data
    state = np.empty(mujoco.mj_stateSize(model, mujoco.mjtState.mjSTATE_INTEGRATION))
    mujoco.mj_getState(model, data, state, mujoco.mjtState.mjSTATE_INTEGRATION)
    return state


def expert_chunks(env, variety_seed=0):
    """The expert's whole plan as chunks, the last one filled up with its last target."""
    plan = Expert(env.simulation.scene).plan(
        env.simulation.data, env.simulation.target_slot, np.random.default_rng(variety_seed)
    )
    units = to_units(plan).astype(np.float32)
    length = -(-len(units) // 50) * 50
    return np.concatenate([units, np.repeat(units[-1:], length - len(units), 0)]).reshape(-1, 50, 6)


def run_chunks(env, chunks):
    for chunk in chunks:
        result = env.step(chunk)
        if result[2] or result[3]:
            break
    return result


# -- Gymnasium's interface -------------------------------------------------------------------------------------------


def test_gymnasium_checker_finds_nothing():
    env = gymnasium.make("chess_env:ChessPick-v0", **SMALL)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(env.unwrapped)
    env.close()


def test_state_environment_passes_the_checker():
    env = gymnasium.make("chess_env:ChessPick-v0", observation="state")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(env.unwrapped, skip_render_check=True)
    env.close()


def test_registered_arguments_are_those_of_the_configuration():
    kwargs = gymnasium.spec("ChessPick-v0").kwargs
    assert set(kwargs) == {item.name for item in fields(EnvConfig)}
    assert EnvConfig.from_arguments(**kwargs) == EnvConfig()
    assert json.loads(gymnasium.spec("ChessPick-v0").to_json())["kwargs"]["image_size"] == 256
    assert set(kwargs) - set(gymnasium.spec("ChessPickStep-v0").kwargs) == {"chunk_size", "n_action_steps"}


def test_observations_lie_in_their_space_with_its_shapes_and_types(pixel_env):
    observation, _ = pixel_env.reset(seed=0)
    rng = np.random.default_rng(0)
    box = pixel_env.action_space
    for draw in range(6):
        assert pixel_env.observation_space.contains(observation)
        corner = np.where(rng.random(box.shape) < 0.5, box.low, box.high)
        observation, reward, terminated, truncated, _ = pixel_env.step(
            corner if draw % 2 else hold(observation)
        )
        assert isinstance(reward, float) and np.isfinite(reward)
        assert type(terminated) is bool and type(truncated) is bool
        if terminated or truncated:
            observation, _ = pixel_env.reset()
    assert observation["pixels"]["top"].shape == (48, 48, 3)
    assert observation["pixels"]["wrist"].dtype == np.uint8


def test_extreme_targets_leave_the_simulation_stable(env):
    rng = np.random.default_rng(1)
    box = env.action_space
    env.reset(seed=8)
    for _ in range(25):
        *_, terminated, truncated, info = env.step(np.where(rng.random(box.shape) < 0.5, box.low, box.high))
        if terminated or truncated:
            assert info["episode_metrics"]["end"] == "timeout"
            env.reset()


def test_wrappers_map_the_action_space(env):
    observation, _ = env.reset(seed=0)
    scaled = RescaleAction(env, np.float32(-1), np.float32(1))
    assert np.allclose(scaled.action(np.ones(env.action_space.shape, np.float32)), env.action_space.high)
    flat = FlattenObservation(env)
    assert flat.observation(observation).shape == flat.observation_space.shape


def test_own_time_limit_and_gymnasiums_agree():
    env = gymnasium.make("chess_env:ChessPick-v0", observation="state", max_episode_steps=2)
    assert isinstance(env, TimeLimit)
    observation, _ = env.reset(seed=0)
    assert [env.step(hold(observation))[3] for _ in range(2)] == [False, True]
    assert env.unwrapped._max_episode_steps == 12
    env.close()


# -- the manual --------------------------------------------------------------------------------------------------------


def test_action_table_of_the_manual_is_the_action_space(env):
    rows = re.findall(
        r"\| (\d) +\| (\w+) +\| [^|]+ \| +(-?[\d.]+) +\| +([\d.]+) +\|", ChessPickEnv.__doc__ or ""
    )
    assert len(rows) == 6
    low, high = env.action_space.low[0], env.action_space.high[0]
    for index, name, minimum, maximum in rows:
        assert env.metadata["joint_names"][int(index)] == name
        assert float(minimum) == pytest.approx(low[int(index)], abs=0.005)
        assert float(maximum) == pytest.approx(high[int(index)], abs=0.005)


def test_observation_table_of_the_manual_lists_every_key(env, pixel_env):
    rows = dict(re.findall(r"\| ([\w/]+) +\| \([^)]+\) +\| (\w+) +\|", ChessPickEnv.__doc__ or ""))
    pixels, state = pixel_env.observation_space, env.observation_space
    real = {f"pixels/{name}": space for name, space in pixels["pixels"].items()}
    real |= {"environment_state": state["environment_state"], "agent_pos": state["agent_pos"]}
    assert {name: str(space.dtype) for name, space in real.items()} == rows


def test_every_argument_and_option_is_in_the_manual():
    manual = ChessPickEnv.__doc__ or ""
    for name in [*chess_env.DEFAULT_ARGUMENTS, "index", "early_stop", "check_expert", "torch_seed"]:
        assert f"`{name}" in manual or f'"{name}"' in manual, name


def test_state_components_are_named(env):
    observation, _ = env.reset(seed=0)
    names = env.metadata["environment_state_names"]
    assert len(names) == len(set(names)) == observation["environment_state"].size
    state = dict(zip(names, observation["environment_state"].tolist()))
    target = env.simulation.scene.pieces[env.simulation.target_slot]
    assert state["target_position_x"] == pytest.approx(env.simulation.data.qpos[target.qpos_adr], abs=1e-4)
    assert state["target_z_axis_z"] == pytest.approx(1.0, abs=1e-3)
    present = sum(state[f"distractor_{i}_present"] for i in range(15))
    assert present == len(env.simulation.layout.distractors)


# -- arguments and options ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"chunk_size": 0}, "chunk_size=0"),
        ({"n_action_steps": 51}, "n_action_steps=51 of a chunk_size=50"),
        ({"seconds": 0.0}, "seconds=0.0"),
        ({"seconds": float("nan")}, "seconds=nan"),
        ({"image_size": 8}, "image_size=8"),
        ({"image_size": (64, 5000)}, "image_size="),
        ({"image_size": "big"}, "image_size='big'"),
        ({"distractors": (3, 2)}, "distractors="),
        ({"distractors": (0, 16)}, "distractors="),
        ({"observation": "depth"}, "allowed are 'pixels', 'state'"),
        ({"reward": "dense"}, "allowed are 'sparse', 'shaped'"),
        ({"reward": {"sucess": 1.0}}, "no field"),
        ({"randomization": "much"}, "allowed are 'none', 'default', 'wide'"),
        ({"physics_timestep": 1 / 250}, "does not divide a control frame"),
        ({"physics_timestep": 0.0}, "does not divide a control frame"),
        ({"offsamples": 3}, "offsamples=3"),
        ({"early_stop": 1}, "early_stop=1"),
        ({"robot": "/no/such/file.xml"}, "no such file"),
        ({"colour": "red"}, "unknown argument colour"),
        ({"render_mode": "ascii"}, "render_mode='ascii'"),
    ],
)
def test_wrong_argument_is_refused_in_one_line(arguments, message):
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        ChessPickEnv(**arguments)
    assert "\n" not in str(caught.value)


def test_reward_and_randomization_may_be_given_in_any_form():
    for reward in ("shaped", {"reach": 0.5}, RewardConfig(reach=0.5)):
        assert ChessPickEnv(reward=reward).config.reward.reach > 0
    for randomization in ("wide", {"arm_start_deg": 5}, Randomization(arm_start_deg=5.0)):
        assert ChessPickEnv(randomization=randomization).config.randomization.arm_start_deg == 5.0


def test_unknown_option_is_an_error_and_lerobots_own_is_ignored(env):
    with pytest.raises(OptionError, match="unknown reset option 'square'"):
        env.reset(seed=0, options={"square": "e4"})
    env.reset(seed=0, options={"lerobot_new_rollout": True})
    with pytest.raises(OptionError, match="early_stop='yes'"):
        env.reset(seed=0, options={"early_stop": "yes"})
    with pytest.raises(OptionError, match="index=-1"):
        env.reset(seed=0, options={"index": -1})


def test_options_of_the_caller_stay_as_they_are(env):
    options = {"index": np.int64(4), "early_stop": np.bool_(True)}
    before = dict(options)
    _, info = env.reset(seed=0, options=options)
    assert options == before
    assert info["index"] == 4 and env.simulation.episode.early_stop


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (np.zeros((50, 5), np.float32), r"shape \(50, 5\): \(50, 6\) is needed"),
        (np.zeros(6, np.float32), r"shape \(6,\)"),
        ("up", "not an array of numbers"),
        (np.full((50, 6), np.inf, np.float32), r"inf at \(0, 0\)"),
    ],
)
def test_wrong_action_is_refused_before_anything_moves(env, action, message):
    env.reset(seed=0)
    before = full_state(env)
    with pytest.raises(ActionError, match=message):
        env.step(action)
    assert np.array_equal(full_state(env), before)


def test_nan_in_one_target_is_refused_and_placed(env):
    observation, _ = env.reset(seed=0)
    action = hold(observation)
    action[49, 5] = np.nan
    with pytest.raises(ActionError, match=r"nan at \(49, 5\)"):
        env.step(action)


def test_steps_without_an_episode_are_refused():
    env = ChessPickEnv(observation="state", seconds=1 / 30)
    chunk = np.zeros((50, 6), np.float32)
    with pytest.raises(EpisodeError, match="call reset"):
        env.step(chunk)
    env.reset(seed=0)
    assert env.step(chunk)[3]
    with pytest.raises(EpisodeError, match="call reset"):
        env.step(chunk)
    env.close()
    env.close()
    with pytest.raises(EpisodeError, match="closed"):
        env.reset()


# -- starts ------------------------------------------------------------------------------------------------------------


def test_scene_is_bit_equal_in_a_used_and_in_a_fresh_environment(pixel_env):
    pixel_env.reset(seed=4)
    pixel_env.step(pixel_env.action_space.sample())
    used = pixel_env.reset(seed=77, options={"index": 5})
    fresh_env = ChessPickEnv(**SMALL)
    fresh = fresh_env.reset(seed=77, options={"index": 5})
    assert np.array_equal(full_state(pixel_env), full_state(fresh_env))
    for name in ("top", "wrist"):
        assert np.array_equal(used[0]["pixels"][name], fresh[0]["pixels"][name])
    assert used[1] == fresh[1]
    for _ in range(2):  # and the future is the same
        chunk = hold(fresh[0]) + np.float32(4.0)
        assert np.array_equal(
            pixel_env.step(chunk)[0]["pixels"]["top"], fresh_env.step(chunk)[0]["pixels"]["top"]
        )
    assert np.array_equal(full_state(pixel_env), full_state(fresh_env))
    fresh_env.close()


def test_bare_resets_take_the_next_index(env):
    indices = [env.reset(seed=9)[1]["index"], env.reset()[1]["index"], env.reset()[1]["index"]]
    assert indices == [0, 1, 2]
    third = full_state(env)
    assert env.reset(options={"index": 40})[1]["index"] == 40
    assert env.reset()[1]["index"] == 41
    assert env.reset(seed=9, options={"index": 2})[1]["seed"] == 9
    assert np.array_equal(full_state(env), third)
    assert env.reset(seed=9)[1]["index"] == 0


def test_reset_without_any_seed_draws_one_and_says_which():
    env = ChessPickEnv(observation="state", distractors=0)
    seed = env.reset()[1]["seed"]
    first = full_state(env)
    env.reset(seed=seed)
    assert np.array_equal(full_state(env), first)
    env.close()


def test_no_start_is_already_a_success_toppled_or_disturbed(env):
    for index in range(300):
        _, info = env.reset(seed=9_000_003, options={"index": index})
        simulation = env.simulation
        now = simulation.take_snapshot(simulation.episode.start)
        assert not is_lifted(simulation.episode.start, now)
        assert now.stable and now.target_axis_w[2] > 0.99
        assert info["piece"] in ("pawn", "knight")


def test_reset_in_mid_episode_starts_a_full_one(env):
    observation, _ = env.reset(seed=0)
    env.step(hold(observation))
    assert env.num_frames == 50
    observation, _ = env.reset(seed=0)
    assert env.num_frames == 0
    ends = [env.step(hold(observation))[3] for _ in range(12)]
    assert ends == [False] * 11 + [True]


def test_randomization_none_gives_the_home_pose_and_the_nominal_look():
    env = ChessPickEnv(observation="state", randomization="none")
    one, _ = env.reset(seed=1)
    two, _ = env.reset(seed=2)
    assert np.allclose(one["agent_pos"], two["agent_pos"], atol=1e-3)
    env.close()


def test_wide_randomization_still_settles():
    env = ChessPickEnv(observation="state", randomization="wide")
    for index in range(20):
        env.reset(seed=1, options={"index": index})
        assert env.simulation.layout.attempt < 3
    env.close()


def test_checked_scenes_are_solved_by_the_expert_and_deterministic(env):
    for index in range(4):
        _, info = env.reset(seed=3, options={"index": index, "check_expert": True})
        assert info["expert_ok"] is True
        checked = full_state(env)
        assert env.num_frames == 0
        attempt = env.simulation.layout.attempt
        env.reset(seed=3, options={"index": index, "check_expert": True})
        assert np.array_equal(full_state(env), checked) and env.simulation.layout.attempt == attempt
    assert "expert_ok" not in env.reset(seed=3)[1]


# -- units and steps ---------------------------------------------------------------------------------------------------


def test_targets_are_degrees_and_gripper_percent(env):
    observation, _ = env.reset(seed=0)
    target = hold(observation)
    target[:, 0], target[:, 5] = 10.0, 50.0
    observation, *_ = env.step(target)
    assert observation["agent_pos"][0] == pytest.approx(10.0, abs=0.5)
    assert env.simulation.data.qpos[0] == pytest.approx(np.radians(10.0), abs=0.01)
    middle = (-0.174533 + 1.7453292) / 2  # the gripper's range [rad]
    assert observation["agent_pos"][5] == pytest.approx(50.0, abs=1.0)
    assert env.simulation.data.qpos[5] == pytest.approx(middle, abs=0.02)


def test_targets_beyond_the_limits_act_as_the_limits_and_are_counted(env):
    observation, _ = env.reset(seed=0)
    beyond, at_limit = hold(observation), hold(observation)
    beyond[:, 0], at_limit[:, 0] = 1000.0, env.action_space.high[0, 0]
    beyond[:3, 5], at_limit[:3, 5] = -5.0, 0.0
    info = env.step(beyond)[4]
    clipped = full_state(env)
    assert info["num_clipped_targets"] == 50 + 3
    env.reset(seed=0)
    assert env.step(at_limit)[4]["num_clipped_targets"] == 0
    assert np.array_equal(full_state(env), clipped)


def test_fifty_single_steps_equal_one_chunk(env):
    observation, _ = env.reset(seed=6)
    chunk = hold(observation) + np.linspace(0, 8, 50, dtype=np.float32)[:, None]
    env.step(chunk)
    single = ChessPickStepEnv(observation="state")
    single.reset(seed=6)
    for target in chunk:
        single.step(target)
    assert np.array_equal(full_state(single), full_state(env))
    assert single.action_space.shape == (6,)
    with pytest.raises(ConfigError, match="use ChessPick-v0"):
        ChessPickStepEnv(chunk_size=5)
    single.close()


def test_only_the_first_n_action_steps_are_executed():
    env = ChessPickEnv(observation="state", n_action_steps=20, seconds=1.0)
    observation, _ = env.reset(seed=0)
    assert env.action_space.shape == (50, 6)
    executed = [env.step(hold(observation))[4]["num_executed_frames"] for _ in range(2)]
    assert executed == [20, 10]
    env.close()


# -- ends --------------------------------------------------------------------------------------------------------------


def test_arm_that_stays_times_out_without_success(env):
    observation, _ = env.reset(seed=0)
    for _ in range(12):
        observation, reward, terminated, truncated, info = env.step(hold(observation))
        assert info["is_success"] is False and reward == 0.0
    assert truncated and not terminated
    metrics = info["episode_metrics"]
    assert (metrics["end"], metrics["frames"], metrics["success"]) == ("timeout", 600, False)
    assert metrics["close_lateral_mm"] is None
    assert metrics["closest_mm"] > 50


def test_expert_succeeds_cleanly_and_is_measured(env):
    for index in (0, 1):
        env.reset(seed=21, options={"index": index, "check_expert": True})
        _, reward, terminated, truncated, info = run_chunks(env, expert_chunks(env))
        metrics = info["episode_metrics"]
        assert terminated and not truncated and info["is_success"] is True
        assert metrics["end"] == "success" and metrics["clean_lift"]
        assert reward == metrics["return"] == 1.0
        assert metrics["lift_mm"] >= 40.0
        assert metrics["closest_mm"] < 6.0
        assert 0.0 <= metrics["close_lateral_mm"] < 12.0  # the expert's jaws start 6 mm apart to 12 mm
        assert set(metrics) >= {"success", "end", "clean_lift", "disturbed", "toppled", "frames", "piece"}


def test_measures_can_be_left_out():
    env = ChessPickEnv(observation="state", measure=False)
    env.reset(seed=21, options={"check_expert": True})
    metrics = run_chunks(env, expert_chunks(env))[4]["episode_metrics"]
    assert metrics["success"] and metrics["closest_mm"] is None and metrics["lift_mm"] is None
    env.close()


def test_shaped_reward_sums_its_terms(env):
    shaped = ChessPickEnv(observation="state", reward="shaped")
    shaped.reset(seed=21, options={"check_expert": True})
    total = 0.0
    for chunk in expert_chunks(shaped):
        _, reward, terminated, _, info = shaped.step(chunk)
        assert reward == pytest.approx(sum(info["reward_terms"].values()))
        total += reward
        if terminated:
            break
    assert info["reward_terms"]["success"] == 1.0
    assert info["episode_metrics"]["return"] == pytest.approx(total)
    shaped.close()


def tip_target_over(env):
    piece = env.simulation.scene.pieces[env.simulation.target_slot]
    env.simulation.data.qpos[piece.qpos_adr + 2] += 0.02
    env.simulation.data.qpos[piece.qpos_adr + 3 : piece.qpos_adr + 7] = (np.sqrt(0.5), np.sqrt(0.5), 0, 0)


def push_distractor(env):
    piece = env.simulation.scene.pieces[env.simulation.distractor_slots[0]]
    env.simulation.data.qpos[piece.qpos_adr] += 0.015


@pytest.mark.parametrize(
    ("disturbance", "end"), [(tip_target_over, "toppled"), (push_distractor, "disturbed")]
)
def test_early_stop_ends_at_the_first_frame_of_a_fault(disturbance, end):
    env = ChessPickEnv(observation="state", distractors=(3, 15))
    observation, _ = env.reset(seed=0, options={"early_stop": True})
    disturbance(env)
    _, _, terminated, truncated, info = env.step(hold(observation))
    assert terminated and not truncated
    assert info["episode_metrics"]["end"] == end
    assert info["num_executed_frames"] <= 3
    observation, _ = env.reset(seed=0)  # the constructor's early_stop=False holds again
    disturbance(env)
    _, _, terminated, truncated, info = env.step(hold(observation))
    assert not terminated and not truncated
    assert getattr(env.simulation.episode, end)
    env.close()


@pytest.mark.parametrize("field", ["qpos", "qvel"])
def test_nan_in_the_simulation_ends_the_episode_as_unstable(env, field, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # MuJoCo writes a log file
    observation, _ = env.reset(seed=0)
    getattr(env.simulation.data, field)[10] = np.nan
    observation, reward, terminated, truncated, info = env.step(hold(observation))
    assert terminated and not truncated and not info["is_success"]
    assert info["episode_metrics"]["end"] == "unstable" and not info["episode_metrics"]["success"]
    assert np.isfinite(reward) and env.observation_space.contains(observation)
    observation, _ = env.reset(seed=0)
    assert not env.step(hold(observation))[2]


# -- images ------------------------------------------------------------------------------------------------------------


def test_piece_appears_where_the_camera_geometry_puts_it():
    """Projects the white piece by hand: images are neither mirrored nor upside down."""
    env = ChessPickEnv(image_size=(120, 200), distractors=0, randomization="none")
    for index in range(6):
        observation, _ = env.reset(seed=2, options={"index": index})
        model, data = env.simulation.scene.model, env.simulation.data
        camera = model.camera("top").id
        target = env.simulation.scene.pieces[env.simulation.target_slot]
        point = data.xpos[target.body_id] + np.array([0, 0, 0.025]) - data.cam_xpos[camera]
        x, y, z = data.cam_xmat[camera].reshape(3, 3).T @ point
        focal = 60 / np.tan(np.radians(model.cam_fovy[camera]) / 2)
        column, row = 100 + focal * x / -z, 60 - focal * y / -z
        image = observation["pixels"]["top"].astype(int)
        white = (image.min(axis=2) > 120) & (image.max(axis=2) - image.min(axis=2) < 25)
        rows, columns = np.nonzero(white)
        assert abs(columns.mean() - column) < 4 and abs(rows.mean() - row) < 4
    assert image.shape == (120, 200, 3)
    env.close()


def test_environments_of_one_process_do_not_mix_their_images():
    envs = [ChessPickEnv(**SMALL) for _ in range(3)]
    for index, env in enumerate(envs):
        env.reset(seed=5, options={"index": index})
    chunk = hold({"agent_pos": to_units(envs[0].simulation.data.qpos[:6]).astype(np.float32)})
    together = [env.step(chunk)[0]["pixels"]["wrist"] for env in envs]
    for index in range(3):
        alone = ChessPickEnv(**SMALL)
        alone.reset(seed=5, options={"index": index})
        assert np.array_equal(alone.step(chunk)[0]["pixels"]["wrist"], together[index])
        alone.close()
    for env in envs:
        env.close()


def test_render_gives_the_top_camera_large(pixel_env):
    env = gymnasium.make("chess_env:ChessPick-v0", render_mode="rgb_array", **SMALL)
    with pytest.raises((EpisodeError, gymnasium.error.ResetNeeded)):
        env.render()
    observation, _ = env.reset(seed=0)
    frame = env.render()
    assert frame.shape == (480, 640, 3) and frame.dtype == np.uint8
    assert np.array_equal(frame, env.render())
    plain, _ = pixel_env.reset(seed=0)  # the larger buffer changes no pixel
    assert np.array_equal(observation["pixels"]["top"], plain["pixels"]["top"])
    env.close()


def test_another_thread_is_refused_clearly(pixel_env):
    pixel_env.reset(seed=0)
    caught = []

    def reset_there():
        try:
            pixel_env.reset(seed=0)
        except ChessEnvError as error:
            caught.append(error)

    thread = threading.Thread(target=reset_there)
    thread.start()
    thread.join()
    assert isinstance(caught[0], RenderingError) and "thread" in str(caught[0])
    pixel_env.reset(seed=0)


@pytest.mark.parametrize("backend", ["glfw", "vulkan", "off"])
def test_missing_opengl_is_explained_in_one_line(backend):
    code = """
import gymnasium, chess_env
try:
    env = gymnasium.make("ChessPick-v0", image_size=32)
    env.reset(seed=0)
except chess_env.ChessEnvError as error:
    print(type(error).__name__, str(error))
"""
    result = run_python(code, MUJOCO_GL=backend, DISPLAY="", WAYLAND_DISPLAY="")
    assert result.returncode == 0, result.stderr
    (line,) = result.stdout.strip().splitlines()
    assert line.startswith("RenderingError") and f"MUJOCO_GL={backend!r}" in line and "egl" in line
    assert "Exception ignored" not in result.stderr


def test_viewer_without_a_display_is_refused():
    code = """
import gymnasium, chess_env
env = gymnasium.make("ChessPick-v0", image_size=32, render_mode="human")
try:
    env.reset(seed=0)
except chess_env.ChessEnvError as error:
    print(type(error).__name__, str(error))
"""
    result = run_python(code, DISPLAY="", WAYLAND_DISPLAY="")
    assert result.stdout.startswith("RenderingError") and "rgb_array" in result.stdout, result.stderr


@pytest.mark.parametrize("ending", ["", "import sys; sys.exit(0)", "raise SystemExit"])
def test_program_that_never_closes_ends_without_a_word(ending):
    code = f"""
import gymnasium, chess_env
envs = [gymnasium.make("ChessPick-v0", image_size=32) for _ in range(2)]
for env in envs:
    env.reset(seed=0)
envs[0].step(envs[0].action_space.sample())
{ending}
"""
    result = run_python(code)
    assert (result.returncode, result.stderr) == (0, "")


# -- copies and memory -------------------------------------------------------------------------------------------------


def test_pickled_copy_is_a_new_environment_with_the_same_scenes(pixel_env):
    before, _ = pixel_env.reset(seed=3)
    for clone in (pickle.loads(pickle.dumps(pixel_env)), copy.deepcopy(pixel_env)):
        with pytest.raises(EpisodeError):
            clone.step(hold(before))
        after, _ = clone.reset(seed=3)
        assert np.array_equal(before["pixels"]["top"], after["pixels"]["top"])
        clone.close()


def resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 2**20


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_memory_and_files_stay_when_environments_come_and_go():
    def cycle():
        env = ChessPickEnv(**SMALL)
        for _ in range(3):
            env.reset(seed=0)
        env.close()

    for _ in range(4):
        cycle()
    memory, files = resident_mb(), len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(12):
        cycle()
    assert resident_mb() - memory < 40
    assert len(list(Path("/proc/self/fd").iterdir())) - files <= 2


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_memory_stays_over_many_resets_and_images(pixel_env):
    for _ in range(20):
        pixel_env.reset()
    memory = resident_mb()
    for _ in range(100):
        pixel_env.reset()
    assert resident_mb() - memory < 20
