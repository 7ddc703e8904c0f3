"""The update in one size and as a replayed function: the same gradients as part by part."""

import copy
import gc
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch

from flowrl.config import TrainConfig
from flowrl.graphs import without_collection
from flowrl.policy.critic import Critic
from flowrl.policy.noise import NoiseModel
from flowrl.ppo import PPO
from toy import SPEC, ToyPolicy, toy_decisions

CONFIG = TrainConfig(minibatch=7, epochs=2, lr=1e-3, critic_warmup=0, target_kl=10.0)


class Directly:
    """A `GraphCache` that calls the function each time, as a capture does."""

    def __init__(self):
        self.keys, self.sizes = [], []

    @torch.no_grad()
    def run(self, key, function, inputs, weights=()):
        self.keys.append(key)
        self.sizes.append(len(inputs[-1]))
        return tuple(output.clone() for output in function(*(tensor.clone() for tensor in inputs)))


class OneSize(ToyPolicy):
    """Counts itself as compiled, and writes down the sizes of its batches."""

    compiled = True

    def __init__(self):
        super().__init__()
        self.sizes = []

    def velocity_field(self, prefix, repeats=1):
        self.sizes.append((len(prefix), repeats))
        return super().velocity_field(prefix, repeats)


def update(policy, config, count=24, graphs=None, learn_sigma=False):
    """Weights and statistics after one update on the same decisions."""
    noise = NoiseModel(SPEC, sigma_start=0.3, sigma_end=0.1, learn_sigma=learn_sigma)
    torch.manual_seed(0)
    ppo = PPO(policy, noise, Critic(2), config)
    decisions = toy_decisions(ToyPolicy(), copy.deepcopy(noise), count)
    decisions.num_executed[::3] = 2  # minibatches differ in what counts
    ppo._graphs = graphs
    advantages, returns = np.random.default_rng(0).standard_normal((2, count))
    stats = ppo.update(decisions, advantages, returns, iteration=1)
    modules = {"policy": policy.module, "noise": noise, "critic": ppo.critic}
    weights = {
        f"{name} {key}": p for name, module in modules.items() for key, p in module.state_dict().items()
    }
    return weights, stats


@pytest.mark.parametrize("ratio", ["element", "step", "chunk"])
@pytest.mark.parametrize("learn_sigma", [False, True])
def test_a_replayed_minibatch_has_the_gradients_and_statistics_of_one_that_is_not(ratio, learn_sigma):
    config = replace(CONFIG, ratio=ratio, entropy_coef=0.01 if learn_sigma else 0.0)
    expected, graphs = update(ToyPolicy(), config, learn_sigma=learn_sigma), Directly()
    found = update(ToyPolicy(), config, graphs=graphs, learn_sigma=learn_sigma)
    assert all(torch.equal(found[0][name], tensor) for name, tensor in expected[0].items())
    assert found[1] == expected[1]
    # 24 decisions in minibatches of 7: three whole ones in each of two epochs, and a rest, which is another size.
    assert graphs.sizes == [7] * 6 and len(set(graphs.keys)) == 1


def test_the_critic_alone_is_not_replayed():
    graphs = Directly()
    config = replace(CONFIG, critic_warmup=1)
    weights, _ = update(ToyPolicy(), config, graphs=graphs)
    assert graphs.sizes == []
    assert all(torch.equal(weights[name], value) for name, value in update(ToyPolicy(), config)[0].items())


@pytest.mark.parametrize("count", [24, 3])
def test_a_compiled_policy_scores_in_one_size_and_learns_the_same(count):
    policy = OneSize()
    expected, found = update(ToyPolicy(), CONFIG, count), update(policy, CONFIG, count)
    flat = [size for size, repeats in policy.sizes if repeats > 1]
    assert set(flat) == {min(CONFIG.minibatch, count)}
    for name, tensor in expected[0].items():
        torch.testing.assert_close(found[0][name], tensor, rtol=1e-5, atol=1e-6)
    assert found[1].kl == pytest.approx(expected[1].kl, rel=1e-3)
    assert found[1].ratio_max_dev == expected[1].ratio_max_dev == 0.0


class Node:
    """Of a circle, which reference counts do not free."""

    def __init__(self):
        self.own = self


def test_no_garbage_is_collected_within_a_capture_and_none_is_left_from_before():
    before = weakref.ref(Node())
    thresholds = gc.get_threshold()
    gc.set_threshold(1)
    try:
        with without_collection():
            assert before() is None and not gc.isenabled()
            within = weakref.ref(Node())
            _ = [[] for _ in range(1000)]
            assert within() is not None
        assert gc.isenabled()
        with pytest.raises(ZeroDivisionError), without_collection():
            _ = 1 / 0
        assert gc.isenabled()
    finally:
        gc.set_threshold(*thresholds)
    gc.disable()
    try:
        with without_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
