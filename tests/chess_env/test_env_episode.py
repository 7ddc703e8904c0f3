"""An episode of the environment: units, steps, ends and measures."""

import numpy as np
import pytest

from chess_env.env import ChessPickEnv, ChessPickStepEnv
from chess_env.errors import (
    ConfigError,
)
from chess_episodes import expert_chunks, full_state, hold, run_chunks

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
