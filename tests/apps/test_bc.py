"""chess-bc: from recorded episodes to a LeRobot policy folder, in two stages as models/chess-tiny was made."""

import json
import resource
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lerobot.policies.smolvla.modeling_smolvla import SmolVLAPolicy
from safetensors.torch import load_file

from chess_apps import cli
from chess_apps.bc import run
from chess_apps.config import CloneConfig, RecordConfig
from flowrl.errors import FlowRLError

GOOD = RecordConfig(episodes=2, image_size=64, distractors=(0, 2), workers=1)
SLOPPY = RecordConfig(
    episodes=2,
    first_index=10,
    image_size=64,
    distractors=(0, 2),
    workers=1,
    aim_error_mm=2.0,
    hesitation_frames=5,
)


@pytest.fixture(scope="module")
def stages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bc")
    first, second = folder / "vision", folder / "expert"
    run(CloneConfig(out=str(first), record=GOOD, steps=3, batch=4, device="cpu"))
    preset = folder / "preset.json"
    preset.write_text(json.dumps({"env_kwargs": {"image_size": 64}, "train": {"minibatch": 32}}))
    run(
        CloneConfig(
            out=str(second), policy=str(first), train="expert", reset_expert=True, record=SLOPPY, steps=3, batch=4,
            device="cpu", preset=str(preset),
        )
    )  # fmt: skip
    return first, second


def test_cloned_folders_load_in_lerobot_and_name_their_environment(stages):
    for folder in stages:
        SmolVLAPolicy.from_pretrained(folder, strict=True)
        assert (folder / "clone.json").is_file()
    preset = json.loads((stages[0] / "preset.json").read_text())
    assert preset == {"env_kwargs": {"image_size": 64, "distractors": [0, 2]}, "train": {}}
    assert json.loads((stages[1] / "preset.json").read_text())["train"] == {"minibatch": 32}


def test_the_second_stage_trains_the_expert_on_frozen_vision_and_keeps_the_statistics(stages):
    first, second = (load_file(folder / "model.safetensors") for folder in stages)
    changed = {name for name in first if not torch.equal(first[name], second[name])}
    assert any(".lm_expert." in name for name in changed)
    assert not any(".vlm." in name or ".state_proj." in name for name in changed)
    for name in [path.name for path in stages[0].glob("policy_*.safetensors")]:
        assert (stages[0] / name).read_bytes() == (stages[1] / name).read_bytes()


def test_the_record_says_how_it_was_made(stages):
    record = json.loads((stages[1] / "clone.json").read_text())
    assert record["config"]["record"]["aim_error_mm"] == 2.0
    assert 0 < record["episodes_kept"] <= 2 and record["observations"] > 0
    assert record["loss"][-1][0] == 3


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--steps", "0"], "--steps 0"),
        (["--speed", "3"], "--speed"),
        (["--train", "everything"], "everything"),
        (["--train", "expert"], "needs a --policy"),
        (["--policy", "/nothing/here"], "does not exist"),
        (["--demos", "/nothing/here"], "make one with chess-demos"),
        (["--preset", "/nothing/here.json"], "no such file"),
        (["--record.near-fraction", "2"], "--record.near-fraction 2"),
        (["--lr", "nan"], "--lr nan: a number above 0"),
        (["--weight-decay", "-1"], "--weight-decay -1.0: at least 0"),
        (["--device", "banana"], "--device banana: must be auto, cpu, cuda or cuda:N"),
        (["--device", "cuda:99"], "--device cuda:99: torch sees"),
        (["--out", "/dev/null/policy"], "/dev/null/policy: cannot be written"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(flags, words, tmp_path, capsys, monkeypatch):
    out = tmp_path / "out"
    small = [
        "--record.episodes",
        "1",
        "--record.image-size",
        "64",
        "--record.workers",
        "1",
        "--device",
        "cpu",
    ]
    monkeypatch.setattr("sys.argv", ["chess-bc", "--out", str(out), *small, *flags])
    with pytest.raises(SystemExit) as exit_:
        cli.bc()
    assert exit_.value.code == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert line.startswith("chess-bc: ") and words in line
    assert not out.exists()


def test_images_of_another_size_than_the_policys_are_refused(stages, tmp_path):
    config = CloneConfig(
        out=str(tmp_path / "x"), policy=str(stages[0]), device="cpu", steps=1, batch=2,
        record=RecordConfig(episodes=1, image_size=32, workers=1),
    )  # fmt: skip
    with pytest.raises(FlowRLError, match="works on 64x64 images, the demonstrations have 32x32"):
        run(config)
    assert not Path(config.out).exists()


def test_fitting_ends_with_the_time(stages, tmp_path):
    out = tmp_path / "short"
    run(
        CloneConfig(
            out=str(out), policy=str(stages[0]), train="expert", record=SLOPPY, steps=1000, max_seconds=1e-9, batch=2, device="cpu"
        )
    )  # fmt: skip
    assert [step for step, _ in json.loads((out / "clone.json").read_text())["loss"]] == [1]


def test_a_disk_that_fills_at_the_last_write_is_one_line_and_leaves_nothing(stages, tmp_path):
    config = CloneConfig(
        out=str(tmp_path / "full"), policy=str(stages[0]), train="expert", record=SLOPPY, steps=1, batch=2, device="cpu"
    )  # fmt: skip
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    half = (stages[0] / "model.safetensors").stat().st_size // 2
    resource.setrlimit(resource.RLIMIT_FSIZE, (half, before[1]))
    try:
        with pytest.raises(FlowRLError, match=r"the policy cannot be written .*: free space and run again"):
            run(config)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("new", [False, True])
def test_a_disk_without_room_for_the_weights_is_refused_before_cloning(stages, tmp_path, monkeypatch, new):
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=2**20))
    which = {"size": "2m"} if new else {"policy": str(stages[0]), "train": "expert"}
    config = CloneConfig(
        out=str(tmp_path / "full"), record=SLOPPY, steps=10**9, batch=2, device="cpu", **which
    )
    with pytest.raises(FlowRLError, match="1 MiB are free there and the weights take"):
        run(config)
    assert list(tmp_path.iterdir()) == []
