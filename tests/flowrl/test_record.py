"""What a record says of the machine and the software."""

import importlib.metadata
import json
import subprocess

import numpy as np
import torch

from flowrl.record import describe_machine, git_commit, write_json


def test_versions_name_the_environment_and_what_it_requires():
    versions = describe_machine(torch.device("cpu"), "chess_env:ChessPick-v0")["versions"]
    for name in ("torch", "lerobot", "transformers", "gymnasium", "numpy", "safetensors", "mujoco"):
        assert versions[name] == importlib.metadata.version(name)
    assert {"python", "flowrl", "chess-env"} <= {name.replace("_", "-") for name in versions}
    assert "mujoco" not in describe_machine(torch.device("cpu"))["versions"]
    assert "mujoco" not in describe_machine(torch.device("cpu"), "toy_env:ToyReach-v0")["versions"]


def test_the_machine_is_named():
    record = describe_machine(torch.device("cpu"))
    assert record["device"] == "cpu" and record["device_name"] and record["machine"] and record["cpus"] >= 1
    assert record["torch_threads"] == torch.get_num_threads() and record["cuda"] is None


def test_a_commit_with_changes_on_top_is_told(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert git_commit() is None
    file = tmp_path / "file"
    file.write_text("1")
    author = [
        "-c",
        "user.name=n",
        "-c",
        "user.email=e",
        "-c",
        "commit.gpgsign=false",
        "-c",
        "core.hooksPath=/dev/null",
    ]
    for command in (["init", "-q"], ["add", "file"], [*author, "commit", "-q", "-m", "m"]):
        subprocess.run(["git", *command], check=True)
    clean = git_commit()
    assert clean is not None and len(clean) == 40
    file.write_text("2")
    assert git_commit() == f"{clean}+changes"


def test_scalars_of_any_dtype_become_numbers_in_json(tmp_path):
    values = {
        "bf16": torch.tensor(1.5, dtype=torch.bfloat16),
        "int": torch.tensor(3),
        "numpy": np.float32(0.25),
    }
    write_json(tmp_path / "values.json", values)
    assert json.loads((tmp_path / "values.json").read_text()) == {"bf16": 1.5, "int": 3, "numpy": 0.25}
