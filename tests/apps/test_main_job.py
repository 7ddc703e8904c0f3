"""The main job in small: models/chess-tiny, the real simulation, flowrl-train; what LeRobot makes of the results."""

import json
import re
import shutil
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from lerobot.envs.utils import preprocess_observation
from lerobot.policies.factory import make_pre_post_processors
from lerobot.policies.smolvla.modeling_smolvla import SmolVLAPolicy
from safetensors.torch import load_file

import flowrl.cli
from flowrl.checkpoint import relocate
from flowrl.flow.sampler import sample_chain
from flowrl.policy.loading import load_policy

ROOT = Path(__file__).parents[2]
CHESS_TINY = ROOT / "models" / "chess-tiny"
FIELDS = [
    "iteration",
    "decisions",
    "train_episodes",
    "train_success",
    "train_return",
    "train_clean_lift",
    "train_disturbed",
    "train_toppled",
    "train_success_pawn",
    "train_success_knight",
    "train_close_mm_median",
    "val_success",
    "val_return",
    "val_clean_lift",
    "val_disturbed",
    "val_toppled",
    "val_success_pawn",
    "val_success_knight",
    "val_close_mm_median",
    "kl",
    "clip_fraction",
    "pg_loss",
    "v_loss",
    "explained_variance",
    "grad_norm",
    "ratio_max_dev",
    "sigma_mean",
    "epochs_done",
    "kl_stop",
    "rollout_s",
    "rollout_parts",
    "update_s",
    "val_seconds",
]


def weights(folder):
    return load_file(folder / "model.safetensors")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Two iterations by the command line, with a checkpoint after each."""
    out = tmp_path_factory.mktemp("main_job") / "run"
    flags = "--iterations 2 --episodes 4 --envs 2 --val-episodes 2 --val-every 2 --save-every 1 --seconds 4"
    args = [
        "--policy",
        str(CHESS_TINY),
        "--out",
        str(out),
        "--minibatch",
        "4",
        "--device",
        "cpu",
        *flags.split(),
    ]
    assert flowrl.cli.run_program(flowrl.cli._train, args) == 0
    return out


@pytest.fixture(scope="module")
def log(run):
    return [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def scene():
    """A batch of two observations of the real environment, and their instructions."""
    envs = gymnasium.make_vec("chess_env:ChessPick-v0", num_envs=2, image_size=128, distractors=(0, 8))
    observation, info = envs.reset(seed=[9_300_003] * 2, options={"index": np.array([0, 1])})
    envs.close()
    return observation, list(info["task"])


def test_log_has_iterations_0_to_2_with_every_field(log):
    assert [line["iteration"] for line in log] == [0, 1, 2]
    for line in log:
        assert set(FIELDS) <= set(line)
    assert log[0]["val_success"] is not None and log[0]["train_success"] is None
    assert log[2]["kl"] is not None and log[2]["val_success"] is not None
    assert set(log[1]["rollout_parts"]) == {"prepare", "sample", "env", "reset", "rounds"}


def test_chains_rescored_as_sampled_have_ratio_exactly_1(log):
    assert log[1]["ratio_max_dev"] == 0.0 and log[2]["ratio_max_dev"] == 0.0


def test_warm_up_leaves_the_policy_bit_identical_and_iteration_2_trains_the_expert_alone(run):
    start, warmed, trained = (weights(f) for f in (CHESS_TINY, run / "iter_0001", run / "iter_0002"))
    assert start.keys() == warmed.keys() == trained.keys()
    assert all(torch.equal(start[name], warmed[name]) for name in start)
    changed = {name for name in start if not torch.equal(start[name], trained[name])}
    assert any(".lm_expert." in name for name in changed)
    assert not any(".vlm." in name or ".state_proj." in name for name in changed)


def test_preset_of_the_policy_is_used_and_recorded(run):
    args = json.loads((run / "args.json").read_text())
    preset = json.loads((CHESS_TINY / "preset.json").read_text())["train"]
    for name in ("noise_basis", "noise_modes", "sigma_end", "kl_adapt", "average_decay"):
        assert args["flags"][name] == preset[name]
    assert args["flags"]["minibatch"] == 4  # an explicit flag wins
    assert args["environment"]["kwargs"]["image_size"] == 128
    assert args["environment"]["reward_weights"]["success"] == 1.0


def test_normalization_is_the_bases_byte_for_byte(run):
    files = [path.name for path in CHESS_TINY.glob("policy_*.safetensors")]
    assert len(files) == 2
    for name in files:
        assert (run / "last" / name).read_bytes() == (CHESS_TINY / name).read_bytes()


def lerobot_chunk(folder, scene, x_0):
    observation, tasks = scene
    policy = SmolVLAPolicy.from_pretrained(folder, strict=True)
    preprocessor, postprocessor = make_pre_post_processors(policy.config, pretrained_path=str(folder))
    batch = preprocess_observation(observation)
    batch["task"] = tasks
    return postprocessor(policy.predict_action_chunk(preprocessor(batch), noise=x_0))


def flowrl_chunk(folder, scene, x_0):
    observation, tasks = scene
    policy = load_policy(folder)
    return policy.unnormalize(sample_chain(policy, policy.encode(observation, tasks), x_0).actions)


@pytest.mark.parametrize("which", ["start", "last"])
def test_lerobot_loads_it_offline_and_gives_the_same_chunk(which, run, scene, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(ROOT)  # the committed folder holds a path relative to the repository
    folder = CHESS_TINY if which == "start" else run / "last"
    x_0 = torch.randn(2, 50, 6, generator=torch.Generator().manual_seed(0))
    chunk = lerobot_chunk(folder, scene, x_0)
    assert chunk.shape == (2, 50, 6)
    assert torch.equal(chunk, flowrl_chunk(folder, scene, x_0))


@pytest.mark.parametrize("which", ["start", "last"])
def test_moved_folders_load_in_flowrl_at_once_and_in_lerobot_after_relocate(
    which, run, scene, tmp_path, monkeypatch
):
    source = CHESS_TINY if which == "start" else run / "last"
    moved = tmp_path / "elsewhere" / "policy"
    shutil.copytree(source, moved)
    monkeypatch.chdir(tmp_path)
    x_0 = torch.randn(2, 50, 6, generator=torch.Generator().manual_seed(1))
    chunk = flowrl_chunk(moved, scene, x_0)
    assert flowrl.cli.run_program(flowrl.cli._relocate, [str(moved)]) == 0
    assert str(moved) in (moved / "config.json").read_text()
    assert torch.equal(lerobot_chunk(moved, scene, x_0), chunk)
    assert (moved / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()


def test_the_committed_policy_is_small_and_names_no_machine():
    assert sum(path.stat().st_size for path in CHESS_TINY.rglob("*") if path.is_file()) <= 10 * 2**20
    for path in CHESS_TINY.rglob("*.json"):
        assert not re.search(r'"/\w', path.read_text()), path
    assert json.loads((CHESS_TINY / "config.json").read_text())["vlm_model_name"] == "models/chess-tiny/vlm"


def bad(args, capsys):
    code = flowrl.cli.run_program(flowrl.cli._train, args)
    errors = capsys.readouterr().err.strip().splitlines()
    assert code == 2
    assert not any("Traceback" in line for line in errors)
    return errors[-1]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            ["--policy", "models/nothing"],
            ["models/nothing", "does not exist"],
        ),
        (["--env-id", "chess_env:Nowhere-v0"], ["Nowhere-v0"]),
        (["--env-id", "no_such_module:Env-v0"], ["no_such_module"]),
        (["--env-id", "Pendulum-v1"], ["Pendulum-v1"]),
        (["--envs", "0"], ["--envs 0", "at least 1"]),
        (["--env-kwargs", '{"chunk_size": 20, "n_action_steps": 20}'], ["20", "50"]),
        (["--env-kwargs", '{"image_size": "big"}'], ["image_size", "big"]),
        (["--rename", "top=front"], ["top", "front", "wrist"]),
    ],
)
def test_bad_input_is_one_line_and_writes_no_run(flags, words, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    out = tmp_path / "run"
    common = [
        "--policy",
        str(CHESS_TINY),
        "--device",
        "cpu",
        "--envs",
        "1",
        "--episodes",
        "1",
        "--out",
        str(out),
    ]
    line = bad([*common, *flags], capsys)
    assert line.startswith("error: ") and all(word in line for word in words), line
    assert not (out / "last").exists() and not (out / "log.jsonl").exists()


def test_a_policy_for_another_robot_is_one_line(tmp_path, capsys):
    from flowrl.policy.tiny import build_smolvla, save_policy_folder

    folder = tmp_path / "seven"
    policy = build_smolvla(folder / "vlm", action_dim=7, image_size=128, task_tokens=32)
    moments = {
        name: {"mean": np.ones(size, np.float32), "std": np.full(size, 2, np.float32)}
        for name, size in (("observation.state", 6), ("action", 7))
    }
    save_policy_folder(folder, policy, moments)
    line = bad(
        ["--policy", str(folder), "--envs", "1", "--device", "cpu", "--out", str(tmp_path / "run")], capsys
    )
    assert "7" in line and "6" in line


def test_a_used_out_folder_is_refused_and_untouched(run, capsys):
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    line = bad(["--policy", str(CHESS_TINY), "--out", str(run), "--device", "cpu"], capsys)
    assert str(run) in line and "--out" in line
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


def test_relocate_can_write_a_path_relative_to_the_repository(tmp_path):
    moved = tmp_path / "policy"
    shutil.copytree(CHESS_TINY, moved)
    relocate(moved, "models/policy/vlm")
    assert json.loads((moved / "config.json").read_text())["vlm_model_name"] == "models/policy/vlm"
