import pytest
import torch

from flowrl.flow.sampler import episode_noise, sample_chain
from flowrl.policy.noise import NoiseModel


def draw(policy, batch, num_elements):
    drawn = [episode_noise(77 + i, 0, policy.spec, num_elements) for i in range(batch)]
    return torch.stack([x_0 for x_0, _ in drawn]), torch.stack([eps for _, eps in drawn])


def test_a_chain_holds_every_state_and_every_transition(policy, make_observation, tasks):
    noise = NoiseModel(policy.spec, basis="dct", num_modes=6)
    prefix = policy.encode(make_observation(3), tasks(3))
    x_0, eps = draw(policy, 3, 6)
    chain = sample_chain(policy, prefix, x_0, noise, eps)
    assert chain.states.shape == (3, 11, 50, 6) and chain.log_prob.shape == (3, 10, 6, 6)
    assert torch.equal(chain.states[:, 0], x_0)
    assert torch.equal(chain.actions, chain.states[:, 10])
    assert not chain.states.requires_grad


def test_without_noise_there_is_no_density(policy, make_observation, tasks):
    prefix = policy.encode(make_observation(2), tasks(2))
    assert sample_chain(policy, prefix, torch.randn(2, 50, 6)).log_prob is None


def test_vanishing_noise_gives_the_noise_free_chain(policy, make_observation, tasks):
    prefix = policy.encode(make_observation(2), tasks(2))
    noise = NoiseModel(policy.spec, sigma_start=1e-7, sigma_end=1e-7)
    x_0, eps = draw(policy, 2, 50)
    noisy, plain = sample_chain(policy, prefix, x_0, noise, eps), sample_chain(policy, prefix, x_0)
    torch.testing.assert_close(noisy.states, plain.states, rtol=0, atol=1e-5)


def test_every_step_follows_lerobots_direction_of_time(policy, make_observation, tasks):
    prefix = policy.encode(make_observation(2), tasks(2))
    states = sample_chain(policy, prefix, torch.randn(2, 50, 6)).states
    for step in (0, 9):
        with torch.no_grad():
            velocity = policy.velocity(states[:, step], torch.full((2,), 1.0 - 0.1 * step), prefix)
        torch.testing.assert_close(
            states[:, step + 1] - states[:, step], -0.1 * velocity, rtol=1e-3, atol=1e-5
        )


def test_the_same_noise_gives_the_same_chain_after_unrelated_calls(policy, make_observation, tasks):
    observation = make_observation(2)
    x_0 = torch.stack([episode_noise(5, 1, policy.spec)[0]] * 2)
    first = sample_chain(policy, policy.encode(observation, tasks(2)), x_0).states
    policy.encode(make_observation(3, seed=4), tasks(3))
    torch.randn(7)
    assert torch.equal(sample_chain(policy, policy.encode(observation, tasks(2)), x_0).states, first)


def test_episode_noise_is_a_pure_function_of_seed_decision_and_stream(policy):
    spec = policy.spec
    seed = 2**63 - 1
    x_0, eps = episode_noise(seed, 3, spec, 6)
    torch.randn(3)
    again, same_eps = episode_noise(seed, 3, spec, 6)
    assert torch.equal(x_0, again) and torch.equal(eps, same_eps)
    assert x_0.shape == (50, 6) and eps.shape == (10, 6, 6)
    for other in (episode_noise(seed, 4, spec, 6), episode_noise(seed - 1, 3, spec, 6)):
        assert not torch.equal(other[0], x_0) and not torch.equal(other[1], eps)


def test_the_start_of_a_chain_does_not_depend_on_exploration(policy):
    spec = policy.spec
    x_0, none = episode_noise(11, 0, spec)
    assert none is None
    with_noise, eps = episode_noise(11, 0, spec, 50)
    other_stream, other_eps = episode_noise(11, 0, spec, 50, stream=1)
    assert torch.equal(x_0, with_noise) and torch.equal(x_0, other_stream)
    assert not torch.equal(eps, other_eps)


def test_episode_noise_is_standard_normal(policy):
    values = torch.cat(
        [torch.cat([t.flatten() for t in episode_noise(s, 0, policy.spec, 50)]) for s in range(30)]
    )
    assert abs(values.mean()) < 0.01 and abs(values.std() - 1) < 0.01


def test_wrong_shapes_are_refused(policy, make_observation, tasks):
    prefix = policy.encode(make_observation(2), tasks(2))
    noise = NoiseModel(policy.spec)
    with pytest.raises(ValueError, match=r"x_0 has shape \(1, 50, 6\), expected \(2, 50, 6\)"):
        sample_chain(policy, prefix, torch.zeros(1, 50, 6))
    with pytest.raises(ValueError, match="eps has shape"):
        sample_chain(policy, prefix, torch.zeros(2, 50, 6), noise, torch.zeros(2, 10, 6, 6))
    with pytest.raises(ValueError, match="together"):
        sample_chain(policy, prefix, torch.zeros(2, 50, 6), noise)
