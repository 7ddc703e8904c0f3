"""The action expert as flowrl runs it, against LeRobot's own denoising step."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from lerobot.configs.types import FeatureType, NormalizationMode
from lerobot.policies.common.vla_utils import make_att_2d_masks
from safetensors.torch import load_file, save_file
from small_smolvla import SMALL, statistics
from transformers import DynamicCache

from flowrl import checks
from flowrl.checkpoint import save_checkpoint
from flowrl.compiled import Compiler
from flowrl.errors import FlowRLError
from flowrl.flow.likelihood import rescore, rescore_flat
from flowrl.flow.sampler import episode_noise, sample_chain
from flowrl.policy.layers import embed_pixels
from flowrl.policy.noise import NoiseModel
from flowrl.policy.smolvla import SmolVLAFlowPolicy
from flowrl.policy.split_product import split_linear, weight_parts
from flowrl.policy.tiny import build_smolvla, save_policy_folder
from flowrl.precision import matrix_products

STEPS = 10


@pytest.fixture(scope="module", params=["fused", "split", "tf32"])
def fused(base_folder, request):
    policy = SmolVLAFlowPolicy.load(base_folder)
    policy.choose_velocity(request.param)
    return policy


def lerobot_velocity(policy, x_t, time, prefix):
    """LeRobot's denoising step, with a cache of its own."""
    cache = DynamicCache()
    for layer in range(prefix.tensors["keys"].shape[1]):
        cache.update(prefix.tensors["keys"][:, layer], prefix.tensors["values"][:, layer], layer)
    return policy.module.model.denoise_step(
        prefix_pad_masks=prefix.tensors["pad_mask"], past_key_values=cache, x_t=x_t, timestep=time
    )


@pytest.mark.parametrize("compiled", [False, True])
def test_a_split_product_is_nearer_to_float64_than_tf32_could_be(compiled):
    x, weight = torch.randn(3, 5, 700), torch.randn(40, 700)
    x.requires_grad_()
    weight.requires_grad_()
    expected = torch.nn.functional.linear(x.double(), weight.double())
    call = Compiler(compiled, "aot_eager")
    got = call(split_linear, x, weight, call(weight_parts, weight))
    assert got.shape == (3, 5, 40) and got.dtype == torch.float32
    assert 1e-7 < (got - expected).norm() / expected.norm() < 2e-5
    direction = torch.randn(3, 5, 40)
    a, b = (torch.autograd.grad((y * direction).sum(), (x, weight)) for y in (expected, got))
    for x_gradient, y_gradient in zip(a, b):
        assert (x_gradient - y_gradient).norm() / x_gradient.norm() < 2e-5
    assert not call.failed


def test_the_parts_of_a_split_number_are_the_same_compiled_and_not():
    numbers = torch.cat([torch.randn(500), torch.tensor([0.0, 3e-39, 1e38, 1.00390625, 1.01171875])])[None]
    parts = weight_parts(numbers)
    assert torch.equal(Compiler(True, "aot_eager")(weight_parts, numbers), parts)
    high, low, _ = parts.float().chunk(3, dim=1)
    assert ((high + low - numbers).abs() <= 2**-16 * numbers.abs() + 1e-40).all() and (low != 0).any()


def test_where_tf32_is_allowed_nothing_is_split(base_folder, make_observation):
    policy = SmolVLAFlowPolicy.load(base_folder)
    policy.choose_velocity("split")
    prefix = uneven_prefix(policy, make_observation, 2)
    x_t, time = torch.randn(2, 50, 6), torch.rand(2)
    split = policy.velocity(x_t, time, prefix)
    with matrix_products("tf32"):
        allowed = policy.velocity(x_t, time, prefix)
    policy.choose_velocity("fused")
    with matrix_products("tf32"):
        assert torch.equal(policy.velocity(x_t, time, prefix), allowed)
    assert not torch.equal(split, allowed)


def uneven_prefix(policy, make_observation, batch):
    """Instructions of different length, so that rows have different masks and positions."""
    return policy.encode(
        make_observation(batch), [f"Pick {'very ' * (row % 3)}fast." for row in range(batch)]
    )


@pytest.mark.parametrize("batch", [1, 2, 5])
@torch.no_grad()
def test_the_exact_prefix_is_lerobots_bit_for_bit(policy, make_observation, batch):
    prefix = uneven_prefix(policy, make_observation, batch).tensors
    inputs = policy.prepare(
        make_observation(batch), [f"Pick {'very ' * (row % 3)}fast." for row in range(batch)]
    )
    model, (images, masks) = policy.module.model, policy.module.prepare_images(inputs)
    text = inputs["observation.language.tokens"], inputs["observation.language.attention_mask"]
    embedded, pad_mask, block = model.embed_prefix(
        images, masks, *text, state=policy.module.prepare_state(inputs)
    )
    _, cache = model.vlm_with_expert.forward(
        attention_mask=make_att_2d_masks(pad_mask, block),
        position_ids=torch.cumsum(pad_mask, dim=1) - 1,
        inputs_embeds=[embedded, None],
        use_cache=True,
    )
    assert torch.equal(prefix["pad_mask"], pad_mask)
    for layer, own in enumerate(cache.layers):
        assert torch.equal(prefix["keys"][:, layer], own.keys)
        assert torch.equal(prefix["values"][:, layer], own.values)


def test_remembered_tokens_are_the_tokenizers_and_cannot_be_spoilt(base_folder, make_observation):
    policy = SmolVLAFlowPolicy.load(base_folder)
    names = ["observation.language.tokens", "observation.language.attention_mask"]
    observation, tasks = make_observation(2), ["Pick the pawn.", "Lift it"]
    first = [policy.prepare(observation, tasks)[name].clone() for name in names]
    policy.prepare(observation, tasks)[names[0]].zero_()
    other = policy.prepare(observation, tasks[::-1])
    for name, value in zip(names, first):
        assert torch.equal(policy.prepare(observation, tasks)[name], value)
        assert torch.equal(other[name], value.flip(0)) and not torch.equal(other[name], value)


@pytest.mark.parametrize("batch", [1, 2, 5])
@torch.no_grad()
def test_the_exact_velocity_is_lerobots_bit_for_bit(policy, make_observation, batch):
    prefix = uneven_prefix(policy, make_observation, batch)
    x_t, time = torch.randn(batch, 50, 6), torch.rand(batch)
    assert torch.equal(policy.velocity(x_t, time, prefix), lerobot_velocity(policy, x_t, time, prefix))


@torch.no_grad()
def test_several_chunks_of_one_prefix_are_scored_as_if_it_were_repeated(policy, make_observation):
    prefix = uneven_prefix(policy, make_observation, 3)
    x_t, time = torch.randn(3 * STEPS, 50, 6), torch.rand(3 * STEPS)
    expected = lerobot_velocity(policy, x_t, time, prefix.repeat_interleave(STEPS))
    assert torch.equal(policy.velocity_field(prefix, STEPS)(x_t, time), expected)


@pytest.mark.parametrize("expert_dtype", ["float32", "loaded"])
@torch.no_grad()
def test_a_bfloat16_policy_has_lerobots_velocity_too(folder_copy, make_observation, expert_dtype):
    weights = load_file(folder_copy / "model.safetensors")
    halved = {n: t.bfloat16() if ".vlm." in n or ".lm_expert." in n else t for n, t in weights.items()}
    save_file(halved, folder_copy / "model.safetensors")
    policy = SmolVLAFlowPolicy.load(folder_copy, expert_dtype=expert_dtype)
    prefix = uneven_prefix(policy, make_observation, 2)
    x_t, time = torch.randn(2, 50, 6), torch.rand(2)
    expected = lerobot_velocity(policy, x_t, time, prefix)
    assert torch.equal(policy.velocity(x_t, time, prefix), expected)
    policy.choose_velocity("fused")
    tolerance = 1e-4 if expert_dtype == "float32" else 0.03  # bfloat16 has 8 bits
    assert (policy.velocity(x_t, time, prefix) - expected).abs().max() < tolerance * expected.abs().max()


@pytest.mark.parametrize(
    "change",
    [{"attention_mode": "self_attn"}, {"num_expert_layers": 1}, {"self_attn_every_n_layers": -1}],
    ids=str,
)
@torch.no_grad()
def test_other_arrangements_of_layers_are_lerobots(tmp_path, monkeypatch, make_observation, tasks, change):
    import flowrl.policy.tiny as tiny

    build = tiny.SmolVLAConfig
    monkeypatch.setattr(tiny, "SmolVLAConfig", lambda **settings: build(**settings, **change))
    save_policy_folder(tmp_path, build_smolvla(tmp_path / "vlm", size=SMALL, padded_dim=8), statistics())
    policy = SmolVLAFlowPolicy.load(tmp_path)
    assert all(getattr(policy.module.config, name) == value for name, value in change.items())
    prefix = policy.encode(make_observation(2), tasks(2))
    x_t, time = torch.randn(2, 50, 8), torch.rand(2)
    expected = lerobot_velocity(policy, x_t, time, prefix)
    assert torch.equal(policy.velocity(x_t, time, prefix), expected)
    policy.choose_velocity("fused")
    torch.testing.assert_close(policy.velocity(x_t, time, prefix), expected, rtol=1e-5, atol=1e-5)


def test_fused_actions_are_the_exact_ones_to_a_hundredth_of_a_degree(policy, fused, make_observation):
    prefix, x_0 = uneven_prefix(policy, make_observation, 4), torch.randn(4, 50, 6)
    degrees = [p.unnormalize(sample_chain(p, prefix, x_0).actions[..., :6]) for p in (policy, fused)]
    difference = (degrees[0] - degrees[1]).abs().max()
    assert 0 < difference < 0.01
    assert degrees[0].std() > 1


@pytest.mark.parametrize("mode", ["exact", "fused", "split", "tf32"])
def test_gradients_are_lerobots(base_folder, make_observation, mode):
    ours = SmolVLAFlowPolicy.load(base_folder)
    ours.choose_velocity(mode)
    prefix = uneven_prefix(ours, make_observation, 3)
    x_t, time, direction = torch.randn(3 * STEPS, 50, 6), torch.rand(3 * STEPS), torch.randn(3 * STEPS, 50, 6)
    expected = lerobot_velocity(ours, x_t, time, prefix.repeat_interleave(STEPS))
    got = ours.velocity_field(prefix, STEPS)(x_t, time)
    weights = list(ours.trainable_parameters().values())
    a, b = (torch.autograd.grad((v * direction).sum(), weights) for v in (expected, got))
    for name, x, y in zip(ours.trainable_parameters(), a, b):
        assert torch.cosine_similarity(x.flatten(), y.flatten(), dim=0) > 0.9999, name
        assert abs(x.norm() / y.norm() - 1) < 1e-4, name


def noisy_chain(policy, prefix, noise):
    drawn = [episode_noise(row, 0, policy.spec, noise.num_elements) for row in range(len(prefix))]
    x_0, eps = (torch.stack(part) for part in zip(*drawn))
    return sample_chain(policy, prefix, x_0, noise, eps)


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_fused_chains_rescored_as_sampled_have_ratio_one_exactly(fused, make_observation, count):
    prefix = uneven_prefix(fused, make_observation, count)
    noise = NoiseModel(fused.spec, basis="dct", num_modes=6)
    chain = noisy_chain(fused, prefix, noise)
    assert chain.states.shape[0] == chain.log_prob.shape[0] == count
    assert torch.equal(rescore(fused, prefix, chain.states, noise), chain.log_prob)
    with torch.no_grad():
        assert torch.equal(rescore(fused, prefix, chain.states, noise), chain.log_prob)
        flat = rescore_flat(fused, prefix, chain.states, noise)
    assert ((flat - chain.log_prob).exp() - 1).abs().max() < 1e-3


def test_rows_that_fill_a_batch_up_change_nothing(fused, make_observation):
    assert [fused.sampling_batch(count) for count in (1, 2, 3, 16, 17, 100, 128, 129)] == [
        2, 2, 4, 16, 24, 128, 128, 256,
    ]  # fmt: skip
    prefix, x_0 = uneven_prefix(fused, make_observation, 4), torch.randn(4, 50, 6)
    other = x_0.clone()
    other[3] = 7.0
    three, four, changed = (
        sample_chain(fused, prefix[: len(x)], x).states[:3] for x in (x_0[:3], x_0, other)
    )
    assert torch.equal(three, four) and torch.equal(three, changed)


def test_the_way_of_the_velocity_is_chosen_by_the_device_and_checked(fused, base_folder, policy):
    assert (policy.velocity_mode, policy.graphs) == ("exact", None)
    assert fused.velocity_mode in ("fused", "split", "tf32") and fused.graphs is None
    with pytest.raises(FlowRLError, match="--velocity 'fast': must be auto, exact, fused, split, tf32"):
        fused.choose_velocity("fast")


def test_a_policy_with_one_way_refuses_another():
    from toy import ToyPolicy

    toy = ToyPolicy()
    toy.choose_velocity("auto")
    with pytest.raises(FlowRLError, match="--velocity fused: ToyPolicy"):
        toy.choose_velocity("fused")
    prefix = toy.encode({"agent_pos": np.zeros((2, 2), np.float32)}, ["go"] * 2)
    x_t, time = torch.randn(4, 4, 3), torch.rand(4)
    expected = toy.velocity(x_t, time, prefix.repeat_interleave(2))
    assert torch.equal(toy.velocity_field(prefix, 2)(x_t, time), expected)


@pytest.mark.parametrize("batch", [1, 3])
def test_the_fused_encoder_gives_lerobots_prefix_up_to_rounding(policy, fused, make_observation, batch):
    ours, expected = (uneven_prefix(p, make_observation, batch).tensors for p in (fused, policy))
    assert torch.equal(ours["pad_mask"], expected["pad_mask"])
    for name in ("keys", "values"):
        assert ours[name].shape == expected[name].shape
        valid = expected["pad_mask"][:, None, None, :, None].expand_as(expected[name])
        torch.testing.assert_close(ours[name][valid], expected[name][valid], rtol=1e-4, atol=1e-5)


def test_a_fused_chunk_from_images_is_lerobots_to_a_hundredth_of_a_degree(fused, make_observation, tasks):
    observation, x_0 = make_observation(3), torch.randn(3, 50, 6)
    chain = sample_chain(fused, fused.encode(observation, tasks(3)), x_0)
    expected = fused.predict_action_chunk(observation, tasks(3), x_0)
    assert (fused.unnormalize(chain.actions[..., :6]) - expected).abs().max() < 0.01


@pytest.mark.parametrize("height", [48, 64])
def test_pixels_are_lerobots_bit_for_bit_and_patches_up_to_rounding(fused, make_observation, tasks, height):
    """Images that are resized and padded, and such that have the size."""
    observation = make_observation(2)
    observation["pixels"] = {
        name: np.random.default_rng(0).integers(0, 256, (2, height, 64, 3), dtype=np.uint8)
        for name in observation["pixels"]
    }
    expected, _ = fused.module.prepare_images(fused.prepare(observation, tasks(2)))
    levels, vlm = list(fused.prepare_levels(observation, tasks(2))[1].values()), fused._fused_vlm
    whole = [vlm._pixel_values[image.int()] for image in levels]
    pixels = whole if height == 64 else [vlm._resized(image, (64, 64)) for image in levels]
    for ours, image in zip(pixels, expected):
        assert torch.equal(ours.permute(0, 3, 1, 2), image)
    convolution = vlm._vlm.vision_model.embeddings.patch_embedding
    patches = convolution(torch.cat(expected)).flatten(2).transpose(1, 2)
    products = embed_pixels(pixels, convolution.weight, convolution.bias, torch.zeros(1), 16)
    torch.testing.assert_close(products, patches, rtol=1e-5, atol=1e-5)


def test_processors_that_change_images_keep_lerobots_encoder(fused, make_observation, tasks, monkeypatch):
    assert fused.reads_levels
    monkeypatch.setattr(fused._normalizer, "norm_map", {FeatureType.VISUAL: NormalizationMode.MEAN_STD})
    assert not fused.reads_levels
    monkeypatch.undo()
    monkeypatch.setattr(type(fused), "reads_levels", False)
    mine = fused.encode(make_observation(2), tasks(2)).tensors["keys"]
    monkeypatch.undo()
    torch.testing.assert_close(
        mine, fused.encode(make_observation(2), tasks(2)).tensors["keys"], rtol=1e-4, atol=1e-5
    )


def test_the_fused_encoder_masks_an_absent_camera(folder_copy, make_observation, tasks):
    config = folder_copy / "config.json"
    config.write_text(config.read_text().replace('"empty_cameras": 0', '"empty_cameras": 1'))
    policy = SmolVLAFlowPolicy.load(folder_copy)
    observation = make_observation(2, cameras=("top",))
    expected = policy.encode(observation, tasks(2)).tensors
    policy.choose_velocity("fused")
    ours = policy.encode(observation, tasks(2)).tensors
    assert torch.equal(ours["pad_mask"], expected["pad_mask"])
    torch.testing.assert_close(ours["keys"][..., -1, :], expected["keys"][..., -1, :], rtol=1e-4, atol=1e-5)


def test_the_check_compares_the_fast_chunks_with_the_librarys(fused, make_observation, tasks, monkeypatch):
    batch = make_observation(2), tasks(2), torch.randn(2, 50, 6)
    row = checks.same_chunks(fused, *batch)
    assert (row["passed"], row["equal"], row["scenes"]) == (True, 2, 2)
    monkeypatch.setattr(checks, "CHUNK_LIMIT", 0.0)
    assert not checks.same_chunks(fused, *batch)["passed"]


def test_a_checkpoint_records_how_the_velocity_was_computed(fused, tmp_path):
    folder = save_checkpoint(tmp_path / "checkpoint", fused)
    record = json.loads((folder / "flowrl.json").read_text())
    assert (record["velocity"], record["compiled"]) == (fused.velocity_mode, False)
    assert SmolVLAFlowPolicy.load(folder).velocity_mode == "exact"


def test_matrix_products_restore_the_precision_that_was_set():
    with pytest.raises(KeyError), matrix_products("tf32"):
        assert torch.get_float32_matmul_precision() == "high"
        raise KeyError
    assert torch.get_float32_matmul_precision() == "highest"


def test_a_bfloat16_vlm_rounds_where_lerobots_does(tmp_path, make_observation, tasks):
    size = replace(SMALL, text_width=96)  # the square root, a factor of the embeddings, is no bfloat16 number
    module = build_smolvla(tmp_path / "vlm", size=size)
    module.model.vlm_with_expert.vlm.to(torch.bfloat16)
    save_policy_folder(tmp_path, module, statistics())
    policy = SmolVLAFlowPolicy.load(tmp_path)
    assert policy.dtypes == {"vlm": "bfloat16", "expert": "float32"}
    observation, x_0 = make_observation(3), torch.randn(3, 50, 6)
    exact = policy.encode(observation, tasks(3)).tensors["keys"]
    expected = policy.predict_action_chunk(observation, tasks(3), x_0)
    policy.choose_velocity("fused")
    prefix = policy.encode(observation, tasks(3))
    equal = (prefix.tensors["keys"] == exact).float().mean()
    assert equal > 0.9
    chain = sample_chain(policy, prefix, x_0)
    assert (policy.unnormalize(chain.actions[..., :6]) - expected).abs().max() < 0.01
