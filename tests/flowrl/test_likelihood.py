import numpy as np
import pytest
import torch

from flowrl.flow.likelihood import rescore, rescore_flat
from flowrl.flow.sampler import episode_noise, sample_chain
from flowrl.policy.interface import FlowPolicy
from flowrl.policy.noise import NoiseModel
from flowrl.prefix import Prefix

NUM_DECISIONS = 7


DCT = {"basis": "dct", "num_modes": 6}
KINDS = {
    "white": {},
    "dct": DCT,
    "learned": {"learn_sigma": True},
    "head": {"kind": "head"},
    "head dct": {"kind": "head", **DCT},
    "flow-sde": {"kind": "flow-sde"},
    "flow-sde dct": {"kind": "flow-sde", **DCT},
}


def make_noise(policy: FlowPolicy, prefix: Prefix, name: str) -> NoiseModel:
    """A noise whose trained weights, if any, are off their start."""
    settings = dict(KINDS[name])
    if settings.get("kind") == "head":
        settings["num_features"] = policy.prefix_features(prefix).shape[1]
    noise = NoiseModel(policy.spec, **settings)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in noise.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return noise


@pytest.fixture(scope="module", params=list(KINDS))
def sampled(policy, request):
    rng = np.random.default_rng(2)
    observation = {
        "pixels": {
            c: rng.integers(0, 256, (NUM_DECISIONS, 64, 64, 3), dtype=np.uint8) for c in ("top", "wrist")
        },
        "agent_pos": rng.normal(size=(NUM_DECISIONS, 6)).astype(np.float32) * 30,
    }
    prefix = policy.encode(observation, ["Pick up the pawn on c3."] * NUM_DECISIONS)
    noise = make_noise(policy, prefix, request.param)
    drawn = [episode_noise(i, 0, policy.spec, noise.num_elements) for i in range(NUM_DECISIONS)]
    x_0, eps = (torch.stack(part) for part in zip(*drawn))
    chain = sample_chain(policy, prefix, x_0, noise, eps)
    assert chain.log_prob is not None and chain.log_prob.dtype == torch.float32
    return noise, prefix, chain


def max_ratio_deviation(new, old):
    return float((new - old).exp().sub(1).abs().max())


def test_a_chain_rescored_as_it_was_sampled_gives_ratio_one_bit_for_bit(policy, sampled):
    noise, prefix, chain = sampled
    assert torch.equal(rescore(policy, prefix, chain.states, noise), chain.log_prob)
    with torch.no_grad():
        assert torch.equal(rescore(policy, prefix, chain.states, noise), chain.log_prob)


@pytest.mark.parametrize("score", [rescore, rescore_flat])
@pytest.mark.parametrize("size", [1, 2, 3, NUM_DECISIONS])
@torch.no_grad()
def test_any_minibatch_composition_gives_ratio_one_within_a_thousandth(policy, sampled, score, size):
    noise, prefix, chain = sampled
    order = torch.randperm(NUM_DECISIONS, generator=torch.Generator().manual_seed(size))
    for start in range(0, NUM_DECISIONS, size):
        index = order[start : start + size]
        new = score(policy, prefix[index], chain.states[index], noise)
        assert max_ratio_deviation(new, chain.log_prob[index]) <= 1e-3


@torch.no_grad()
def test_prefixes_of_different_length_joined_for_an_update_score_the_same(policy, sampled):
    noise, prefix, chain = sampled
    pad = Prefix.concatenate([prefix, _longer(prefix)])[:NUM_DECISIONS]
    assert pad.tensors["keys"].shape[3] == prefix.tensors["keys"].shape[3] + 4
    assert max_ratio_deviation(rescore(policy, pad, chain.states, noise), chain.log_prob) <= 1e-3


def _longer(prefix: Prefix) -> Prefix:
    def lengthen(name, tensor):
        shape = list(tensor.shape)
        shape[prefix.token_axes[name]] += 4
        return tensor.new_zeros(shape)

    return Prefix({name: lengthen(name, t) for name, t in prefix.tensors.items()}, prefix.token_axes)


def test_another_decisions_prefix_gives_another_density(policy, sampled):
    noise, prefix, chain = sampled
    with torch.no_grad():
        wrong = rescore(policy, prefix[[1, 0]], chain.states[:2], noise)
    assert max_ratio_deviation(wrong, chain.log_prob[:2]) > 0.01


def test_the_gradient_raises_the_density_of_the_sampled_chain(policy, sampled):
    noise, prefix, chain = sampled
    parameters = list(policy.trainable_parameters().values())
    before = rescore_flat(policy, prefix, chain.states, noise).mean()
    gradients = torch.autograd.grad(before, parameters)
    norm = torch.stack([g.square().sum() for g in gradients]).sum().sqrt()
    old = [p.detach().clone() for p in parameters]
    with torch.no_grad():
        for parameter, gradient in zip(parameters, gradients):
            parameter += 1e-4 * gradient / norm
        after = rescore_flat(policy, prefix, chain.states, noise).mean()
        for parameter, value in zip(parameters, old):
            parameter.copy_(value)
    assert norm > 0 and after > before


@torch.no_grad()
def test_a_vanishing_sde_gives_the_noise_free_chain(policy, sampled):
    _, prefix, chain = sampled
    noise = NoiseModel(policy.spec, kind="flow-sde", flow_sde_level=1e-6)
    _, eps = episode_noise(0, 0, policy.spec, noise.num_elements)
    x_0, eps = chain.states[:2, 0], torch.stack([eps, eps])
    noisy = sample_chain(policy, prefix[:2], x_0, noise, eps).states
    torch.testing.assert_close(noisy, sample_chain(policy, prefix[:2], x_0).states, rtol=0, atol=1e-5)


def test_chains_of_the_wrong_shape_are_refused(policy, sampled):
    noise, prefix, chain = sampled
    with pytest.raises(ValueError, match="states have shape"):
        rescore(policy, prefix, chain.states[:, 1:], noise)
