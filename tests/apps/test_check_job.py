"""flowrl-check and flowrl-eval of models/chess-tiny in the real simulation, by the command line."""

import json
from pathlib import Path

import pytest

import flowrl.cli

CHESS_TINY = str(Path(__file__).parents[2] / "models" / "chess-tiny")
COMMON = ["--policy", CHESS_TINY, "--device", "cpu", "--torch-threads", "1", "--workers", "2"]


@pytest.fixture(scope="module")
def checked(tmp_path_factory):
    out = tmp_path_factory.mktemp("check") / "out"
    flags = ["--same-episodes", "2", "--noise-episodes", "1", "--seconds", "2"]
    code = flowrl.cli.run_program(
        flowrl.cli._check, [*COMMON, "--out", str(out), "--schedules", "0.2:0.002", *flags]
    )
    return code, json.loads((out / "check.json").read_text())


def test_the_bundled_policy_passes_all_five_checks(checked):
    code, record = checked
    assert code == 0 and record["passed"] and len(record["checks"]) == 5


def test_the_policys_preset_is_checked_with(checked):
    _, record = checked
    assert record["environment"]["kwargs"]["image_size"] == 128
    assert record["training"]["noise_basis"] == "dct"
    noises = [row["noise"] for row in record["checks"][1]["rows"]]
    preset = json.loads((Path(CHESS_TINY) / "preset.json").read_text())["train"]
    own, basis = f"{preset['sigma_start']}:{preset['sigma_end']}", f"dct {preset['noise_modes']}"
    assert noises == ["none", f"{own} {basis}, the policy's own", f"0.2:0.002 {basis}"]


def test_closed_loop_episodes_are_equal_in_success_frames_and_distances(checked):
    details = checked[1]["checks"][0]["details"]
    plain, batched = details["plain"], details["--fast"]
    assert plain == batched and [episode["index"] for episode in plain] == [0, 1]
    assert all({"success", "frames", "closest_mm", "close_lateral_mm"} <= set(episode) for episode in plain)


def test_a_failing_check_gives_exit_code_1(monkeypatch):
    from flowrl import check
    from flowrl.checks import CheckResult

    failed = [CheckResult("Update", [{"what": "vlm", "passed": False}], {})]
    monkeypatch.setattr(check, "check", lambda config, train_config: failed)
    assert flowrl.cli.run_program(flowrl.cli._check, COMMON) == 1
