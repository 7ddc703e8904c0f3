import json
import os
import resource
import shutil
import signal
from pathlib import Path

import pytest
import torch
from lerobot.envs.utils import preprocess_observation
from lerobot.policies.factory import make_pre_post_processors
from lerobot.policies.smolvla.modeling_smolvla import SmolVLAPolicy
from safetensors.torch import load_file, save_file

from flowrl import checkpoint
from flowrl.checkpoint import changed_noise, load_training_state, relocate, save_checkpoint
from flowrl.errors import FlowRLError
from flowrl.flow.sampler import sample_chain
from flowrl.policy import lerobot_policy
from flowrl.policy.critic import Critic
from flowrl.policy.loading import load_policy
from flowrl.policy.noise import NoiseModel
from flowrl.prefix import Prefix


@pytest.fixture
def trained(base_folder):
    """A policy after one AdamW step on random gradients, with critic, learned noise and their optimizer."""
    policy = load_policy(base_folder)
    noise, critic = NoiseModel(policy.spec, learn_sigma=True), Critic(8)
    groups = [
        {"params": list(policy.trainable_parameters().values()), "lr": 1e-3},
        {"params": [*critic.parameters(), *noise.parameters()], "lr": 1e-2},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0)
    step(optimizer, seed=0)
    return policy, noise, critic, optimizer


def step(optimizer, seed):
    generator = torch.Generator().manual_seed(seed)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimizer.step()


def save(folder, trained, **arguments):
    policy, noise, critic, optimizer = trained
    return save_checkpoint(
        folder, policy, noise=noise, critic=critic, optimizers={"policy": optimizer}, **arguments
    )


def test_lerobot_loads_a_checkpoint_strictly_and_gives_the_same_chunk(
    trained, tmp_path, make_observation, tasks, monkeypatch
):
    folder = save(tmp_path / "iter_0001", trained)
    monkeypatch.chdir("/")
    module = SmolVLAPolicy.from_pretrained(folder, strict=True)
    preprocessor, postprocessor = make_pre_post_processors(module.config, pretrained_path=str(folder))
    observation, x_0 = make_observation(2), torch.randn(2, 50, 6)
    batch = preprocess_observation(observation)
    batch["task"] = tasks(2)
    expected = postprocessor(module.predict_action_chunk(preprocessor(batch), noise=x_0))
    policy = load_policy(folder)
    chain = sample_chain(policy, policy.encode(observation, tasks(2)), x_0)
    assert torch.equal(policy.unnormalize(chain.actions), expected)
    assert torch.equal(trained[0].predict_action_chunk(observation, tasks(2), x_0), expected)


def test_normalization_is_copied_byte_for_byte_and_frozen_weights_are_bit_identical(
    trained, base_folder, tmp_path
):
    folder = save(tmp_path / "last", trained)
    for file in base_folder.rglob("*"):
        name = file.relative_to(base_folder)
        if file.is_file() and str(name) not in (
            "config.json",
            "policy_preprocessor.json",
            "model.safetensors",
        ):
            assert (folder / name).read_bytes() == file.read_bytes(), name
    for name, key in (("config.json", "vlm_model_name"), ("policy_preprocessor.json", "tokenizer_name")):
        before, after = (base_folder / name).read_text(), (folder / name).read_text()
        assert after == before.replace(f'"{key}": "{base_folder}/vlm"', f'"{key}": "{folder}/vlm"')
    base, saved = load_file(base_folder / "model.safetensors"), load_file(folder / "model.safetensors")
    trainable = trained[0].trainable_parameters()
    assert base.keys() == saved.keys()
    assert {name for name in base if not torch.equal(base[name], saved[name])} == set(trainable)


def test_a_bfloat16_vlm_stays_so_and_a_float32_expert_survives_lerobots_loader(folder_copy, tmp_path):
    weights = load_file(folder_copy / "model.safetensors")
    weights = {n: t.to(torch.bfloat16) for n, t in weights.items()}
    save_file(weights, folder_copy / "model.safetensors")
    vlm_config = folder_copy / "vlm" / "config.json"
    content = json.loads(vlm_config.read_text())
    content["text_config"]["dtype"] = "bfloat16"
    vlm_config.write_text(json.dumps(content))
    config = folder_copy / "config.json"
    config.write_text(config.read_text().replace('"load_vlm_weights": false', '"load_vlm_weights": true'))

    policy = load_policy(folder_copy)
    name, parameter = next(
        (n, p) for n, p in policy.trainable_parameters().items() if "lm_expert" in n and p.ndim == 2
    )
    with torch.no_grad():
        parameter += 1e-6
    folder = save_checkpoint(tmp_path / "last", policy)
    saved = load_file(folder / "model.safetensors")
    for key, tensor in saved.items():
        if key in policy.trainable_parameters():
            assert tensor.dtype == torch.float32
        else:
            assert tensor.dtype == torch.bfloat16 and torch.equal(tensor, weights[key])
    module = SmolVLAPolicy.from_pretrained(folder, strict=True)
    assert torch.equal(dict(module.named_parameters())[name], parameter)
    assert load_policy(folder).dtypes == {"vlm": "bfloat16", "expert": "float32"}


def test_tied_weights_are_stored_once_and_stay_tied(folder_copy, tmp_path):
    vlm_config = folder_copy / "vlm" / "config.json"
    vlm_config.write_text(
        vlm_config.read_text().replace('"tie_word_embeddings": false', '"tie_word_embeddings": true')
    )
    config = folder_copy / "config.json"
    config.write_text(config.read_text().replace('"train_expert_only": false', '"train_expert_only": true'))
    weights = load_file(folder_copy / "model.safetensors")
    head = "model.vlm_with_expert.vlm.lm_head.weight"
    embedding = "model.vlm_with_expert.vlm.model.text_model.embed_tokens.weight"
    del weights[head]
    save_file(weights, folder_copy / "model.safetensors")
    policy = load_policy(folder_copy)
    folder = save_checkpoint(tmp_path / "last", policy)
    saved = load_file(folder / "model.safetensors")
    assert (head in saved) != (embedding in saved)
    SmolVLAPolicy.from_pretrained(folder, strict=True)
    state = load_policy(folder).module.state_dict()
    assert state[head].data_ptr() == state[embedding].data_ptr()
    assert torch.equal(state[embedding], weights[embedding])


def test_critic_noise_optimizer_and_record_come_back_bit_for_bit(trained, tmp_path):
    _, noise, _, optimizer = trained
    meta = {"iteration": 3, "best": 0.1 + 0.2, "indices": [1, 2]}
    folder = save(tmp_path / "last", trained, meta=meta, tensors={"random_state": torch.get_rng_state()})
    state = load_training_state(folder)
    assert state.meta == meta
    assert state.sampler["sigma"] == noise.sigma().tolist() and state.sampler["num_denoising_steps"] == 10
    assert torch.equal(state.tensors["random_state"], torch.get_rng_state())

    again = load_policy(folder)
    new_noise, new_critic = NoiseModel(again.spec, learn_sigma=True), Critic(8)
    state.restore_module("noise", new_noise)
    state.restore_module("critic", new_critic)
    groups = [
        {"params": list(again.trainable_parameters().values()), "lr": 0.5},
        {"params": [*new_critic.parameters(), *new_noise.parameters()], "lr": 0.5},
    ]
    new_optimizer = torch.optim.AdamW(groups)
    state.restore_optimizer("policy", new_optimizer)
    step(optimizer, seed=1)
    step(new_optimizer, seed=1)
    for old, new in zip(optimizer.param_groups, new_optimizer.param_groups):
        assert {k: v for k, v in old.items() if k != "params"} == {
            k: v for k, v in new.items() if k != "params"
        }
        assert all(torch.equal(a, b) for a, b in zip(old["params"], new["params"]))


def test_no_pickle_is_written(trained, tmp_path):
    folder = save(tmp_path / "last", trained)
    assert {file.suffix for file in folder.rglob("*") if file.is_file()} <= {
        ".json",
        ".safetensors",
        ".jinja",
    }


def test_settings_that_do_not_fit_are_refused_on_resume(trained, tmp_path):
    state = load_training_state(save(tmp_path / "last", trained))
    with pytest.raises(FlowRLError, match="critic with"):
        state.restore_module("critic", Critic(9))
    with pytest.raises(FlowRLError, match="parameters per group"):
        state.restore_optimizer("policy", torch.optim.AdamW(Critic(8).parameters()))
    with pytest.raises(FlowRLError, match="no optimizer 'other'"):
        state.restore_optimizer("other", torch.optim.AdamW(Critic(8).parameters()))


def test_a_checkpoint_can_be_saved_over_the_one_it_was_loaded_from(trained, tmp_path):
    folder = save(tmp_path / "last", trained, meta={"iteration": 1})
    policy = load_policy(folder)
    save_checkpoint(folder, policy, meta={"iteration": 2})
    assert load_training_state(folder).meta == {"iteration": 2}
    assert [entry.name for entry in tmp_path.iterdir()] == ["last"]
    load_policy(folder)


def test_a_folder_that_is_no_checkpoint_is_not_replaced(trained, folder_copy, tmp_path):
    with pytest.raises(FlowRLError, match="no flowrl checkpoint"):
        save(folder_copy, trained)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(FlowRLError, match="no flowrl checkpoint"):
        save(tmp_path / "file", trained)
    assert (tmp_path / "file").read_text() == "mine"


def save_in_a_child(folder, policy, kill_at: int | None = None) -> int | None:
    """Saves in a forked process that gets SIGKILL at its file operation number `kill_at`.

    Returns the number of operations of a save that finished, None for one that was killed.
    """
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        operations = 0

        def counted(function):
            def wrapper(*args, **kwargs):
                nonlocal operations
                operations += 1
                if operations == kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                return function(*args, **kwargs)

            return wrapper

        for name in ("rename", "mkdir", "write_bytes", "write_text"):
            setattr(Path, name, counted(getattr(Path, name)))
        checkpoint.save_file = lerobot_policy.save_file = counted(save_file)
        checkpoint._sync = counted(checkpoint._sync)
        shutil.rmtree = counted(shutil.rmtree)
        save_checkpoint(folder, policy, meta={"iteration": 2})
        os._exit(operations)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return None
    return os.WEXITSTATUS(status)


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_kill_at_any_moment_leaves_a_complete_checkpoint(trained, tmp_path):
    policy, folder = trained[0], tmp_path / "last"
    num_operations = save_in_a_child(tmp_path / "counted", policy)
    shutil.rmtree(tmp_path / "counted")
    save_checkpoint(folder, policy, meta={"iteration": 1})
    iterations = []
    for kill_at in [*range(2, num_operations - 8, 5), *range(num_operations - 8, num_operations + 9)]:
        if save_in_a_child(folder, policy, kill_at) is not None:
            break
        state = load_training_state(folder)
        iterations.append(state.meta["iteration"])
        assert load_file(state.folder / "model.safetensors").keys() == policy.module.state_dict().keys()
        if state.folder != folder:
            load_policy(folder)
    assert iterations == sorted(iterations) and set(iterations) == {1, 2} and len(iterations) > 15
    assert load_training_state(folder).meta == {"iteration": 2}
    load_policy(folder)
    assert [entry.name for entry in tmp_path.iterdir()] == ["last"]


def test_a_checkpoint_put_aside_by_a_killed_writer_is_found_and_taken_back(trained, tmp_path):
    folder = save(tmp_path / "last", trained, meta={"iteration": 1})
    folder.rename(tmp_path / ".last.old")
    (tmp_path / ".last.tmp-1").mkdir()
    assert load_training_state(folder).meta == {"iteration": 1}
    load_policy(folder)
    save(folder, trained, meta={"iteration": 2})
    assert load_training_state(folder).meta == {"iteration": 2}
    assert [entry.name for entry in tmp_path.iterdir()] == ["last"]


def test_a_full_disk_is_told_and_leaves_the_checkpoint_before(trained, tmp_path, monkeypatch):
    folder = save(tmp_path / "last", trained, meta={"iteration": 1})

    def full(*args, **kwargs):
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(FlowRLError, match="No space left on device"):
        save(folder, trained, meta={"iteration": 2})
    assert load_training_state(folder).meta == {"iteration": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["last"]


@pytest.mark.parametrize("part", ["model.safetensors", "flowrl.safetensors"])
def test_a_disk_that_fills_while_weights_are_written_leaves_the_checkpoint_before(trained, tmp_path, part):
    folder = save(tmp_path / "last", trained, meta={"iteration": 1})
    sizes = sorted(path.stat().st_size for path in folder.rglob("*.safetensors"))
    own = (folder / part).stat().st_size
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (own - 1 if own == sizes[-1] else own // 2, before[1]))
    try:
        with pytest.raises(
            FlowRLError, match=r"could not be written .*File too large.*the one before is intact"
        ):
            save(folder, trained, meta={"iteration": 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert load_training_state(folder).meta == {"iteration": 1}
    load_policy(folder)
    assert [entry.name for entry in tmp_path.iterdir()] == ["last"]


@pytest.mark.parametrize("name", ["flowrl.json", "flowrl.safetensors"])
def test_a_damaged_record_is_one_line(trained, tmp_path, name):
    file = save(tmp_path / "last", trained) / name
    file.write_bytes(file.read_bytes()[:20])
    with pytest.raises(FlowRLError, match="damaged"):
        load_training_state(tmp_path / "last")
    file.unlink()
    with pytest.raises(FlowRLError, match=f"{name} is missing"):
        load_training_state(tmp_path / "last")


def test_relocate_points_lerobot_to_the_folders_present_place(trained, tmp_path, monkeypatch):
    folder = save(tmp_path / "last", trained)
    moved = Path(shutil.move(folder, tmp_path / "moved"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(Exception):  # noqa: B017 - whatever LeRobot raises for a path that is gone
        SmolVLAPolicy.from_pretrained(moved, strict=True)
    assert relocate(moved) == str(moved / "vlm")
    module = SmolVLAPolicy.from_pretrained(moved, strict=True)
    make_pre_post_processors(module.config, pretrained_path=str(moved))
    assert relocate(moved, "models/mine/vlm") == "models/mine/vlm"
    assert json.loads((moved / "config.json").read_text())["vlm_model_name"] == "models/mine/vlm"
    load_policy(moved)
    with pytest.raises(FlowRLError, match="missing"):
        relocate(tmp_path)


def set_value(file: Path, key: str, value) -> None:
    content = json.loads(file.read_text())
    assert key in content
    file.write_text(json.dumps({**content, key: value}))


def test_a_config_that_no_longer_samples_as_it_was_trained_is_refused_with_the_remedy(trained, tmp_path):
    folder = save(tmp_path / "last", trained)
    set_value(folder / "config.json", "num_steps", 4)
    with pytest.raises(
        FlowRLError, match=r"num_denoising_steps 4, and flowrl\.json 10, .*set it back"
    ) as error:
        load_policy(folder)
    assert "\n" not in str(error.value)
    (folder / "flowrl.json").unlink()
    assert load_policy(folder).spec.num_denoising_steps == 4


def test_an_expert_that_runs_in_another_dtype_than_it_was_saved_from_is_told(trained, tmp_path, capfd):
    folder = save(tmp_path / "last", trained)
    load_policy(folder)
    assert "runs in" not in capfd.readouterr().err
    weights = load_file(folder / "model.safetensors")
    save_file(
        {n: t.to(torch.bfloat16) if ".lm_expert." in n else t for n, t in weights.items()},
        folder / "model.safetensors",
    )
    load_policy(folder, expert_dtype="loaded")
    assert "the expert runs in bfloat16; it was saved from float32" in capfd.readouterr().err


def test_noise_other_than_a_checkpoints_is_named(trained, base_folder, tmp_path):
    policy, noise, *_ = trained
    folder = save(tmp_path / "last", trained)
    assert changed_noise(folder, noise) == {} and changed_noise(base_folder, noise) == {}
    other = NoiseModel(policy.spec, sigma_start=0.3, learn_sigma=True)
    assert changed_noise(folder, other) == {"sigma_start": (0.2, 0.3)}


def test_a_stored_decision_of_the_full_size_policy_takes_less_than_4_mb():
    """Shapes of the 450M policy with two cameras: no weight is made. In bfloat16, as LeRobot's pretrained VLM runs."""
    from flowrl.policy.tiny import SIZES

    size = SIZES["450m"]
    image_tokens = (size.image_size // size.patch // size.pixel_shuffle) ** 2
    tokens = 2 * image_tokens + 48 + 1
    assert tokens == 177
    with torch.device("meta"):
        shape = (1, size.text_layers, size.kv_heads, tokens, size.head_dim)
        prefix = Prefix(
            {
                "pad_mask": torch.empty(1, tokens, dtype=torch.bool),
                "keys": torch.empty(shape, dtype=torch.bfloat16),
                "values": torch.empty(shape, dtype=torch.bfloat16),
            }
        )
        features = torch.empty(1, 2 * size.text_layers * size.kv_heads * size.head_dim)
        states, log_prob = torch.empty(1, 11, 50, 32), torch.empty(1, 10, 50, 6)
    others = sum(tensor.numel() * tensor.element_size() for tensor in (features, states, log_prob))
    assert prefix.num_bytes == 177 + 2 * 2 * 16 * 5 * 177 * 64
    assert prefix.num_bytes + others < 4e6


def test_tensors_that_share_memory_or_are_not_contiguous_are_stored_whole(trained, tmp_path):
    block = torch.arange(12.0).view(3, 4)
    shared = {
        "whole": block,
        "same": block,
        "rows": block[1:],
        "turned": block.T,
        "every_other": block[:, ::2],
    }
    state = load_training_state(save(tmp_path / "last", trained, tensors=shared))
    assert all(torch.equal(state.tensors[name], tensor) for name, tensor in shared.items())
