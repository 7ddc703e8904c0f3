"""A reward on the action itself moves the deterministic action the way it should."""

import itertools

import numpy as np
import pytest
import torch

from flowrl.config import TrainConfig
from flowrl.flow.sampler import episode_noise, sample_chain
from flowrl.gae import normalize_advantages
from flowrl.policy.critic import Critic
from flowrl.policy.noise import NoiseModel
from flowrl.policy.smolvla import SmolVLAFlowPolicy
from flowrl.ppo import PPO
from flowrl.rollout import Decisions
from toy import SPEC, ToyPolicy, toy_decisions

NOISES = {
    "white": {},
    "dct": {"basis": "dct", "num_modes": 2},
    "learned": {"learn_sigma": True},
    "head": {"kind": "head", "num_features": 2},
    "flow-sde": {"kind": "flow-sde", "flow_sde_level": 0.5},
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


@pytest.mark.parametrize("basis", ["white", "dct"])
@pytest.mark.parametrize("sign", [1, -1])
def test_smolvla_follows_the_reward(base_folder, make_observation, tasks, basis, sign):
    """The same with LeRobot's network: the joint that is rewarded moves, from chains with stored prefixes."""
    num_decisions = 32
    policy = SmolVLAFlowPolicy.load(base_folder)
    modes = {"white": {}, "dct": {"basis": "dct", "num_modes": 6}}[basis]
    noise = NoiseModel(policy.spec, sigma_start=0.2, sigma_end=0.05, **modes)
    prefix = policy.encode(make_observation(num_decisions), tasks(num_decisions))
    features = policy.prefix_features(prefix)
    config = TrainConfig(minibatch=16, epochs=2, lr=1e-3, critic_warmup=0, target_kl=1e9)
    ppo = PPO(policy, noise, Critic(features.shape[1]), config)

    def draw(iteration: int) -> tuple[torch.Tensor, torch.Tensor]:
        drawn = [episode_noise(iteration, n, policy.spec, noise.num_elements) for n in range(num_decisions)]
        return torch.stack([x_0 for x_0, _ in drawn]), torch.stack(
            [eps for _, eps in drawn if eps is not None]
        )

    def deterministic(x_0: torch.Tensor) -> np.ndarray:
        return shift(sample_chain(policy, prefix, x_0).states)

    probe, _ = draw(99)
    start = deterministic(probe).mean()
    for iteration in range(1, 3):
        x_0, eps = draw(iteration)
        chain = sample_chain(policy, prefix, x_0, noise, eps)
        assert chain.log_prob is not None
        decisions = Decisions(
            prefix=prefix,
            states=chain.states,
            log_prob=chain.log_prob,
            features=features,
            num_executed=torch.full((num_decisions,), policy.spec.n_action_steps),
            episode=np.arange(num_decisions),
            order=np.zeros(num_decisions, dtype=np.int64),
            rounds=[np.arange(num_decisions)],
        )
        rewards = sign * (shift(chain.states) - deterministic(x_0)).astype(np.float64)
        stats = ppo.update(decisions, normalize_advantages(rewards), rewards, iteration)
        assert stats.ratio_max_dev == 0.0
    assert sign * (deterministic(probe).mean() - start) > 0.002
