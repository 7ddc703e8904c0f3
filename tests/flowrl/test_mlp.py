"""The flow policy for states: its sampler, its likelihood, its folder, and what it refuses."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from small_mlp import small_mlp

from flowrl.errors import FlowRLError
from flowrl.flow.likelihood import rescore
from flowrl.flow.sampler import sample_chain
from flowrl.policy.loading import load_policy
from flowrl.policy.mlp import MLPFlowPolicy
from flowrl.policy.noise import NoiseModel

WEIGHTS, STATISTICS = "model.safetensors", "policy_statistics.safetensors"


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "mlp"
    path.mkdir()
    small_mlp().save(path)
    return path


def states(batch: int, seed: int = 0) -> dict[str, np.ndarray]:
    return {"agent_pos": np.random.default_rng(seed).normal(size=(batch, 3)).astype(np.float32)}


def starts(batch: int) -> torch.Tensor:
    return torch.randn(batch, 4, 2, generator=torch.Generator().manual_seed(0))


def test_the_chain_without_noise_is_the_policys_own_sampler():
    policy = small_mlp()
    chain = sample_chain(policy, policy.encode(states(5), [""] * 5), starts(5))
    own = policy.predict_action_chunk(states(5), [""] * 5, starts(5))
    assert torch.equal(policy.unnormalize(chain.actions), own)


def test_the_prefix_is_the_normalized_state_and_its_fourier_features():
    policy, observation = small_mlp(), states(5)
    features = policy.encode(observation, [""] * 5).tensors["features"].numpy()
    state = observation["agent_pos"] / 2
    angle = state @ policy.module["encoder"].frequencies.numpy()
    np.testing.assert_allclose(features, np.hstack([state, np.sin(angle), np.cos(angle)]), atol=1e-6)


def test_normalize_undoes_unnormalize_and_is_no_identity():
    policy, actions = small_mlp(), starts(3)
    torch.testing.assert_close(policy.normalize(policy.unnormalize(actions)), actions)
    torch.testing.assert_close(policy.unnormalize(actions), 0.5 * actions + 0.1)


def test_a_rescored_chain_has_ratio_one_and_trains_every_parameter():
    policy = small_mlp()
    noise = NoiseModel(policy.spec)
    eps = torch.randn(4, 4, 4, 2, generator=torch.Generator().manual_seed(1))
    prefix = policy.encode(states(4), [""] * 4)
    chain = sample_chain(policy, prefix, starts(4), noise, eps)
    again = rescore(policy, prefix, chain.states, noise)
    assert torch.equal(again, chain.log_prob)
    again.sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in policy.trainable_parameters().values())


def test_a_row_does_not_depend_on_the_size_of_its_batch():
    policy = small_mlp(hidden=128)
    whole = policy.predict_action_chunk(states(40), [""] * 40, torch.cat([starts(20)] * 2))
    for size in (1, 2, 3, 5, 8, 21):
        rows = {"agent_pos": states(40)["agent_pos"][:size]}
        part = policy.predict_action_chunk(rows, [""] * size, torch.cat([starts(20)] * 2)[:size])
        assert torch.equal(part, whole[:size])


def test_random_weights_follow_their_seed_and_leave_the_global_generator_alone():
    before = torch.get_rng_state()
    weights = [small_mlp(seed=seed).module.state_dict()["field.0.weight"] for seed in (0, 0, 1)]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])
    assert torch.equal(before, torch.get_rng_state())


def test_a_saved_folder_opens_by_its_type_as_the_same_policy(folder, tmp_path):
    policy, again = small_mlp(), load_policy(folder)
    assert type(again) is MLPFlowPolicy and again.spec == policy.spec
    chunk = [p.predict_action_chunk(states(2), ["", ""], starts(2)) for p in (policy, again)]
    assert torch.equal(*chunk)
    (folder / "preset.json").write_text('{"train": {"lr": 1e-3}}')
    (tmp_path / "copy").mkdir()
    load_policy(folder).save(tmp_path / "copy")
    assert {f.name for f in folder.iterdir()} == {f.name for f in (tmp_path / "copy").iterdir()}
    for name in ("config.json", STATISTICS, "preset.json"):
        assert (tmp_path / "copy" / name).read_bytes() == (folder / name).read_bytes()


@pytest.mark.parametrize("name", ["config.json", WEIGHTS, STATISTICS])
def test_a_missing_or_truncated_file_is_told_by_name(folder, name):
    whole = (folder / name).read_bytes()
    (folder / name).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(FlowRLError, match=rf"{name} is (truncated|not valid JSON)"):
        load_policy(folder)
    (folder / name).unlink()
    with pytest.raises(FlowRLError, match=f"{name} is missing"):
        load_policy(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": 0}, "hidden is 0; it must be a whole number of at least 1"),
        ({"hidden": "16"}, "hidden is '16'"),
        ({"n_action_steps": 5}, "n_action_steps 5 must be at most chunk_size 4"),
        ({"colour": 1}, "and action_dim, chunk_size, .*, nothing else"),
        ({"hidden": 8}, "of another shape .*field.0.weight"),
    ],
)
def test_a_config_that_cannot_work_is_refused(folder, change, message):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(FlowRLError, match=message):
        load_policy(folder)


def test_unexpected_and_missing_weights_are_refused(folder):
    tensors = load_file(folder / WEIGHTS)
    save_file({**tensors, "normalize_inputs.mean": torch.zeros(3)}, folder / WEIGHTS)
    with pytest.raises(FlowRLError, match=r"unexpected \['normalize_inputs.mean'\]"):
        load_policy(folder)
    tensors.pop("field.0.bias")
    save_file(tensors, folder / WEIGHTS)
    with pytest.raises(FlowRLError, match=r"missing \['field.0.bias'\]"):
        load_policy(folder)


def test_weights_in_bfloat16_are_refused(folder):
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(folder / WEIGHTS).items()}
    save_file(tensors, folder / WEIGHTS)
    with pytest.raises(FlowRLError, match="bfloat16; float32 is needed"):
        load_policy(folder)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("action.mean", None, "has no action.mean"),
        ("action.mean", torch.zeros(3), r"action.mean has shape \(3,\)"),
        ("observation.state.std", torch.zeros(3), "std must be greater than 0"),
        ("observation.state.std", torch.full((3,), torch.nan), "is not finite"),
        ("observation.state.std", torch.ones(3), "are an identity"),
        ("so100.action.mean", torch.zeros(2), "unknown statistics so100.action.mean"),
    ],
)
def test_statistics_that_cannot_work_are_refused(folder, name, value, message):
    statistics = load_file(folder / STATISTICS)
    statistics.pop(name, None)
    if value is not None:
        statistics[name] = value
    save_file(statistics, folder / STATISTICS)
    with pytest.raises(FlowRLError, match=message):
        load_policy(folder)


def test_observations_are_matched_by_name_and_size(folder):
    observation = {"environment_state": states(2)["agent_pos"], "pixels": {"top": np.zeros((2, 4, 4, 3))}}
    with pytest.raises(FlowRLError, match="gives environment_state, top, the policy takes agent_pos alone"):
        load_policy(folder).encode(observation, ["", ""])
    renamed = load_policy(folder, rename={"environment_state": "agent_pos", "top": ""})
    expected = small_mlp().encode(states(2), ["", ""])
    assert torch.equal(
        renamed.encode(observation, ["", ""]).tensors["features"], expected.tensors["features"]
    )
    with pytest.raises(FlowRLError, match="--rename names environment_state, top"):
        renamed.encode(states(2), ["", ""])
    with pytest.raises(FlowRLError, match=r"size \(2,\) in the environment, \(3,\) in the policy"):
        load_policy(folder).encode({"agent_pos": np.zeros((2, 2))}, ["", ""])
