"""The environment against its manual: spaces, tables, arguments, options and starts."""

import json
import re
import warnings
from dataclasses import fields

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from gymnasium.wrappers import FlattenObservation, RescaleAction, TimeLimit

import chess_env
from chess_env.config import EnvConfig, Randomization, RewardConfig
from chess_env.env import ChessPickEnv
from chess_env.errors import (
    ActionError,
    ConfigError,
    EpisodeError,
    OptionError,
)
from chess_env.options import RESET_OPTIONS
from chess_env.task import is_lifted
from chess_episodes import SMALL, full_state, hold

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
    for name in [*chess_env.DEFAULT_ARGUMENTS, *RESET_OPTIONS, "torch_seed"]:
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
        ({"colour": "red"}, "unexpected keyword argument 'colour'"),
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
    with pytest.raises(OptionError, match="unknown reset option 'colour'"):
        env.reset(seed=0, options={"colour": "red"})
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


def test_unknown_argument_is_a_type_error_in_pythons_own_words():
    # TorchRL's GymEnv tries frameskip=1 with every environment and goes on without it after exactly this.
    with pytest.raises(TypeError, match="unexpected keyword argument 'frameskip'"):
        gymnasium.make("ChessPick-v0", frameskip=1)
