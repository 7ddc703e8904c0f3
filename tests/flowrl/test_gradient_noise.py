"""Signal and noise of a gradient, on Gaussian gradients whose signal and noise are known."""

import numpy as np
import pytest
import torch

from flowrl.config import TrainConfig
from flowrl.gradient_noise import NUM_GROUPS, GradientSums, NoiseScale, episode_groups
from flowrl.loss import executed_mask
from flowrl.policy.critic import Critic
from flowrl.policy.noise import NoiseModel
from flowrl.ppo import PPO
from flowrl.prefix import Rows
from flowrl.record import describe_line, empty_line
from toy import SPEC, ToyPolicy, toy_decisions


def estimate(num_episodes: int, signal: float, seed: int, size: int = 200, num_groups: int = 16):
    """Episodes' gradients ~ N(G, I) of `size` values, |G|^2 = signal: tr(S) = size."""
    rng = np.random.default_rng(seed)
    gradient = np.full(size, np.sqrt(signal / size))
    episodes = gradient + rng.standard_normal((num_episodes, size))
    sums = GradientSums()
    for group in range(num_groups):
        part = episodes[group::num_groups].sum(axis=0) / num_episodes
        sums.add(num_groups * torch.from_numpy(part))
    return sums.estimate(num_episodes)


def test_the_estimates_are_unbiased():
    # |G|^2 = 0.5, tr(S) / n = 200 / 128 = 1.5625; standard errors over 400 batches about .01 and .008
    results = [estimate(128, 0.5, seed) for seed in range(400)]
    assert np.mean([r.signal for r in results]) == pytest.approx(0.5, abs=0.04)
    assert np.mean([r.noise for r in results]) == pytest.approx(1.5625, abs=0.03)


def test_episodes_needed_is_the_gradient_noise_scale():
    scale = NoiseScale()
    for seed in range(400):
        scale.add(estimate(128, 0.5, seed))
    assert scale.episodes_needed == pytest.approx(200 / 0.5, rel=0.08)


def test_half_of_the_square_is_signal_at_the_noise_scale():
    results = [estimate(400, 0.5, seed) for seed in range(100)]
    assert np.mean([r.signal_fraction for r in results]) == pytest.approx(0.5, abs=0.05)


def test_a_gradient_that_is_all_noise_needs_no_known_number_of_episodes():
    results = [estimate(64, 0.0, seed) for seed in range(200)]
    assert np.mean([r.cosine for r in results]) == pytest.approx(0.0, abs=0.03)
    assert np.mean([r.signal for r in results]) == pytest.approx(0.0, abs=0.05)
    scale = NoiseScale()
    scale.add(next(r for r in results if r.signal < 0))
    assert scale.episodes_needed is None


def test_a_gradient_without_noise_is_all_signal():
    sums = GradientSums()
    for _ in range(4):
        sums.add(torch.tensor([3.0, 4.0]))
    result = sums.estimate(8)
    assert (result.signal, result.noise, result.cosine) == (
        pytest.approx(25),
        pytest.approx(0),
        pytest.approx(1),
    )
    assert result.signal_fraction == pytest.approx(1.0)


def test_episodes_stay_together_and_are_dealt_evenly():
    episode = np.repeat(np.arange(40), 3)
    groups = episode_groups(np.random.default_rng(0).permutation(episode))
    assert len(groups) == NUM_GROUPS
    assert sorted(np.concatenate(groups).tolist()) == list(range(120))
    members = [set(episode_groups(episode)[g] // 3) for g in range(NUM_GROUPS)]
    assert all(a.isdisjoint(b) for i, a in enumerate(members) for b in members[:i])
    assert [len(episode_groups(np.arange(n))) for n in (1, 2, 3, 7, 16, 100)] == [0, 2, 2, 6, 16, 16]


@pytest.mark.parametrize(
    ("needed", "told"),
    [(812.4, "gradient 12% signal, about 812 episodes needed"), (None, "hidden by its noise")],
)
def test_the_console_says_whether_the_episodes_are_enough(needed, told):
    line = empty_line(3, {}) | {"grad_signal": 0.12, "episodes_needed": needed}
    assert told in describe_line(line)


@pytest.mark.parametrize("unit", ["element", "step", "chunk"])
def test_the_groups_contributions_add_up_to_the_gradient_of_the_whole(unit, monkeypatch):
    config = TrainConfig(minibatch=40, epochs=1, lr=1e-3, critic_warmup=0, grad_cosine=True, ratio=unit)
    policy, noise = ToyPolicy(), NoiseModel(SPEC, sigma_start=0.3, sigma_end=0.1)
    ppo = PPO(policy, noise, Critic(2), config)
    decisions = toy_decisions(policy, noise, 40)
    decisions.episode = np.arange(40) // 2
    decisions.num_executed = torch.arange(40) % SPEC.n_action_steps + 1
    advantages = np.random.default_rng(0).standard_normal(40)
    added = []
    real = GradientSums.add
    monkeypatch.setattr(GradientSums, "add", lambda self, c: (added.append(c.clone()), real(self, c)))
    stats = ppo.update(decisions, advantages, np.zeros(40), iteration=1)
    policy.module.load_state_dict(ToyPolicy().module.state_dict())
    ppo.optimizer.zero_grad()
    index = torch.arange(40)
    new = ppo._log_prob(decisions, Rows.of(index, index.device))
    advantage = torch.as_tensor(advantages, dtype=torch.float32)
    mask = executed_mask(decisions.num_executed, noise)
    loss, _ = ppo._policy_loss(new, decisions.log_prob, advantage, mask)
    loss.backward()
    whole = torch.cat([p.grad.flatten() for p in ppo.groups[0]])
    torch.testing.assert_close(torch.stack(added).mean(0), whole, rtol=1e-3, atol=1e-6)
    assert len(added) == NUM_GROUPS and stats.grad_cosine is not None
    assert stats.grad_signal is not None and -2 < stats.grad_signal <= 1
