"""A reward on the action itself moves the deterministic action the way it should."""

import itertools

import numpy as np
import pytest
import torch

from flowrl.config import TrainConfig
from flowrl.flow.sampler import sample_chain
from flowrl.gae import normalize_advantages
from flowrl.policy.critic import Critic
from flowrl.policy.noise import NoiseModel
from flowrl.ppo import PPO
from toy import SPEC, ToyPolicy, toy_decisions

NOISES = {
    "white": {},
    "dct": {"basis": "dct", "num_modes": 2},
    "learned": {"learn_sigma": True},
}


def shift(chains: torch.Tensor) -> np.ndarray:
    """Mean of joint 0 over the chunk, normalized units, (B,)."""
    return chains[:, -1, :, 0].mean(dim=1).detach().cpu().numpy()


def deterministic_shift(policy: ToyPolicy) -> float:
    generator = torch.Generator().manual_seed(9)
    state = torch.empty(64, 2).uniform_(-1, 1, generator=generator)
    x_0 = torch.randn(64, SPEC.chunk_size, SPEC.padded_action_dim, generator=generator)
    prefix = policy.encode({"agent_pos": state.numpy()}, ["toy"] * 64)
    return float(shift(sample_chain(policy, prefix, x_0).states).mean())


@pytest.mark.parametrize("unit", ["element", "step", "chunk"])
@pytest.mark.parametrize("basis", NOISES)
@pytest.mark.parametrize("sign", [1, -1])
def test_deterministic_action_follows_the_reward(unit, basis, sign):
    policy = ToyPolicy()
    noise = NoiseModel(SPEC, sigma_start=0.3, sigma_end=0.1, **NOISES[basis])
    config = TrainConfig(minibatch=64, epochs=2, lr=1e-3, critic_warmup=0, target_kl=1e9, ratio=unit)
    ppo = PPO(policy, noise, Critic(2), config)
    positions = [deterministic_shift(policy)]
    for iteration in range(1, 4):
        decisions = toy_decisions(policy, noise, 256, seed=iteration, round_size=64)
        rewards = sign * shift(decisions.states).astype(np.float64)
        ppo.update(decisions, normalize_advantages(rewards), rewards, iteration)
        positions.append(deterministic_shift(policy))
    assert all(sign * (after - before) > 0 for before, after in itertools.pairwise(positions))
    assert sign * (positions[-1] - positions[0]) > 0.02


def test_bandit_is_learned():
    """Reward: minus the squared distance of the chunk's mean action to the goal in the state. It rises to near 0."""
    policy = ToyPolicy()
    noise = NoiseModel(SPEC, sigma_start=0.3, sigma_end=0.1, basis="dct", num_modes=2)
    config = TrainConfig(minibatch=128, epochs=4, lr=3e-3, critic_lr=1e-2, critic_warmup=1, target_kl=0.05)
    ppo = PPO(policy, noise, Critic(2), config)
    means = []
    for iteration in range(1, 26):
        decisions = toy_decisions(policy, noise, 512, seed=iteration, round_size=128)
        actions = policy.unnormalize(decisions.states[:, -1, :, :2]).mean(dim=1)
        rewards = (
            -(actions - decisions.prefix.tensors["state"]).square().sum(dim=1).numpy().astype(np.float64)
        )
        with torch.no_grad():
            values = ppo.critic(decisions.features).numpy()
        ppo.update(decisions, normalize_advantages(rewards - values), rewards, iteration)
        means.append(rewards.mean())
    assert np.mean(means[-3:]) > np.mean(means[:3]) + 0.3
