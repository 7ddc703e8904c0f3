"""The programs' first contact: help, bad flags, exit codes. Each runs as a process of its own."""

import json
import os
import subprocess
import sys

import pytest

from flowrl.cli import one_line, parse_flags
from flowrl.config import CheckConfig, EvalConfig, TrainConfig, check_config
from flowrl.errors import FlowRLError
from flowrl.facts import seen_scenes
from flowrl.scenes import check_disjoint, fixed_scenes, training_scenes

PROGRAM = "import sys; from flowrl import cli; cli.{name}()"


def run(name: str, *args: str, cwd=None, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM.format(name=name), *args],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=cwd,
        env={**os.environ, **env},
    )


@pytest.mark.parametrize("name", ["train", "evaluate", "check", "relocate"])
@pytest.mark.parametrize("columns", ["40", "200"])
def test_help_explains_the_flags(name, columns):
    result = run(name, "--help", COLUMNS=columns)
    assert result.returncode == 0 and result.stderr == ""
    assert ("--policy" if name != "relocate" else "FOLDER") in result.stdout


def test_help_imports_neither_torch_nor_lerobot():
    code = (
        "import sys\nfrom flowrl import cli\nsys.argv = ['flowrl-train', '--help']\n"
        "try:\n    cli.train()\nexcept SystemExit:\n    pass\n"
        "print([m for m in ('torch', 'lerobot', 'transformers', 'gymnasium') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("name", "args", "words"),
    [
        ("train", ["--learning-rate", "3"], ["--learning-rate", "flowrl-train --help"]),
        ("train", ["--lr", "fast"], ["--lr", "fast"]),
        ("train", ["--learn-sigma", "True"], ["True"]),
        ("train", ["--ratio", "token"], ["token", "element", "step", "chunk"]),
        ("train", ["--envs", "0"], ["--envs 0", "at least 1"]),
        ("train", ["--env-kwargs", "{"], ["--env-kwargs", "JSON"]),
        ("train", ["--val-seed", "7700003"], ["--val-seed 7700003", "--train-seed"]),
        ("train", ["--train-seed", "9000003"], ["--train-seed 9000003", "test scenes"]),
        ("evaluate", ["--episodes", "many"], ["--episodes", "many"]),
        ("evaluate", ["--workers", "0"], ["--workers 0"]),
        ("check", ["--noise-episodes", "0"], ["--noise-episodes 0", "at least 1"]),
        ("check", ["--schedules", "0.2"], ["--schedules '0.2'", "START:END"]),
        ("relocate", [], ["FOLDER"]),
    ],
)
def test_bad_flag_is_one_line_and_exit_code_2(name, args, words):
    result = run(name, *args)
    assert result.returncode == 2 and result.stdout == ""
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1 and all(word in lines[0] for word in words), result.stderr


def test_wrong_preset_is_one_line_and_exit_code_2(tmp_path):
    (tmp_path / "preset.json").write_text(json.dumps({"train": {"speed": 3}}))
    result = run("train", "--policy", str(tmp_path))
    assert result.returncode == 2 and "train.speed" in result.stderr and result.stderr.count("\n") == 1


def test_missing_policy_is_one_line_and_exit_code_2(tmp_path):
    result = run("train", "--policy", str(tmp_path / "nothing"), "--device", "cpu", cwd=tmp_path)
    assert result.returncode == 2 and "Traceback" not in result.stderr
    assert "nothing" in result.stderr.strip().splitlines()[-1]
    assert list(tmp_path.iterdir()) == []


def test_version_is_told():
    result = run("train", "--version")
    assert result.returncode == 0 and result.stdout.startswith("flowrl ")


def test_boxed_message_becomes_one_line():
    panel = "╭─ Value error ─────╮\n│ Error parsing     │\n│ --lr: 'x'         │\n│ ───────────────── │\n│ help              │\n╰───────────────────╯\n"
    assert one_line(panel) == "Error parsing --lr: 'x'"


@pytest.mark.parametrize(
    "config",
    [TrainConfig(val_seed=9_000_003), CheckConfig(seed=9_000_003), CheckConfig(noise_seed=9_000_003)],
)
def test_test_scenes_are_for_the_evaluation_alone(config):
    with pytest.raises(FlowRLError, match="9000003: is the seed of the test scenes"):
        check_config(config)
    check_config(EvalConfig(seed=9_000_003))


def test_scenes_told_apart_by_seeds_alone_are_disjoint_or_refused():
    check_disjoint(TrainConfig())
    near = training_scenes(TrainConfig.train_seed, 700, 1)[0].derived_seed
    with pytest.raises(FlowRLError, match=f"--val-seed {near}: .* are training seeds"):
        check_disjoint(TrainConfig(val_seed=near))
    near = fixed_scenes(9_000_003, 6)[5].derived_seed
    with pytest.raises(FlowRLError, match=f"--train-seed {near}: .* are test seeds"):
        check_disjoint(TrainConfig(train_seed=near))


def test_every_switch_has_one_style_and_its_default_in_the_help():
    text = run("train", "--help", COLUMNS="200").stdout
    for switch, default in (("learn-sigma", False), ("early-stop", True), ("bootstrap-truncated", False)):
        assert f"--{switch}, --no-{switch}" in text
        assert f"(default: {default})" in text
    assert parse_flags(TrainConfig, "", ["--no-early-stop", "--learn-sigma"]).early_stop is False


def test_values_after_a_list_and_unusual_numbers_are_parsed():
    args = ["--rename", "top=camera1", "wrist=", "--lr", "1e-4", "--out", "a folder/run", "--gamma", ".9"]
    config = parse_flags(TrainConfig, "", args)
    assert config.rename == ("top=camera1", "wrist=") and config.lr == 1e-4
    assert config.out == "a folder/run" and config.gamma == 0.9
    with pytest.raises(FlowRLError, match=r"--lr -0\.1: must not be negative"):
        check_config(parse_flags(TrainConfig, "", ["--lr", "-0.1"]))


def test_a_checkpoint_evaluated_on_scenes_that_it_has_seen_is_told(tmp_path):
    record = {"format": 1, "meta": {"flags": {"train_seed": 5, "val_seed": 6}}}
    (tmp_path / "flowrl.json").write_text(json.dumps(record))
    (tmp_path / "flowrl.safetensors").write_bytes(b"")
    assert "was trained on scenes of this seed" in seen_scenes(str(tmp_path), 5)
    assert "was validated, and so chosen, on" in seen_scenes(str(tmp_path), 6)
    assert seen_scenes(str(tmp_path), 9_000_003) == "" == seen_scenes("user/name", 5)
