import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from lerobot.configs import PreTrainedConfig
from lerobot.envs.utils import preprocess_observation
from lerobot.policies.factory import get_policy_class, make_pre_post_processors
from safetensors.torch import load_file, save_file
from small_pi0 import save_small, small_widths

from flowrl.checkpoint import relocate, save_checkpoint
from flowrl.cli import _check, _train, run_program
from flowrl.config import TrainConfig
from flowrl.errors import FlowRLError
from flowrl.flow.likelihood import rescore
from flowrl.flow.sampler import sample_chain
from flowrl.gae import normalize_advantages
from flowrl.policy.critic import Critic
from flowrl.policy.loading import load_policy
from flowrl.policy.noise import NoiseModel
from flowrl.policy.pi0 import PI0FlowPolicy, PI05FlowPolicy
from flowrl.ppo import PPO
from flowrl.prefix import Prefix
from flowrl.rollout import Decisions

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
KINDS = ("pi0", "pi05")
ALIGNED = {"pi0": 15, "pi05": 16}
"""Chunk sizes with which every row's part of an attention matrix is a multiple of 64 bytes. With others a CPU's kernels round
the rows of a batch differently by their place in it, which flowrl-check tells."""
MEAN_AND_STD = "policy_preprocessor_step_6_normalizer_processor.safetensors"


@pytest.fixture(scope="module", autouse=True)
def small():
    with small_widths():
        yield


@pytest.fixture(scope="module")
def folders(tmp_path_factory, small) -> dict[str, Path]:
    """A policy folder of each kind; tests must not change them."""
    root = tmp_path_factory.mktemp("pi0")
    return {kind: save_small(root / kind, kind) for kind in KINDS}


@pytest.fixture
def copy(folders, tmp_path) -> Path:
    """A copy of the pi0 folder that a test may damage."""
    return Path(shutil.copytree(folders["pi0"], tmp_path / "copy"))


def observe(batch: int, seed: int = 0, cameras=("top", "wrist")) -> dict:
    rng = np.random.default_rng(seed)
    images = {camera: rng.integers(0, 256, (batch, 20, 30, 3), dtype=np.uint8) for camera in cameras}
    return {"pixels": images, "agent_pos": rng.normal(size=(batch, 6)).astype(np.float32)}


def chunk(policy, observation, tasks, x_0):
    chain = sample_chain(policy, policy.encode(observation, tasks), x_0)
    return policy.unnormalize(chain.actions[..., : policy.spec.action_dim])


def lerobot_policy(folder):
    """Nothing of flowrl: LeRobot's own loader. It tells of wrong weights by a line that nobody reads, and goes on."""
    config = PreTrainedConfig.from_pretrained(str(folder))
    return get_policy_class(config.type).from_pretrained(folder, config=config, strict=True)


def lerobot_chunk(folder, observation, tasks, x_0):
    module = lerobot_policy(folder)
    preprocessor, postprocessor = make_pre_post_processors(module.config, pretrained_path=str(folder))
    batch = preprocess_observation({**observation, "pixels": dict(observation["pixels"])})
    batch["task"] = list(tasks)
    return postprocessor(module.predict_action_chunk(preprocessor(batch), noise=x_0))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_without_noise_the_chunk_is_lerobots_bit_for_bit(kind, dtype, tmp_path):
    folder = save_small(tmp_path / "policy", kind, dtype=dtype)
    policy = load_policy(folder, expert_dtype="loaded")
    for batch in (1, 3):
        observation, tasks, x_0 = observe(batch), ["Pick the rook."] * batch, torch.randn(batch, 10, 8)
        expected = lerobot_chunk(folder, observation, tasks, x_0)
        assert expected.shape == (batch, 10, 6)
        assert torch.equal(chunk(policy, observation, tasks, x_0), expected)
        assert torch.equal(policy.predict_action_chunk(observation, tasks, x_0), expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_chains_rescored_as_sampled_have_the_ratio_1(kind, dtype, tmp_path):
    policy = load_policy(save_small(tmp_path / "policy", kind, dtype=dtype))
    noise = NoiseModel(policy.spec)
    prefix = policy.encode(observe(3), ["go"] * 3)
    chain = sample_chain(policy, prefix, torch.randn(3, 10, 8), noise, torch.randn(3, 4, 10, 6))
    stored = Prefix({name: tensor.clone() for name, tensor in prefix.tensors.items()})
    assert torch.equal(rescore(policy, stored, chain.states, noise), chain.log_prob)
    shuffled = rescore(policy, prefix[[2, 0]], chain.states[[2, 0]], noise)
    assert float(((shuffled - chain.log_prob[[2, 0]]).exp() - 1).abs().max()) < 1e-3


def test_prefix_holds_what_the_policy_reads_of_an_observation(folders):
    observation, moved = observe(2), observe(2)
    moved["agent_pos"] = moved["agent_pos"] + 1
    for kind, parts in (("pi0", {"state"}), ("pi05", set())):
        policy = load_policy(folders[kind])
        prefix, other = (policy.encode(o, ["go"] * 2) for o in (observation, moved))
        assert prefix.tensors.keys() == {"pad_mask", "keys", "values"} | parts
        same_keys = torch.equal(prefix.tensors["keys"], other.tensors["keys"])
        assert same_keys == (kind == "pi0")  # pi0.5 has the state in its text
        x_t, time = torch.randn(2, 10, 8), torch.tensor([0.5, 0.25])
        assert not torch.equal(policy.velocity(x_t, time, prefix), policy.velocity(x_t, time, other))
        assert not torch.equal(policy.prefix_features(prefix), policy.prefix_features(other))
    state = load_policy(folders["pi0"]).encode(observation, ["go"] * 2).tensors["state"]
    mean_std = load_file(folders["pi0"] / MEAN_AND_STD)
    mean, std = mean_std["observation.state.mean"], mean_std["observation.state.std"]
    torch.testing.assert_close(state[:, :6], (torch.as_tensor(observation["agent_pos"]) - mean) / std)
    assert torch.equal(state[:, 6:], torch.zeros(2, 2))


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_expert_and_its_projections_have_gradients_and_all_of_them_do(kind, folders):
    policy = load_policy(folders[kind])
    prefix = policy.encode(observe(2), ["go"] * 2)
    policy.velocity(torch.randn(2, 10, 8), torch.tensor([0.5, 0.25]), prefix).square().mean().backward()
    trainable = policy.trainable_parameters()
    parts = {name.split(".")[1] for name in trainable}
    mlp = {f"{'' if kind == 'pi05' else 'action_'}time_mlp_{side}" for side in ("in", "out")}
    assert parts == {"paligemma_with_expert", "action_in_proj", "action_out_proj"} | mlp
    for name, parameter in policy.module.named_parameters():
        assert parameter.requires_grad == (name in trainable)
        # What only the keys of the last layer's unused outputs would need has none in LeRobot's own loss either.
        assert (parameter.grad is not None) == (name in trainable), name


@pytest.mark.parametrize("kind", KINDS)
def test_an_update_changes_the_intended_weights_alone_and_lerobot_loads_them(kind, folders, tmp_path):
    torch.manual_seed(0)
    policy = load_policy(folders[kind])
    before = {name: tensor.clone() for name, tensor in policy.module.state_dict().items()}
    noise, tasks = NoiseModel(policy.spec, sigma_start=0.3, sigma_end=0.1), ["go"] * 4
    prefix = policy.encode(observe(4), tasks)
    chain = sample_chain(policy, prefix, torch.randn(4, 10, 8), noise, torch.randn(4, 4, 10, 6))
    features = policy.prefix_features(prefix)
    decisions = Decisions(
        prefix, chain.states, chain.log_prob, features, torch.full((4,), 10), np.arange(4), np.zeros(4, int),
        [np.arange(4)],
    )  # fmt: skip
    critic = Critic(features.shape[1])
    config = TrainConfig(lr=1e-4, critic_warmup=0, epochs=1, minibatch=4)
    ppo = PPO(policy, noise, critic, config)
    stats = ppo.update(decisions, normalize_advantages(np.arange(4.0)), np.zeros(4), iteration=1)
    assert stats.ratio_max_dev == 0 and stats.skipped == 0
    after = policy.module.state_dict()
    changed = {name for name in after if not torch.equal(before[name], after[name])}
    assert changed == set(policy.trainable_parameters())

    folder = save_checkpoint(tmp_path / "last", policy, noise=noise, critic=critic)
    module = lerobot_policy(folder).state_dict()
    assert module.keys() == after.keys() and all(torch.equal(module[name], after[name]) for name in after)
    x_0 = torch.randn(4, 10, 8)
    expected = lerobot_chunk(folder, observe(4), tasks, x_0)
    assert torch.equal(chunk(policy, observe(4), tasks, x_0), expected)
    for file in folders[kind].glob("policy_*.safetensors"):
        assert (folder / file.name).read_bytes() == file.read_bytes()


@pytest.mark.parametrize("kind", KINDS)
def test_a_float32_expert_on_a_bfloat16_vlm_survives_saving(kind, tmp_path):
    base = save_small(tmp_path / "base", kind, dtype="bfloat16")
    policy = load_policy(base)
    assert policy.dtypes == {"vlm": "bfloat16+float32", "expert": "float32"}
    with torch.no_grad():
        for parameter in policy.trainable_parameters().values():
            parameter += 1e-6
    folder = save_checkpoint(tmp_path / "last", policy)
    stored, original = load_file(folder / "model.safetensors"), load_file(base / "model.safetensors")
    trainable = policy.trainable_parameters()
    frozen = stored.keys() - trainable.keys()
    assert all(torch.equal(stored[n], original[n]) and stored[n].dtype == original[n].dtype for n in frozen)
    again, library = load_policy(folder), lerobot_policy(folder).state_dict()
    x_0 = torch.randn(2, 10, 8)
    assert torch.equal(chunk(again, observe(2), ["go"] * 2, x_0), chunk(policy, observe(2), ["go"] * 2, x_0))
    assert all(torch.equal(library[name], parameter) for name, parameter in trainable.items())


def test_a_moved_folder_brings_its_tokenizer_along(copy, folders, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    preprocessor = copy / "policy_preprocessor.json"
    preprocessor.write_text(preprocessor.read_text().replace(str(folders["pi0"]), "/of/another/machine"))
    moved = Path(shutil.move(copy, tmp_path / "moved"))
    observation, x_0 = observe(2), torch.randn(2, 10, 8)
    expected = chunk(load_policy(folders["pi0"]), observation, ["go"] * 2, x_0)
    assert torch.equal(chunk(load_policy(moved), observation, ["go"] * 2, x_0), expected)
    assert relocate(moved) == str(moved / "vlm")
    assert torch.equal(lerobot_chunk(moved, observation, ["go"] * 2, x_0), expected)


def test_a_file_with_openpis_names_loads(copy, folders):
    weights = load_file(copy / "model.safetensors")
    save_file({name.removeprefix("model."): t for name, t in weights.items()}, copy / "model.safetensors")
    state = load_policy(copy).module.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in weights.items())


def edit(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


def remove_a_weight(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.state_proj.weight"]
    save_file({**weights, "model.surprise": torch.zeros(1)}, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (remove_a_weight, ["missing 1 keys (model.state_proj.weight)", "unexpected 1", "surprise"]),
        (lambda f: edit(f / "config.json", '"use_relative_actions": false', '"use_relative_actions": true'),
         ["use_relative_actions", "does not support"]),
        (lambda f: (f / "vlm" / "tokenizer.json").unlink(), ["vlm/tokenizer.json is missing"]),
        (lambda f: (f / MEAN_AND_STD).unlink(), ["statistics", "missing"]),
        (lambda f: edit(f / "config.json", '"pi0"', '"pi0_fast"'), ["pi0_fast", "pi05", "smolvla"]),
    ],
)  # fmt: skip
def test_a_wrong_folder_is_one_line(copy, damage, words):
    damage(copy)
    with pytest.raises(FlowRLError) as error:
        load_policy(copy)
    assert all(word in str(error.value) for word in words) and "\n" not in str(error.value)


def test_a_tokenizer_that_is_nowhere_is_told_with_the_command_that_gets_it(copy, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    shutil.rmtree(copy / "vlm")
    preprocessor = json.loads((copy / "policy_preprocessor.json").read_text())
    for step in preprocessor["steps"]:
        if step["registry_name"] == "tokenizer_processor":
            step["config"]["tokenizer_name"] = "google/no-such-tokenizer"
    (copy / "policy_preprocessor.json").write_text(json.dumps(preprocessor))
    with pytest.raises(FlowRLError, match="hf download google/no-such-tokenizer"):
        load_policy(copy)


def test_a_long_instruction_and_wrong_cameras_are_told(folders):
    policy = load_policy(folders["pi0"])
    with pytest.warns(UserWarning, match="cuts it to 48"):
        policy.encode(observe(1), ["a" * 60])
    with pytest.raises(FlowRLError, match=r"images\.side.*policy takes.*images\.top"):
        policy.encode(observe(1, cameras=("side", "wrist")), ["go"])
    with pytest.warns(UserWarning, match="cuts it to 200"):
        load_policy(folders["pi05"]).encode(observe(1), ["a" * 160])


def test_an_absent_camera_is_masked(tmp_path):
    policy = load_policy(save_small(tmp_path / "policy", empty_cameras=1))
    prefix = policy.encode(observe(2), ["go"] * 2)
    tokens = 4  # an image of 28 pixels in patches of 14
    assert prefix.tensors["pad_mask"][:, : 2 * tokens].all()
    assert not prefix.tensors["pad_mask"][:, 2 * tokens : 3 * tokens].any()


def program_args(folder: Path, kind: str) -> list[str]:
    save_small(folder, kind, size=2, chunk_size=ALIGNED[kind], cameras=("top",))
    args = ["--policy", str(folder), "--env-id", "toy_camera_env:ToyCamera-v0"]
    return [*args, "--device", "cpu", "--torch-threads", "1"]


@pytest.mark.parametrize("kind", ["pi0", pytest.param("pi05", marks=pytest.mark.slow)])
def test_check_passes(kind, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    few = ["--same-episodes", "2", "--noise-episodes", "2", "--workers", "2", "--schedules", ""]
    args = [*program_args(tmp_path / "policy", kind), *few, "--out", str(tmp_path / "check")]
    assert run_program(_check, args) == 0, capfd.readouterr()
    checks = json.loads((tmp_path / "check" / "check.json").read_text())["checks"]
    assert len(checks) == 5 and all(check["passed"] for check in checks)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "adapter"), [("pi0", PI0FlowPolicy), ("pi05", PI05FlowPolicy)])
def test_a_run_trains(kind, adapter, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    sizes = ["--iterations", "2", "--episodes", "4", "--envs", "2", "--val-episodes", "2", "--val-every", "2"]
    args = [*program_args(tmp_path / "policy", kind), *sizes, "--lr", "1e-4", "--out", str(tmp_path / "run")]
    assert run_program(_train, args) == 0, capfd.readouterr()
    lines = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert [line["ratio_max_dev"] for line in lines] == [None, 0.0, 0.0] and lines[2]["kl"] > 0
    assert isinstance(load_policy(tmp_path / "run" / "last"), adapter)
