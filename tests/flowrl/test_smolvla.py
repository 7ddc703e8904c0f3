import shutil
import socket

import numpy as np
import pytest
import torch
from lerobot.envs.utils import preprocess_observation
from lerobot.policies.factory import make_pre_post_processors
from lerobot.policies.smolvla.modeling_smolvla import SmolVLAPolicy
from safetensors.torch import load_file, save_file
from small_smolvla import SMALL, statistics
from torch.nn.functional import mse_loss

from flowrl.errors import FlowRLError
from flowrl.flow.sampler import sample_chain
from flowrl.policy.smolvla import SmolVLAFlowPolicy
from flowrl.policy.tiny import build_smolvla, save_policy_folder


def chunk(policy, observation, tasks, x_0):
    prefix = policy.encode(observation, tasks)
    return policy.unnormalize(sample_chain(policy, prefix, x_0).actions[..., : policy.spec.action_dim])


def lerobot_chunk(folder, observation, tasks, x_0):
    """Nothing of flowrl: LeRobot's loading, processors, sampler."""
    module = SmolVLAPolicy.from_pretrained(folder, strict=True)
    preprocessor, postprocessor = make_pre_post_processors(module.config, pretrained_path=str(folder))
    batch = preprocess_observation({**observation, "pixels": dict(observation["pixels"])})
    batch["task"] = list(tasks)
    return postprocessor(module.predict_action_chunk(preprocessor(batch), noise=x_0))


@pytest.mark.parametrize("batch", [1, 3])
def test_without_noise_the_chunk_is_lerobots_bit_for_bit(policy, base_folder, make_observation, tasks, batch):
    observation, x_0 = make_observation(batch), torch.randn(batch, 50, 6)
    expected = lerobot_chunk(base_folder, observation, tasks(batch), x_0)
    assert expected.shape == (batch, 50, 6)
    assert torch.equal(chunk(policy, observation, tasks(batch), x_0), expected)
    assert torch.equal(policy.predict_action_chunk(observation, tasks(batch), x_0), expected)


def test_a_bfloat16_vlm_keeps_its_dtype_and_samples_as_lerobot_does(folder_copy, make_observation, tasks):
    weights = load_file(folder_copy / "model.safetensors")
    in_bfloat16 = {
        n: t.to(torch.bfloat16) if ".vlm." in n or ".lm_expert." in n else t for n, t in weights.items()
    }
    save_file(in_bfloat16, folder_copy / "model.safetensors")
    observation, x_0 = make_observation(2), torch.randn(2, 50, 6)
    for expert_dtype, name in (("float32", "float32"), ("loaded", "bfloat16")):
        policy = SmolVLAFlowPolicy.load(folder_copy, expert_dtype=expert_dtype)
        assert policy.dtypes == {"vlm": "bfloat16", "expert": name}
        state = policy.module.state_dict()
        assert all(torch.equal(state[n], t.to(state[n].dtype)) for n, t in in_bfloat16.items())
        expected = policy.predict_action_chunk(observation, tasks(2), x_0)
        assert torch.equal(chunk(policy, observation, tasks(2), x_0), expected)


def test_images_become_the_same_floats_as_in_lerobot(policy):
    levels = np.arange(256, dtype=np.uint8)
    image = np.stack(
        [np.tile(levels, (4, 1)), np.tile(levels[::-1], (4, 1)), np.full((4, 256), 7, np.uint8)], axis=-1
    )
    observation = {
        "pixels": {"top": image[None], "wrist": image[None]},
        "agent_pos": np.zeros((1, 6), np.float32),
    }
    expected = preprocess_observation(observation)
    ours = policy.prepare(observation, ["x"])
    for camera in ("top", "wrist"):
        name = f"observation.images.{camera}"
        assert torch.equal(ours[name], expected[name])


def test_cameras_are_routed_by_name_not_by_order(policy, make_observation, tasks):
    observation, x_0 = make_observation(2), torch.randn(2, 50, 6)
    top, wrist = observation["pixels"]["top"], observation["pixels"]["wrist"]
    first = chunk(policy, observation, tasks(2), x_0)
    reordered = {**observation, "pixels": {"wrist": wrist, "top": top}}
    swapped = {**observation, "pixels": {"top": wrist, "wrist": top}}
    assert torch.equal(chunk(policy, reordered, tasks(2), x_0), first)
    assert not torch.equal(chunk(policy, swapped, tasks(2), x_0), first)


def test_wrong_camera_names_list_both_sides_and_rename_mends_them(
    policy, base_folder, make_observation, tasks
):
    observation = make_observation(2, cameras=("front", "wrist"))
    with pytest.raises(
        FlowRLError, match=r"images\.front.*images\.wrist.*policy takes.*images\.top.*--rename"
    ):
        policy.encode(observation, tasks(2))
    renamed = SmolVLAFlowPolicy.load(base_folder, rename={"front": "top"})
    same = make_observation(2)
    same["pixels"] = {"top": observation["pixels"]["front"], "wrist": observation["pixels"]["wrist"]}
    assert torch.equal(
        renamed.encode(observation, tasks(2)).tensors["keys"], policy.encode(same, tasks(2)).tensors["keys"]
    )


def test_an_extra_camera_is_an_error_until_it_is_dropped_by_name(
    policy, base_folder, make_observation, tasks
):
    observation = make_observation(2, cameras=("top", "wrist", "side"))
    with pytest.raises(FlowRLError, match="cameras do not match"):
        policy.encode(observation, tasks(2))
    dropping = SmolVLAFlowPolicy.load(base_folder, rename={"side": ""})
    assert len(dropping.encode(observation, tasks(2))) == 2


def test_an_allowed_absent_camera_is_masked_and_its_content_does_not_exist(
    folder_copy, make_observation, tasks
):
    config = folder_copy / "config.json"
    config.write_text(config.read_text().replace('"empty_cameras": 0', '"empty_cameras": 1'))
    policy = SmolVLAFlowPolicy.load(folder_copy)
    prefix = policy.encode(make_observation(2, cameras=("top",)), tasks(2))
    num_image_tokens = 4
    assert prefix.tensors["pad_mask"][:, :num_image_tokens].all()
    assert not prefix.tensors["pad_mask"][:, num_image_tokens : 2 * num_image_tokens].any()


def test_a_state_of_the_wrong_size_is_an_error(policy, make_observation, tasks):
    for size in (5, 32):
        observation = {**make_observation(2), "agent_pos": np.zeros((2, size), np.float32)}
        with pytest.raises(FlowRLError, match=rf"\({size},\) in the environment, \(6,\) in the policy"):
            policy.encode(observation, tasks(2))
    observation = make_observation(2)
    del observation["agent_pos"]
    with pytest.raises(FlowRLError, match=r"takes observation\.state"):
        policy.encode(observation, tasks(2))


def test_images_that_are_not_uint8_are_an_error(policy, make_observation, tasks):
    observation = make_observation(2)
    observation["pixels"]["top"] = observation["pixels"]["top"].astype(np.float32)
    with pytest.raises(FlowRLError, match="uint8"):
        policy.encode(observation, tasks(2))


def test_the_instruction_ends_with_exactly_one_newline(policy, make_observation):
    with_newline = policy.prepare(make_observation(2), ["Pick the rook\n", "Pick the rook"])
    tokens = with_newline["observation.language.tokens"]
    assert torch.equal(tokens[0], tokens[1])
    assert with_newline["observation.language.attention_mask"].sum(1).tolist() == [14, 14]


def test_an_empty_instruction_is_refused_and_a_long_one_is_told(policy, make_observation):
    with pytest.raises(FlowRLError, match="empty"):
        policy.encode(make_observation(1), ["  "])
    with pytest.raises(FlowRLError, match="1 instructions for 2"):
        policy.encode(make_observation(2), ["go"])
    with pytest.warns(UserWarning, match="cuts it to 48"):
        policy.encode(make_observation(1), ["a" * 60])


def test_normalization_is_the_datasets_and_invertible(policy, base_folder):
    stats = load_file(base_folder / "policy_preprocessor_step_5_normalizer_processor.safetensors")
    mean, std = stats["action.mean"].double(), stats["action.std"].double()
    normalized = torch.linspace(-2.5, 2.5, 2 * 50 * 6).view(2, 50, 6)
    actions = policy.unnormalize(normalized)
    torch.testing.assert_close(actions.double(), normalized.double() * std + mean, rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(policy.normalize(actions), normalized, rtol=1e-5, atol=1e-5)


def test_two_policies_in_one_process_keep_their_own_statistics(policy, tmp_path, make_observation):
    other_folder = tmp_path / "other"
    save_policy_folder(
        other_folder, build_smolvla(other_folder / "vlm", size=SMALL, seed=1), statistics(seed=9)
    )
    before = policy.unnormalize(torch.ones(1, 50, 6))
    other = SmolVLAFlowPolicy.load(other_folder)
    expected = torch.tensor(statistics(9)["action"]["mean"] + statistics(9)["action"]["std"])
    torch.testing.assert_close(
        other.unnormalize(torch.ones(1, 50, 6))[0, 0].double(), expected, rtol=1e-6, atol=1e-5
    )
    assert torch.equal(policy.unnormalize(torch.ones(1, 50, 6)), before)


def test_velocity_leaves_the_stored_prefix_alone(policy, make_observation, tasks):
    prefix = policy.encode(make_observation(2), tasks(2))
    before = {name: tensor.clone() for name, tensor in prefix.tensors.items()}
    x_t, time = torch.randn(2, 50, 6), torch.tensor([0.5, 0.1])
    with torch.no_grad():
        first, second = policy.velocity(x_t, time, prefix), policy.velocity(x_t, time, prefix)
    assert torch.equal(first, second)
    assert all(torch.equal(prefix.tensors[name], before[name]) for name in before)


def test_only_the_expert_and_its_projections_train_and_all_of_them_do(base_folder, make_observation, tasks):
    policy = SmolVLAFlowPolicy.load(base_folder)
    prefix = policy.encode(make_observation(2), tasks(2))
    assert not any(tensor.requires_grad for tensor in prefix.tensors.values())
    velocity = policy.velocity(torch.randn(2, 50, 6), torch.tensor([0.5, 0.1]), prefix)
    mse_loss(velocity, torch.zeros_like(velocity)).backward()
    trainable = policy.trainable_parameters()
    parts = {name.removeprefix("model.").split(".")[0] for name in trainable}
    assert parts == {
        "vlm_with_expert",
        "action_in_proj",
        "action_out_proj",
        "action_time_mlp_in",
        "action_time_mlp_out",
    }
    assert all("lm_expert" in name for name in trainable if "vlm_with_expert" in name)
    for name, parameter in policy.module.named_parameters():
        assert parameter.requires_grad == (name in trainable)
        assert (parameter.grad is not None) == (name in trainable)
    assert not policy.module.training


def test_critic_features_do_not_depend_on_padding_tokens(policy, make_observation, tasks):
    prefix = policy.encode(make_observation(3), tasks(3))
    features = policy.prefix_features(prefix)
    assert features.shape == (3, 2 * 2 * 1 * 32) and features.dtype == torch.float32
    prefix.tensors["values"].masked_fill_(~prefix.tensors["pad_mask"][:, None, None, :, None], 1e6)
    assert torch.equal(policy.prefix_features(prefix), features)
    moved = make_observation(3)
    moved["agent_pos"] = moved["agent_pos"] + 20
    half = features.shape[1] // 2
    assert not torch.equal(
        policy.prefix_features(policy.encode(moved, tasks(3)))[:, half:], features[:, half:]
    )


def test_loading_opens_no_connection_and_leaves_the_random_state(folder_copy, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    state = torch.get_rng_state()
    SmolVLAFlowPolicy.load(folder_copy)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_moved_folder_brings_its_vlm_along(policy, folder_copy, tmp_path, make_observation, tasks):
    config = folder_copy / "config.json"
    config.write_text(config.read_text().replace("/vlm", "/vlm_of_another_machine"))
    moved = tmp_path / "elsewhere" / "moved"
    moved.parent.mkdir()
    shutil.move(folder_copy, moved)
    observation, x_0 = make_observation(2), torch.randn(2, 50, 6)
    assert torch.equal(
        chunk(SmolVLAFlowPolicy.load(moved), observation, tasks(2), x_0),
        chunk(policy, observation, tasks(2), x_0),
    )


STATS_BEFORE = "policy_preprocessor_step_5_normalizer_processor.safetensors"
STATS_AFTER = "policy_postprocessor_step_0_unnormalizer_processor.safetensors"


@pytest.mark.parametrize(
    "name",
    ["config.json", "model.safetensors", "policy_preprocessor.json", "policy_postprocessor.json", STATS_BEFORE, STATS_AFTER,
     "vlm/config.json", "vlm/tokenizer.json"],
)  # fmt: skip
@pytest.mark.parametrize("damage", ["missing", "truncated"])
def test_a_missing_or_truncated_file_is_one_line_that_names_it(folder_copy, name, damage):
    file = folder_copy / name
    if damage == "missing":
        file.unlink()
    else:
        content = file.read_bytes()
        file.write_bytes(content[: len(content) // 2])
    with pytest.raises(FlowRLError) as error:
        SmolVLAFlowPolicy.load(folder_copy)
    message = str(error.value)
    assert name.split("/")[0] in message and "\n" not in message


def edit_stats(folder, name, change):
    tensors = load_file(folder / name)
    change(tensors)
    save_file(tensors, folder / name)


def test_statistics_under_another_name_are_refused(folder_copy):
    def rename(tensors):
        tensors["so100.buffer.action.mean"] = tensors.pop("action.mean")

    edit_stats(folder_copy, STATS_BEFORE, rename)
    with pytest.raises(
        FlowRLError, match=r"has no action\.mean \(it has: action\.std, .*so100\.buffer\.action\.mean"
    ):
        SmolVLAFlowPolicy.load(folder_copy)


def test_identity_statistics_are_refused(folder_copy):
    def reset(tensors):
        tensors["action.mean"].zero_()
        tensors["action.std"].fill_(1.0)

    edit_stats(folder_copy, STATS_AFTER, reset)
    with pytest.raises(FlowRLError, match="statistics of action are an identity"):
        SmolVLAFlowPolicy.load(folder_copy)


def test_processors_of_two_different_trainings_are_refused(folder_copy):
    edit_stats(folder_copy, STATS_AFTER, lambda tensors: tensors["action.std"].mul_(2))
    with pytest.raises(FlowRLError, match=r"action\.std differ between"):
        SmolVLAFlowPolicy.load(folder_copy)


@pytest.mark.parametrize("stats", [torch.full((6,), torch.nan), torch.zeros(7)])
def test_broken_statistics_are_refused(folder_copy, stats):
    edit_stats(folder_copy, STATS_BEFORE, lambda tensors: tensors.update({"observation.state.mean": stats}))
    with pytest.raises(FlowRLError, match=r"observation\.state\.mean (is not finite|has shape \(7,\))"):
        SmolVLAFlowPolicy.load(folder_copy)


def test_a_normalizer_that_does_nothing_is_refused(folder_copy):
    file = folder_copy / "policy_preprocessor.json"
    file.write_text(file.read_text().replace('"ACTION": "MEAN_STD"', '"ACTION": "IDENTITY"'))
    with pytest.raises(FlowRLError, match="not at all"):
        SmolVLAFlowPolicy.load(folder_copy)


def test_missing_and_unexpected_weights_are_listed(folder_copy):
    def change(tensors):
        del tensors["model.action_in_proj.weight"]
        tensors["model.surprise"] = torch.zeros(1)

    edit_stats(folder_copy, "model.safetensors", change)
    with pytest.raises(
        FlowRLError, match=r"missing 1 keys \(model\.action_in_proj\.weight\), unexpected 1 .*surprise"
    ):
        SmolVLAFlowPolicy.load(folder_copy)


def test_weights_of_another_shape_are_refused(folder_copy):
    edit_stats(
        folder_copy,
        "model.safetensors",
        lambda tensors: tensors.update({"model.action_in_proj.bias": torch.zeros(3)}),
    )
    with pytest.raises(FlowRLError, match=r"action_in_proj\.bias is \(3,\)"):
        SmolVLAFlowPolicy.load(folder_copy)


def test_an_old_checkpoint_with_normalization_inside_is_refused(folder_copy):
    edit_stats(
        folder_copy,
        "model.safetensors",
        lambda tensors: tensors.update({"normalize_inputs.buffer_observation_state.mean": torch.zeros(6)}),
    )
    with pytest.raises(FlowRLError, match="old LeRobot checkpoint"):
        SmolVLAFlowPolicy.load(folder_copy)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"type": "smolvla"', '"type": "act"', "is a 'act' policy"),
        ('"adapt_to_pi_aloha": false', '"adapt_to_pi_aloha": true', "adapt_to_pi_aloha"),
        ('"n_obs_steps": 1', '"n_obs_steps": 1, "no_such_field": 3', "does not fit this LeRobot version"),
    ],
)
def test_an_unsupported_config_is_refused(folder_copy, old, new, message):
    file = folder_copy / "config.json"
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))
    with pytest.raises(FlowRLError, match=message):
        SmolVLAFlowPolicy.load(folder_copy)


def test_a_path_that_does_not_exist_and_a_parent_of_the_policy_are_explained(folder_copy, tmp_path):
    with pytest.raises(FlowRLError, match="does not exist"):
        SmolVLAFlowPolicy.load(tmp_path / "nothing")
    inner = tmp_path / "run" / "pretrained_model"
    shutil.move(folder_copy, inner)
    with pytest.raises(FlowRLError, match=r"give .*pretrained_model"):
        SmolVLAFlowPolicy.load(inner.parent)
    with pytest.raises(FlowRLError, match="is a file"):
        SmolVLAFlowPolicy.load(inner / "config.json")


def test_padded_action_dimensions_are_carried(tmp_path, make_observation, tasks):
    folder = tmp_path / "padded"
    save_policy_folder(folder, build_smolvla(folder / "vlm", size=SMALL, padded_dim=8), statistics())
    policy = SmolVLAFlowPolicy.load(folder)
    assert (policy.spec.action_dim, policy.spec.padded_action_dim) == (6, 8)
    observation, x_0 = make_observation(2), torch.randn(2, 50, 8)
    assert torch.equal(
        chunk(policy, observation, tasks(2), x_0), lerobot_chunk(folder, observation, tasks(2), x_0)
    )


def test_a_chunk_depends_on_its_noise_and_not_on_the_global_generator(policy, make_observation, tasks):
    observation, x_0 = make_observation(2), torch.randn(2, 50, 6)
    first = policy.predict_action_chunk(observation, tasks(2), x_0)
    torch.randn(100)
    policy.predict_action_chunk(make_observation(2, seed=1), tasks(2), torch.randn(2, 50, 6))
    assert torch.equal(policy.predict_action_chunk(observation, tasks(2), x_0), first)
    for wrong in (torch.randn(2, 49, 6), torch.randn(1, 50, 6), torch.randn(2, 50, 7)):
        with pytest.raises(ValueError, match=r"x_0 has shape .*expected \(2, 50, 6\)"):
            policy.predict_action_chunk(observation, tasks(2), wrong)
