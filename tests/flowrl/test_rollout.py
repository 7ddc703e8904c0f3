"""Rollouts of the toy policy in toy environments that run in processes of their own."""

import numpy as np
import pytest
import torch

from flowrl.errors import FlowRLError
from flowrl.flow.likelihood import rescore
from flowrl.policy.noise import NoiseModel
from flowrl.rollout import collect, pad_to_two
from flowrl.scenes import Scene, fixed_scenes, overlap, training_scenes
from flowrl.vector_env import close_vector_env, group_sizes, make_vector_envs
from toy import SPEC, ToyPolicy, make_toy_envs, make_toy_groups

NUM_ENVS = 3


@pytest.fixture(scope="module")
def envs():
    vec_env = make_toy_envs(NUM_ENVS)
    yield vec_env
    close_vector_env(vec_env)


@pytest.fixture(scope="module")
def one_env():
    vec_env = make_toy_envs(1)
    yield vec_env
    close_vector_env(vec_env)


@pytest.fixture(scope="module")
def groups(envs, one_env):
    """Two groups: of three environments and of one, whose batches are padded."""
    return [envs, one_env]


def noise_model() -> NoiseModel:
    return NoiseModel(SPEC, sigma_start=0.5, sigma_end=0.2)


def run(vec_env, num_episodes=7, noise=None, **kwargs):
    return collect(ToyPolicy(), vec_env, fixed_scenes(5, num_episodes), noise, early_stop=False, **kwargs)


def test_every_scene_gets_one_complete_episode(envs):
    rollout = run(envs)
    assert [e.scene for e in rollout.episodes] == fixed_scenes(5, 7)
    assert [e.number for e in rollout.episodes] == list(range(7))
    for episode in rollout.episodes:
        assert episode.terminated != episode.truncated
        assert 1 <= len(episode.rewards) == len(episode.num_executed) <= 3
        assert episode.metrics["success"] == episode.terminated
        assert episode.reset_info["index"] == episode.scene.index


def test_results_do_not_depend_on_the_number_of_environments(envs, one_env):
    many, single = run(envs, noise=noise_model()), run(one_env, noise=noise_model())
    assert [e.record() for e in many.episodes] == [e.record() for e in single.episodes]


def test_decisions_do_not_depend_on_environments_or_groups(envs, one_env, groups):
    many, single, two = (
        run(vec_envs, noise=noise_model(), keep_decisions=True, keep_final_features=True)
        for vec_envs in (envs, one_env, groups)
    )
    for other in (single, two):
        assert [e.record() for e in other.episodes] == [e.record() for e in many.episodes]
        for a, b in zip(many.episodes, other.episodes):
            np.testing.assert_array_equal(a.actions, b.actions)
            assert (a.final_features is None) == (b.final_features is None)
            assert a.final_features is None or torch.equal(a.final_features, b.final_features)
        assert many.decisions is not None and other.decisions is not None
        for name in ("states", "log_prob", "features", "num_executed"):
            assert torch.equal(getattr(many.decisions, name), getattr(other.decisions, name)), name
        for name in ("episode", "order"):
            np.testing.assert_array_equal(getattr(many.decisions, name), getattr(other.decisions, name))
        state, other_state = (d.prefix.tensors["state"] for d in (many.decisions, other.decisions))
        assert torch.equal(state, other_state)


@pytest.mark.parametrize(
    ("num_envs", "pipeline", "device", "sizes"),
    [
        (96, 2, "cpu", [48, 48]), (11, 3, "cpu", [4, 4, 3]), (3, 2, "cuda", [3]), (4, 2, "cpu", [2, 2]),
        (5, 8, "cpu", [3, 2]), (1, 2, "cpu", [1]), (6, 1, "cuda", [6]), (6, 0, "cpu", [6]), (6, 0, "cuda", [3, 3]),
    ],
)  # fmt: skip
def test_groups_are_equal_and_have_two_environments_at_least(num_envs, pipeline, device, sizes):
    assert group_sizes(num_envs, pipeline, torch.device(device)) == sizes


def test_class_whose_calls_cannot_be_pending_has_one_group():
    vec_envs = make_vector_envs("toy_inline:ToyInline-v0", 6, {}, ToyPolicy(), 2)
    assert [vec_env.num_envs for vec_env in vec_envs] == [6]
    inline = run(vec_envs, noise=noise_model())
    close_vector_env(vec_envs)
    processes = make_vector_envs("toy_env:ToyReach-v0", 4, {}, ToyPolicy(), 2)
    assert [vec_env.num_envs for vec_env in processes] == [2, 2]
    assert [e.record() for e in run(processes, noise=noise_model()).episodes] == [
        e.record() for e in inline.episodes
    ]
    close_vector_env(processes)


def test_parts_of_the_time_are_within_the_whole(groups):
    rollout = run(groups, noise=noise_model(), keep_decisions=True)
    assert set(rollout.seconds) == {"prepare", "sample", "env", "reset"}
    assert min(rollout.seconds.values()) > 0 and sum(rollout.seconds.values()) <= rollout.wall_s
    assert rollout.parts()["rounds"] == rollout.rounds == len(rollout.decisions.rounds)


def test_repeated_rollout_is_equal_and_another_seed_is_not(envs):
    first, second = run(envs), run(envs)
    assert [e.record() for e in first.episodes] == [e.record() for e in second.episodes]
    other = collect(ToyPolicy(), envs, fixed_scenes(6, 7), None, early_stop=False)
    assert [e.metrics["distance"] for e in other.episodes] != [e.metrics["distance"] for e in first.episodes]


def test_fewer_episodes_than_environments(envs):
    rollout = run(envs, num_episodes=2)
    assert len(rollout.episodes) == 2
    assert rollout.rounds == max(len(e.rewards) for e in rollout.episodes)


def test_decisions_are_stored_as_sampled(envs):
    policy, noise = ToyPolicy(), noise_model()
    scenes = fixed_scenes(5, 7)
    rollout = collect(policy, envs, scenes, noise, early_stop=False, keep_decisions=True)
    decisions = rollout.decisions
    assert decisions is not None
    assert len(decisions) == sum(len(e.rewards) for e in rollout.episodes) == len(decisions.prefix)
    assert decisions.states.shape == (len(decisions), 5, 4, 3)
    assert decisions.log_prob.shape == (len(decisions), 4, 4, 2) and decisions.log_prob.dtype == torch.float32
    places = list(zip(decisions.episode.tolist(), decisions.order.tolist()))
    assert places == [(e.number, order) for e in rollout.episodes for order in range(len(e.rewards))]
    for row, (number, order) in enumerate(zip(decisions.episode, decisions.order)):
        assert decisions.num_executed[row] == rollout.episodes[number].num_executed[order]
    for rows in decisions.rounds:
        index = torch.as_tensor(pad_to_two(rows.tolist()))
        with torch.no_grad():
            again = rescore(policy, decisions.prefix[index], decisions.states[index], noise)
        assert torch.equal(again, decisions.log_prob[index])


def test_rounds_hold_every_decision_once(envs):
    decisions = run(envs, noise=noise_model(), keep_decisions=True).decisions
    assert decisions is not None
    assert sorted(np.concatenate(decisions.rounds)) == list(range(len(decisions)))
    assert all(1 <= len(rows) <= NUM_ENVS for rows in decisions.rounds)
    for rows in decisions.rounds:
        assert len(set(decisions.episode[rows])) == len(rows)


def test_exploration_noise_changes_the_chunk_but_not_where_it_starts(envs):
    policy = ToyPolicy()
    kept = [
        collect(
            policy,
            envs,
            fixed_scenes(5, 3),
            NoiseModel(SPEC, sigma_start=sigma, sigma_end=sigma),
            early_stop=False,
            keep_decisions=True,
        ).decisions
        for sigma in (0.1, 0.3)
    ]
    first, second = (d.states[d.order == 0] for d in kept)
    assert torch.equal(first[:, 0], second[:, 0])
    assert not torch.equal(first[:, -1], second[:, -1])


def test_early_stop_reaches_the_environment(envs):
    policy = ToyPolicy()
    with torch.no_grad():
        policy.module["field"][-1].bias[0::3] -= 20.0  # every chunk goes 10 units along joint 0
    stopped = collect(policy, envs, fixed_scenes(5, 3), None, early_stop=True)
    ran_on = collect(policy, envs, fixed_scenes(5, 3), None, early_stop=False)
    assert [len(e.rewards) for e in stopped.episodes] == [1, 1, 1]
    assert [len(e.rewards) for e in ran_on.episodes] == [3, 3, 3]


def test_truncated_episodes_keep_the_features_of_their_last_observation(envs):
    rollout = run(envs, noise=noise_model(), keep_decisions=True, keep_final_features=True)
    assert any(e.truncated for e in rollout.episodes)
    for episode in rollout.episodes:
        assert (episode.final_features is not None) == episode.truncated
        if episode.final_features is not None:
            assert float(episode.final_features.norm()) == pytest.approx(
                episode.metrics["distance"], rel=1e-5
            )


def test_environment_of_another_library_is_never_stepped_after_its_end():
    vec_env = make_toy_envs(3, "toy_env:ToyBare-v0")
    try:
        scenes = fixed_scenes(5, 8)
        rollout = collect(ToyPolicy(), vec_env, scenes, None, early_stop=True, default_task="go")
        lengths = [len(e.rewards) for e in rollout.episodes]
        assert set(lengths) <= {1, 2, 3} and len(set(lengths)) > 1
        assert all(e.metrics == {"success": True} for e in rollout.episodes)
        with pytest.raises(FlowRLError, match="--task"):
            collect(ToyPolicy(), vec_env, scenes, None, early_stop=True)
    finally:
        close_vector_env(vec_env)


@pytest.mark.parametrize("sizes", [(2,), (1, 2)])
def test_dead_process_is_told_in_one_line(sizes):
    vec_envs = make_toy_groups(sizes, "toy_env:ToyDying-v0")
    try:
        with pytest.raises(FlowRLError, match="process died"):
            collect(ToyPolicy(), vec_envs, fixed_scenes(5, 4), None, early_stop=False)
    finally:
        close_vector_env(vec_envs, failed=True)


def test_actions_that_are_not_finite_are_refused_and_leave_the_environments_usable(groups):
    policy = ToyPolicy()
    with torch.no_grad():
        policy.module["field"][-1].bias[0] = float("nan")
    for _ in range(2):
        with pytest.raises(FlowRLError, match=r"not finite in scene 5:\d"):
            collect(policy, groups, fixed_scenes(5, 6), None, early_stop=False)
    assert all(e.terminated or e.truncated for e in run(groups).episodes)


@pytest.mark.parametrize("rounds", [0, 1, 2, 3])
def test_stopped_rollout_says_so_and_leaves_the_environments_usable(groups, rounds):
    expected = [e.record() for e in run(groups).episodes]
    asked = []

    def should_stop() -> bool:
        asked.append(len(asked) > rounds)
        return asked[-1]

    rollout = run(groups, should_stop=should_stop)
    assert rollout.interrupted and rollout.decisions is None and rollout.rounds <= rounds + 1
    assert [e.record() for e in run(groups).episodes] == expected


@pytest.mark.parametrize(
    ("env_id", "message"),
    [
        ("Nowhere-v0", "not found"),
        ("no_such_module:X-v0", "no_such_module"),
        ("toy_env:Nowhere-v0", "Nowhere"),
    ],
)
def test_unknown_environment_is_one_line(env_id, message):
    with pytest.raises(FlowRLError, match=message) as error:
        make_toy_envs(1, env_id)
    assert "\n" not in str(error.value)


def test_derived_seeds_are_distinct_and_stay_31_bit():
    scenes = training_scenes(7_700_003, 0, 100_000)
    seeds = {scene.derived_seed for scene in scenes}
    assert len(seeds) == 100_000 and max(seeds) < 2**31
    assert overlap(scenes, fixed_scenes(9_300_003, 1000)) == set()


def test_training_scenes_go_on_where_they_ended():
    assert training_scenes(1, 10, 2) == [Scene(1, 10), Scene(1, 11)]
    assert len({scene.torch_seed for scene in training_scenes(1, 0, 1000)}) == 1000
    assert 0 <= Scene(1, 10).torch_seed < 2**63


def test_observation_rows_follow_their_environment(envs):
    """The first chunk of each scene depends on that scene alone."""
    alone = [
        collect(ToyPolicy(), envs, [scene], None, early_stop=False).episodes[0]
        for scene in fixed_scenes(5, 4)
    ]
    together = run(envs, num_episodes=4).episodes
    np.testing.assert_array_equal(
        [e.metrics["distance"] for e in alone], [e.metrics["distance"] for e in together]
    )
