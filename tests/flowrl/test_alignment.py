"""Keys and values are padded to whole rows of a GPU's tensor cores; what is added is never seen."""

import math
from dataclasses import replace

import pytest
import torch
from small_smolvla import SMALL, statistics
from torch.utils._python_dispatch import TorchDispatchMode

from flowrl.policy import layers
from flowrl.policy.layers import aligned, bias_of
from flowrl.policy.smolvla import SmolVLAFlowPolicy
from flowrl.policy.tiny import build_smolvla, save_policy_folder

STEPS = 3


class Products(TorchDispatchMode):
    """Operands and results of the batched matrix products."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.bmm.default:
            self.found.append((*args, result))
        return result


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def fused(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("aligned")
    module = build_smolvla(folder / "vlm", size=replace(SMALL, text_width=96), seed=1)
    module.model.vlm_with_expert.vlm.to(request.param)
    save_policy_folder(folder, module, statistics())
    policy = SmolVLAFlowPolicy.load(folder)
    policy.choose_velocity("fused")
    return policy


def prefix_of(policy, observation):
    return policy.encode(observation, ["Pick fast.", "Pick very fast."])


def velocity_of(policy, prefix):
    """A velocity and its gradients."""
    x_t = torch.randn(2 * STEPS, 50, 6, generator=torch.Generator().manual_seed(0))
    v_t = policy.velocity_field(prefix, STEPS)(x_t, torch.linspace(0, 1, 2 * STEPS))
    return v_t, torch.autograd.grad(v_t.square().mean(), list(policy.trainable_parameters().values()))


def misaligned(matrix):
    """Whether rows or columns in memory do not begin at whole 16 bytes."""
    steps = sorted(matrix.stride())
    bytes_of = [step * matrix.element_size() for step in steps[1:]]
    return (
        steps[0] != 1 or matrix.storage_offset() * matrix.element_size() % 16 or any(b % 16 for b in bytes_of)
    )


def test_all_products_of_attention_have_aligned_operands(fused, make_observation):
    with Products() as products:
        prefix = prefix_of(fused, make_observation(2))
        velocity_of(fused, prefix)
    assert prefix.tensors["keys"].shape[3] % 8 != 0 and fused.spec.chunk_size % 8 != 0
    assert len(products.found) > 20
    wrong = [[tuple(m.shape) for m in each] for each in products.found if any(map(misaligned, each))]
    assert not wrong


def test_padded_attention_is_the_attention_without(fused, make_observation, monkeypatch):
    def all_of(alignment):
        monkeypatch.setattr(layers, "ALIGNMENT", alignment)
        return prefix_of(fused, make_observation(2)), *velocity_of(fused, prefix)

    prefix = prefix_of(fused, make_observation(2))
    padded, plain = all_of(8), all_of(1)
    with Products() as products:
        all_of(1)
    assert any(misaligned(matrix) for each in products.found for matrix in each)
    valid = prefix.tensors["pad_mask"][:, None, None, :, None].expand_as(prefix.tensors["keys"])
    for name in ("keys", "values"):
        a, b = (result[0].tensors[name][valid].float() for result in (padded, plain))
        equal = torch.isclose(a, b, rtol=1e-4, atol=1e-5).float().mean()
        # A sum in another order may tip a rounding to bfloat16.
        assert equal == 1 or (equal > 0.95 and prefix.tensors[name].dtype == torch.bfloat16)
    torch.testing.assert_close(padded[1], plain[1], rtol=1e-5, atol=1e-5)
    for a, b in zip(padded[2], plain[2]):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5 * b.abs().max().item())


@pytest.mark.parametrize("length", [1, 8, 50, 177])
def test_what_is_added_is_never_seen_not_even_where_nothing_is(length):
    states = torch.randn(2, length, 4)
    padded = aligned(states)
    assert padded.shape[1] % 8 == 0 and padded.shape[1] - length < 8 and padded.is_contiguous()
    assert torch.equal(padded[:, :length], states) and not padded[:, length:].any()
    visible = torch.rand(3, length) < 0.5
    visible[0], visible[1] = False, True
    bias = bias_of(visible)
    assert bias.shape == (3, padded.shape[1]) and (bias[:, length:] == -math.inf).all()
    weights = bias.softmax(dim=-1)
    assert (weights[:, length:] == 0).all()
    torch.testing.assert_close(weights[:2, :length], torch.full((2, length), 1 / length))


def test_states_that_are_not_seen_have_no_influence(fused, make_observation, monkeypatch):
    """Neither those of the padding, which are changed here, nor those of absent words."""
    prefix = prefix_of(fused, make_observation(2))
    absent = ~prefix.tensors["pad_mask"]
    assert absent.any()
    expected = velocity_of(fused, prefix)[0]

    def other(states):
        padded = aligned(states).clone()
        padded[..., states.shape[-2] :, :] = 3.0
        return padded

    for name in ("keys", "values"):
        prefix.tensors[name].masked_fill_(absent[:, None, None, :, None], 7.0)
    monkeypatch.setattr(layers, "aligned", other)
    assert torch.equal(velocity_of(fused, prefix)[0], expected)
