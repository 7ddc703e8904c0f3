"""Environments that were not made for flowrl: a plain state, one target a step, no instruction, no success."""

from dataclasses import replace

import gymnasium
import numpy as np
import pytest
from small_mlp import small_mlp

from flowrl.errors import FlowRLError
from flowrl.plain import evaluate_plain
from flowrl.scenes import fixed_scenes
from flowrl.sub_environment import make_environment
from flowrl.validate import validate
from flowrl.vector_env import check_spaces, close_vector_env, make_single_env, make_vector_env

COUNT = "toy_classic:ToyCount-v0"


@pytest.fixture
def count():
    """Executes the first three targets of chunks of four."""
    env = make_environment(COUNT, {}, 4, 3)
    env.reset(seed=0)
    return env


def chunk(*targets: float) -> np.ndarray:
    return np.array(targets, dtype=np.float32)[:, None]


def test_the_first_targets_of_a_chunk_run_in_order_and_their_rewards_add_up(count):
    observation, reward, terminated, truncated, info = count.step(chunk(0.25, 0.5, 1.0, 2.0))
    assert (
        observation["agent_pos"].tolist() == [3, 1.75, 1.0] and observation["agent_pos"].dtype == np.float32
    )
    assert (reward, terminated, truncated) == (1.75, False, False)
    assert info == {"steps": 3, "num_executed_frames": 3, "num_clipped_targets": 0}


def test_a_chunk_stops_at_the_first_terminal_step(count):
    _, reward, terminated, truncated, info = count.step(chunk(1.5, 1.5, 1.0, 0.0))
    assert (reward, terminated, truncated, info["num_executed_frames"]) == (3.0, True, False, 2)


def test_the_time_limit_of_the_registration_truncates_inside_a_chunk(count):
    count.step(chunk(0.1, 0.1, 0.1, 0.1))
    _, _, terminated, truncated, info = count.step(chunk(0.1, 0.1, 0.1, 0.1))
    assert (terminated, truncated, info["num_executed_frames"]) == (False, True, 2)


def test_targets_outside_the_action_space_are_clipped_and_counted(count):
    _, reward, _, _, info = count.step(chunk(-7.0, 0.5, -1.5, 9.0))
    assert reward == -1.0 + 0.5 - 1.0 and info["num_clipped_targets"] == 2


def test_an_environment_that_executes_chunks_of_named_observations_is_left_alone():
    env = make_environment("toy_env:ToyReach-v0", {}, 4, 3)
    assert type(env) is type(gymnasium.make("toy_env:ToyReach-v0"))


@pytest.mark.parametrize("env_id", ["Pendulum-v1", "MountainCarContinuous-v0"])
def test_classics_are_what_their_own_steps_give(env_id):
    wrapped, env = make_environment(env_id, {}, 5, 5), gymnasium.make(env_id)
    first, _ = wrapped.reset(seed=3)
    plain, _ = env.reset(seed=3)
    assert np.array_equal(first["agent_pos"], plain)
    targets = np.random.default_rng(0).uniform(-1, 1, (5, 1)).astype(np.float32)
    observation, reward, *_ = wrapped.step(targets)
    steps = [env.step(target) for target in targets]
    assert np.array_equal(observation["agent_pos"], steps[-1][0])
    assert reward == pytest.approx(sum(float(step[1]) for step in steps))


def test_episodes_on_a_classic_depend_neither_on_the_number_of_environments_nor_on_the_path():
    policy, scenes = small_mlp(3, 1, chunk_size=25, n_action_steps=20), fixed_scenes(5, 4)
    single = make_single_env("Pendulum-v1", {}, policy.spec)
    records = [evaluate_plain(policy, single, scenes, label="plain")]
    for num_envs in (1, 3):
        vec_env = make_vector_env("Pendulum-v1", num_envs, {}, policy.spec)
        records.append(validate(policy, vec_env, scenes, label="fast"))
        close_vector_env(vec_env)
    assert records[0] == records[1] == records[2]
    assert {record["decisions"] for record in records[0]} == {10}  # 200 steps, 20 a decision
    assert len({record["return"] for record in records[0]}) == 4


def test_an_own_vector_class_of_single_targets_is_replaced_by_one_of_chunks():
    vec_env = make_vector_env("toy_classic:ToyCountVector-v0", 2, {}, small_mlp(3, 1).spec)
    assert vec_env.single_action_space.shape == (4, 1)
    close_vector_env(vec_env)


def test_discrete_actions_are_refused_where_the_environment_has_a_vector_class_of_its_own():
    spec = small_mlp(4, 1).spec
    vec_env = make_vector_env("CartPole-v1", 1, {}, spec)
    with pytest.raises(FlowRLError, match=r"actions are Discrete\(2\)"):
        check_spaces(vec_env, spec)
    close_vector_env(vec_env)


@pytest.mark.parametrize(
    ("kwargs", "action_dim", "message"),
    [
        ({}, 2, r"predicts \(4, 2\) .* takes \(4, 1\); use a policy that was trained for this robot"),
        ({"actions": "discrete"}, 1, r"actions are Discrete\(2\); flowrl needs continuous"),
        ({"images": True}, 1, r"observations are Box.*\(8, 8, 3\).* takes a Dict"),
    ],
)
def test_spaces_that_cannot_work_are_refused(kwargs, action_dim, message):
    spec = small_mlp(3, action_dim).spec
    with pytest.raises(FlowRLError, match=message):
        check_spaces(make_single_env(COUNT, kwargs, spec), spec)


def test_a_chunk_of_another_length_than_the_environments_own_is_refused():
    spec = replace(small_mlp(2, 2).spec, chunk_size=7)
    with pytest.raises(FlowRLError, match="set its chunk size with --env-kwargs"):
        check_spaces(make_single_env("toy_env:ToyReach-v0", {}, spec), spec)
