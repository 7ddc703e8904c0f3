"""What TF32 does to samples and gradients, emulated: operands of the expert's products rounded to 10 bits of mantissa."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flowrl.flow.likelihood import rescore, rescore_flat
from flowrl.flow.sampler import episode_noise, sample_chain
from flowrl.policy.noise import NoiseModel
from flowrl.policy.smolvla import SmolVLAFlowPolicy

aten = torch.ops.aten


class TF32Products(TorchDispatchMode):
    """Rounds operands as a GPU does: to the nearest, halves away from 0; the products are float32."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (aten.mm.default, aten.bmm.default):
            args = [rounded(operand) for operand in args]
        elif func is aten.addmm.default:
            args = [args[0], *(rounded(operand) for operand in args[1:])]
        return func(*args, **(kwargs or {}))


def rounded(x):
    return ((x.contiguous().view(torch.int32) + 0x1000) & -0x2000).view(torch.float32)


def test_rounding_is_to_ten_bits():
    one = torch.tensor([1.0, 1 + 2**-10, 1 + 2**-11, 1 + 2**-12, -1 - 2**-11, 1 + 3 * 2**-12])
    expected = torch.tensor([1.0, 1 + 2**-10, 1 + 2**-10, 1.0, -1 - 2**-10, 1 + 2**-10])
    assert torch.equal(rounded(one), expected)


@pytest.fixture(scope="module")
def both(base_folder):
    exact, tf32 = SmolVLAFlowPolicy.load(base_folder), SmolVLAFlowPolicy.load(base_folder)
    tf32.choose_velocity("tf32")
    return exact, tf32


def chain_of(policy, make_observation, sigma_end):
    prefix = policy.encode(make_observation(4), [f"Pick {'very ' * (row % 3)}fast." for row in range(4)])
    noise = NoiseModel(policy.spec, sigma_end=sigma_end)
    drawn = [episode_noise(row, 0, policy.spec, noise.num_elements) for row in range(4)]
    x_0, eps = (torch.stack(part) for part in zip(*drawn))
    return prefix, noise, x_0, eps


@pytest.mark.parametrize(
    ("sigma_end", "least", "most"), [(0.002, 0.99, 0.9999), (0.05, 0.9999, 1 - 1e-6), (0.2, 0.99999, 1.0)]
)
def test_tf32_turns_the_gradient_only_where_the_noise_is_small(
    both, make_observation, sigma_end, least, most
):
    """A score's gradient is divided by sigma^2, so that the step of the smallest noise bears nearly all of it, errors too."""
    exact, tf32 = both
    prefix, noise, x_0, eps = chain_of(exact, make_observation, sigma_end)
    states = sample_chain(exact, prefix, x_0, noise, eps).states

    def gradient(policy):
        weights = list(policy.trainable_parameters().values())
        parts = torch.autograd.grad(rescore_flat(policy, prefix, states, noise).mean(), weights)
        return torch.cat([part.double().flatten() for part in parts])

    expected, unrounded = gradient(exact), gradient(tf32)
    with TF32Products():
        found, lerobots = gradient(tf32), gradient(exact)
    assert torch.cosine_similarity(unrounded, expected, dim=0) > 1 - 1e-6
    assert least < torch.cosine_similarity(found, expected, dim=0) < most
    # It is the rounding's doing: LeRobot's operations, rounded in the same way, have the same gradient.
    assert torch.cosine_similarity(found, lerobots, dim=0) > 1 - 1e-5


def test_tf32_samples_within_the_bounds_of_the_tests_on_a_gpu(both, make_observation):
    exact, tf32 = both
    prefix, noise, x_0, eps = chain_of(exact, make_observation, 0.002)
    expected = sample_chain(exact, prefix, x_0).actions
    with torch.no_grad(), TF32Products():
        actions = sample_chain(tf32, prefix, x_0).actions
        chain = sample_chain(tf32, prefix, x_0, noise, eps)
        again = rescore(tf32, prefix, chain.states, noise)
    assert 0 < (actions - expected).abs().max() < 0.02
    degrees = [tf32.unnormalize(part[..., :6]) for part in (actions, expected)]
    assert 1e-3 < (degrees[0] - degrees[1]).abs().max() < 0.2
    assert torch.equal(again, chain.log_prob)
