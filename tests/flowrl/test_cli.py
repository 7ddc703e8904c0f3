"""The programs' first contact: help, bad flags, exit codes. Each runs as a process of its own."""

import json
import os
import subprocess
import sys

import pytest

from flowrl.cli import one_line

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
