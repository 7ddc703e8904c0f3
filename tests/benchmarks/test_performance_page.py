"""docs/performance.md: numbers of small made-up results in their tables, and what is missing is named."""

import importlib
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def page(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("performance_page")


MACHINE = {
    "device_name": "a GPU",
    "cpus": 32,
    "commit": "0123456789abcdef+changes",
    "command": "python benchmarks/policy.py",
}


def policy_result(ms: float = 20.0, parameters: float = 450e6) -> dict:
    chunk = {"what": "chunk", "batch": 16, "mode": "fused", "lerobot_ms": 300.0, "ms": ms, "ratio": 300 / ms}
    minibatch = {"batch": 16, "mode": "fused", "peak_mb": 1.0}
    return MACHINE | {
        "parameters": parameters,
        "chunks": [
            {"what": "prefix", "batch": 16, "mode": "fused", "lerobot_ms": 40.0, "ms": 8.0, "ratio": 5.0, "floor_ms": 2.0},
            {"what": "denoising", "batch": 16, "mode": "fused", "lerobot_ms": 260.0, "ms": 12.0, "ratio": 21.0, "floor_ms": 4.0},
            chunk | {"floor_ms": 5.0, "difference_deg": 0.0042, "lerobot_batch_deg": 0.003, "first_s": 9.5}
            | {"lerobot_to_float32_deg": 0.25, "to_float32_deg": 0.125},
        ],
        "updates": [
            minibatch | {"what": "minibatch, lerobot", "ms": 200.0, "ratio": 1.0, "cosine": 1.0, "floor_ms": None},
            minibatch | {"what": "minibatch, flowrl", "ms": 100.0, "ratio": 2.0, "cosine": 1.0, "floor_ms": 80.0},
            minibatch | {"what": "minibatch, flowrl, TF32", "ms": 25.0, "ratio": 8.0, "cosine": 0.99999, "floor_ms": 10.0},
        ],
    }  # fmt: skip


def iteration_result(envs: int = 64, decisions: int = 400) -> dict:
    collected = {"decisions": decisions, "decisions_per_s": decisions / 2, "workers_cpu_s": 16.0}
    setting = {
        "envs": envs,
        "episodes": 100,
        "best": {
            "collect 1": {"wall_s": 3.0} | collected,
            "collect 2": {"wall_s": 2.0, "gpu_encode_s": 0.5, "gpu_denoise_s": 0.75} | collected,
            "eager collect": {"wall_s": 1.0} | collected,
            "update": {"wall_s": 4.0, "decisions": decisions},
        },
        "parts_s": {"environments": 1.5, "encoding": 0.5, "update of the policy": 4.0},
        "iteration_s": 6.0,
        "share_of_simulators": 0.85,
        "pictures_cpu_s": 4.0,
        "eager_iteration_s": 33.0,
        "ratio": 5.5,
    }
    way = {"velocity": "tf32", "update_precision": "tf32", "compiled": True, "cores": 16}
    return MACHINE | way | {"settings": [setting]}


def row_of(text: str, start: str) -> list[str]:
    """Cells of the only row that begins so."""
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {start} |")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_chunks_and_minibatches_have_ratio_floor_and_share_of_the_floor(page):
    blocks = page.blocks({"gpu-policy-450m": policy_result()})
    assert row_of(blocks["chunk-450m"], "16") == [
        "16", "fused", "300", "20", "15x", "8", "12", "5", "25 %", "0.0042", "0.003", "0.25", "0.125",
        "9.50",
    ]  # fmt: skip
    lines = blocks["update-450m"].splitlines()
    assert "| 16 | fused | flowrl, TF32 | 25 | 8x | 10 | 40 % | 0.999990 |" in lines
    assert "| 16 | fused | LeRobot, encoding again | 200 | 1x |  |  | 1.000000 |" in lines
    assert "Not measured: gpu-policy-450m-ways." in blocks["update-450m"]


def test_iteration_takes_the_fastest_number_of_groups(page):
    blocks = page.blocks({"gpu-iteration-450m-fast": iteration_result()})
    cells = row_of(blocks["iteration-450m"].split("\n\n")[0], "tf32, compiled, update tf32")
    assert cells[1:] == ["64", "100", "400", "2.00", "200", "85 %", "4.00", "6.00", "33.00", "5.5x"]
    assert "| 0.50 | 0.75 | 50 % | 25 % |" in blocks["iteration-450m"]  # 16 s of 16 cores in 2 s; 4 of 16


def test_cost_grows_along_one_table(page):
    measured = {"gpu-policy-8m": policy_result(2.0, 8e6), "gpu-policy-450m": policy_result()}
    text = page.blocks(measured)["sizes"]
    assert row_of(text, "8m") == ["8m", "8.0 M", "fused", "300", "2", "150x", "200", "100", "2x"]
    assert "Not measured: gpu-policy-chess-tiny, gpu-policy-30m." in text


def test_aims_take_the_best_and_say_what_is_open(page):
    measured = {
        "gpu-policy-450m": policy_result(),
        "gpu-policy-450m-ways": policy_result(40.0),
        "gpu-iteration-450m-fast": iteration_result(),
    }
    text = page.blocks(measured)["aims"]
    assert row_of(text, "chunk for 16 environments, 450 M [ms]")[1:4] == ["at most 30", "20", "yes"]
    assert row_of(text, "the same, largest difference to LeRobot's targets [deg]")[2:4] == ["0.0042", "yes"]
    assert row_of(text, "the same, cosine of the gradients")[2:4] == ["0.999990", "yes"]
    assert row_of(text, "minibatch of 16, 450 M [ms]")[2:4] == ["25", "yes"]
    assert row_of(text, "iteration, 450 M, 100 episodes, 2 epochs [s]")[2:4] == ["6", "yes"]
    assert row_of(text, "chess-tiny: share of the simulators' rate")[2:4] == ["not measured", "open"]
    slow = page.blocks({"gpu-policy-450m": policy_result(40.0)})["aims"]
    assert row_of(slow, "chunk for 16 environments, 450 M [ms]")[2:4] == ["40", "**no**"]


def test_page_names_machine_commit_and_command_and_keeps_what_is_written_by_hand(page, tmp_path, monkeypatch):
    (tmp_path / "results").mkdir()
    (tmp_path / "results/gpu-policy-450m.json").write_text(json.dumps(policy_result()))
    target = tmp_path / "page.md"
    target.write_text((ROOT / "docs/performance.md").read_text())
    monkeypatch.setattr("sys.argv", ["", str(tmp_path / "results"), "--page", str(target)])
    page.main()
    text = target.read_text()
    assert row_of(text, "gpu-policy-450m") == [
        "gpu-policy-450m", "a GPU", "32", "0123456+changes", "`python benchmarks/policy.py`",
    ]  # fmt: skip
    assert "## What is left to the floor, and why" in text
    page.main()
    assert target.read_text() == text


def test_two_commits_are_compared(page):
    sides = {
        "before": {
            "commit": "a" * 40,
            "decisions": 50,
            "rollout_s": 20.0,
            "update_s": 30.0,
            "iteration_s": 50.0,
        },
        "after": {
            "commit": "b" * 40,
            "decisions": 50,
            "rollout_s": 8.0,
            "update_s": 12.0,
            "iteration_s": 20.0,
        },
    }
    blocks = page.blocks(
        {"cpu-against-aaaaaaa": MACHINE | sides | {"ratio": 2.5, "same_episodes": True, "after_flags": ""}}
    )
    assert row_of(blocks["cpu-before"], "aaaaaaa")[6:] == ["50.00 -> 20.00", "2.5x", "yes"]
    assert row_of(blocks["aims"], "chess-tiny on a CPU: times as fast as before the fast path")[2:4] == [
        "2.5",
        "yes",
    ]
