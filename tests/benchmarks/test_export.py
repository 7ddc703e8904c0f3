"""Policies that leave the machine: as their difference to the start, and as a folder to publish."""

import importlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from flowrl.errors import FlowRLError

ROOT = Path(__file__).parents[2]
CHESS_TINY = ROOT / "models" / "chess-tiny"
CHANGED = "model.action_out_proj.weight"


@pytest.fixture
def program(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module


@pytest.fixture
def checkpoint(tmp_path):
    """A checkpoint as flowrl-train leaves it: chess-tiny with one tensor changed, absolute paths, an optimizer's state."""
    folder = tmp_path / "run" / "last"
    shutil.copytree(CHESS_TINY, folder)
    for name in ("config.json", "policy_preprocessor.json"):
        file = folder / name
        file.write_text(file.read_text().replace("models/chess-tiny/vlm", str(folder / "vlm")))
    tensors = load_file(folder / "model.safetensors")
    tensors[CHANGED] = tensors[CHANGED] + 1.0
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    record = {"format": 1, "meta": {"iteration": 3, "env_kwargs": {"image_size": 128, "distractors": [0, 4]}}}
    (folder / "flowrl.json").write_text(json.dumps(record))
    save_file({"optimizer.ppo.0.exp_avg": torch.zeros(1000)}, folder / "flowrl.safetensors")
    return folder


def test_exported_folder_holds_the_policy_alone(program, checkpoint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    program("export_model").clean_policy(checkpoint, Path("models/x"), vlm_path="models/x/vlm")
    names = {path.name for path in Path("models/x").rglob("*") if path.is_file()}
    left_out = {"flowrl.json", "flowrl.safetensors", "README.md"}
    assert names == {path.name for path in CHESS_TINY.rglob("*") if path.is_file()} - left_out
    assert not any(str(tmp_path) in path.read_text() for path in Path("models/x").rglob("*.json"))
    assert json.loads(Path("models/x/config.json").read_text())["vlm_model_name"] == "models/x/vlm"
    preset = json.loads(Path("models/x/preset.json").read_text())
    assert preset["env_kwargs"] == {"image_size": 128, "distractors": [0, 4]}  # those of the run
    assert preset["train"] == json.loads((CHESS_TINY / "preset.json").read_text())["train"]


def test_exported_policy_acts_as_the_checkpoint(program, checkpoint, tmp_path, monkeypatch):
    from lerobot.policies.smolvla.modeling_smolvla import SmolVLAPolicy

    monkeypatch.chdir(tmp_path)
    program("export_model").clean_policy(checkpoint, Path("models/x"), vlm_path="models/x/vlm")
    loaded = SmolVLAPolicy.from_pretrained("models/x").state_dict()
    saved = load_file(checkpoint / "model.safetensors")
    assert all(torch.equal(loaded[name], tensor) for name, tensor in saved.items())


def test_a_path_of_the_machine_is_refused(program, checkpoint, tmp_path):
    config = json.loads((checkpoint / "config.json").read_text()) | {"pretrained_path": "/home/somebody/run"}
    (checkpoint / "config.json").write_text(json.dumps(config))
    with pytest.raises(FlowRLError, match="/home/somebody/run"):
        program("export_model").clean_policy(checkpoint, tmp_path / "x", vlm_path="models/x/vlm")
    assert not (tmp_path / "x").exists()


def test_collected_policies_are_the_packed_ones_bit_for_bit(program, checkpoint, tmp_path, monkeypatch):
    parcel = program("parcel")
    monkeypatch.setattr(parcel, "PART_BYTES", 4000)
    final = tmp_path / "gain" / "final"
    program("export_model").clean_policy(checkpoint, final / "rl-seed1")
    program("export_model").clean_policy(CHESS_TINY, final / "critic-only")
    shutil.copytree(checkpoint, tmp_path / "gain" / "runs" / "rl-seed1" / "last")  # finished: stays behind
    shutil.copytree(checkpoint, tmp_path / "gain" / "runs" / "rl-seed2" / "last")
    assert parcel.different(CHESS_TINY, final / "rl-seed1") == [CHANGED]
    assert parcel.different(CHESS_TINY, final / "critic-only") == []
    parcel.pack_gain(tmp_path / "gain", tmp_path / "carried", str(CHESS_TINY))
    parts = list((tmp_path / "carried").iterdir())
    assert len(parts) > 1 and all(part.stat().st_size <= 4000 for part in parts)
    parcel.unpack_gain(tmp_path / "carried", tmp_path / "home", str(CHESS_TINY))
    assert not (tmp_path / "home/runs/rl-seed1/last/model.safetensors").exists()
    for name in ("final/rl-seed1", "final/critic-only", "runs/rl-seed2/last"):
        packed, unpacked = (
            load_file(folder / name / "model.safetensors")
            for folder in (tmp_path / "gain", tmp_path / "home")
        )
        assert packed.keys() == unpacked.keys()
        assert all(torch.equal(packed[key], unpacked[key]) for key in packed)
    state = Path("runs/rl-seed2/last/flowrl.safetensors")
    assert (tmp_path / "home" / state).read_bytes() == (tmp_path / "gain" / state).read_bytes()
    with pytest.raises(SystemExit, match="other weights"):
        parcel.unpack_gain(tmp_path / "carried", tmp_path / "wrong", str(checkpoint))


def test_card_without_a_test_is_refused(program, tmp_path):
    with pytest.raises(FlowRLError, match="no test results of start, rl-seed1"):
        program("model_card").model_card(tmp_path, "rl-seed1", Path("models/x"))


def test_records_of_two_machines_are_both_kept(program, tmp_path):
    parcel, home = program("parcel"), tmp_path / "home"
    # The second machine began with a part of what was known.
    stages = {"first": ["train 1", "train 2"], "second": ["train 2", "test 3"]}
    for machine, lines in stages.items():
        (tmp_path / machine).mkdir()
        (tmp_path / machine / "stages.jsonl").write_text("".join(f"{line}\n" for line in lines))
        parcel.pack_gain(tmp_path / machine, tmp_path / "carried", str(CHESS_TINY))
        parcel.unpack_gain(tmp_path / "carried", home, str(CHESS_TINY))
    assert (home / "stages.jsonl").read_text().splitlines() == ["train 1", "train 2", "test 3"]
