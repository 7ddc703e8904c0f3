"""An episode of the environment: units, steps, ends and measures."""

import mujoco
import numpy as np
import pytest

from chess_env import board, simulation
from chess_env.env import ChessPickEnv, ChessPickStepEnv
from chess_env.errors import ConfigError, EpisodeError, SceneError
from chess_env.task import is_disturbed, is_lifted, is_toppled
from chess_episodes import expert_chunks, full_state, hold, run_chunks

DEFAULT_SCENE_0 = (
    "pawn",
    "g4",
    (0.2601884, -0.0987589, 0.0119542),
    (0.013119, -0.902092, 0.218179, 1.396411, -1.594712, 0.200437),
)
DEFAULT_SCENE_1 = (
    "knight",
    "d7",
    (0.3776368, 0.0203651, 0.0119542),
    (-0.015033, -0.916731, 0.23643, 1.451287, -1.598407, 0.197253),
)

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


# -- starts ------------------------------------------------------------------------------------------------------------


def test_default_scenes_of_a_published_seed_are_the_stored_ones(env):
    """Positions [m] of the target and the arm's angles [rad] after settling: models were trained on these scenes."""
    stored = {0: DEFAULT_SCENE_0, 1: DEFAULT_SCENE_1}
    for index, (piece, square, target_w, arm) in stored.items():
        _, info = env.reset(seed=9_000_003, options={"index": index})
        data, adr = env.simulation.data, env.simulation.scene.pieces[env.simulation.target_slot].qpos_adr
        assert (info["piece"], info["square"]) == (piece, square)
        np.testing.assert_allclose(data.qpos[adr : adr + 3], target_w, atol=1e-6)
        np.testing.assert_allclose(data.qpos[:6], arm, atol=1e-5)


@pytest.mark.parametrize("arguments", [{}, {"pieces": "all", "task": "square", "randomization": "wide"}])
def test_no_start_has_ended_already_or_touches_the_arm(arguments):
    made = ChessPickEnv(observation="state", **arguments)
    for index in range(150):
        made.reset(seed=12, options={"index": index})
        simulation = made.simulation
        start = simulation.episode.start
        now = simulation.take_snapshot(start)
        assert now.stable and not is_lifted(start, now)
        assert not is_toppled(start, now) and not is_disturbed(start, now)
        assert now.distractors_upright.min(initial=1.0) > 0.999 and now.target_axis_w[2] > 0.999
        slots = (simulation.target_slot, *simulation.distractor_slots)
        assert not any(any(simulation.scene.touched_by_arm(simulation.data, slot)) for slot in slots)
    made.close()


def settled_offset(env):
    """Largest distance along an axis [m] between where a piece was put and where it came to rest."""
    layout, scene = env.simulation.layout, env.simulation.scene
    slots = (env.simulation.target_slot, *env.simulation.distractor_slots)
    rest = np.array([env.simulation.data.xpos[scene.pieces[slot].body_id][:2] for slot in slots])
    pieces = (layout.target, *layout.distractors)
    put = np.array([board.square_center(piece.square) + piece.offset_m for piece in pieces])
    return np.abs(rest - put).max()


def test_a_draw_that_does_not_settle_is_drawn_again_and_in_the_end_refused(env, monkeypatch):
    offsets = []
    for index in range(20):
        env.reset(seed=12, options={"index": index})
        assert env.simulation.layout.attempt == 0
        offsets.append(settled_offset(env))
    limit = float(np.median(offsets))
    monkeypatch.setattr(simulation, "SETTLED_OFFSET_M", limit)
    attempts = []
    for index in range(20):
        env.reset(seed=12, options={"index": index})
        attempts.append(env.simulation.layout.attempt)
        assert settled_offset(env) < limit
    assert [attempt == 0 for attempt in attempts] == [offset < limit for offset in offsets]
    assert 0 < max(attempts) < 20
    monkeypatch.setattr(simulation, "SETTLED_OFFSET_M", 0.0)
    with pytest.raises(
        SceneError, match="no scene of seed 12, index 0 settles in 20 draws: use another index"
    ):
        env.reset(seed=12)
    with pytest.raises(EpisodeError, match="call reset"):
        env.step(np.zeros((50, 6), np.float32))


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
    metric, reduction = env.metadata["log_metrics"]["unstable"]  # so that a trainer's log counts it
    assert info["episode_metrics"][metric] is True and reduction == "mean"
    assert np.isfinite(reward) and env.observation_space.contains(observation)
    observation, _ = env.reset(seed=0)
    assert not env.step(hold(observation))[2]


def test_nan_of_a_frames_last_physics_step_reaches_neither_observation_nor_reward(env, monkeypatch):
    """MuJoCo looks for NaN at the beginning of a step, so that it does not see this one."""
    observation, _ = env.reset(seed=0)
    step = mujoco.mj_step

    def step_to_nan(model, data, nstep=1):
        step(model, data, nstep)
        data.qpos[2] = np.nan

    with monkeypatch.context() as patch:
        patch.setattr(mujoco, "mj_step", step_to_nan)
        seen, reward, terminated, _, info = env.step(hold(observation))
    assert terminated and info["episode_metrics"]["end"] == "unstable" and info["num_executed_frames"] == 1
    assert np.isfinite(reward) and env.observation_space.contains(seen)
    assert all(np.isfinite(array).all() for array in seen.values())
