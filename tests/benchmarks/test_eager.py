"""What flowrl is compared with is LeRobot's arithmetic: on a CPU it gives flowrl's exact results bit for bit."""

import argparse
import importlib
from pathlib import Path

import numpy as np
import pytest
import torch
from small_smolvla import SMALL, statistics

from flowrl.policy.smolvla import SmolVLAFlowPolicy
from flowrl.policy.tiny import build_smolvla, save_policy_folder
from flowrl.prefix import Rows
from flowrl.rollout import Decisions

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
TASKS = ["Pick up the pawn.", "Lift the knight.", "Go home."]


@pytest.fixture
def eager(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("eager")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("eager") / "policy"
    torch.set_num_threads(1)
    module = build_smolvla(folder / "vlm", size=SMALL, seed=2, num_denoising_steps=3)
    save_policy_folder(folder, module, statistics())
    return folder


def observation(batch: int) -> dict:
    rng = np.random.default_rng(batch)
    pixels = {name: rng.integers(0, 256, (batch, 48, 64, 3), dtype=np.uint8) for name in ("top", "wrist")}
    return {"pixels": pixels, "agent_pos": rng.normal(size=(batch, 6)).astype(np.float32) * 30}


def test_eager_way_has_the_prefix_and_the_velocity_of_the_exact_one(eager, folder):
    theirs, ours = eager.EagerSmolVLA.load(folder), SmolVLAFlowPolicy.load(folder)
    seen = observation(3)
    prefix, reference = theirs.encode(seen, TASKS), ours.encode(seen, TASKS)
    for name, tensor in reference.tensors.items():
        assert torch.equal(prefix.tensors[name], tensor), name
    x_t = torch.randn(6, 50, 6, generator=torch.Generator().manual_seed(0))
    time = torch.tensor([1.0, 0.5, 1.0, 0.5, 0.25, 0.75])
    field, expected = theirs.velocity_field(prefix, 2), ours.velocity_field(reference, 2)
    for _ in range(2):  # the cache is as it was after a step
        torch.testing.assert_close(field(x_t, time), expected(x_t, time), rtol=0, atol=1e-6)


def test_stored_observations_are_encoded_to_the_rows_that_were_sampled(eager, folder):
    policy = eager.EagerSmolVLA.load(folder)
    batches = {3: [4, 0, 2], 2: [1, 3], 4: [5]}  # of the last, padded to four, one row counts
    encoded = {}
    for size, rows in batches.items():
        prefix = policy.encode(observation(size), [TASKS[i % 3] for i in range(size)])
        encoded |= {row: prefix[place] for place, row in enumerate(rows)}
    zeros = torch.zeros(6, 1)
    rounds = [np.array(rows) for rows in batches.values()]
    decisions = Decisions(encoded[0], zeros, zeros, zeros, zeros, np.arange(6), np.zeros(6), rounds)
    stored = eager.ObservationPrefix(policy, decisions)
    again = stored[Rows.of([5, 0, 3, 4], torch.device("cpu"))]
    for place, row in enumerate([5, 0, 3, 4]):
        for name, tensor in encoded[row].tensors.items():
            torch.testing.assert_close(again.tensors[name][place], tensor[0], rtol=1e-4, atol=1e-5)


def test_iteration_in_both_ways_decides_the_same_and_adds_up(eager, folder):
    iteration = importlib.import_module("iteration")
    rounds = importlib.import_module("iteration_rounds")
    flags = ["--policy", str(folder), "--env-id", "toy_camera_env:ToyArm-v0", "--minibatch", "4", "--lr", "0"]
    args = argparse.Namespace(envs=[2], episodes=[3], pipelines=[1], eager=True, repeats=1, limit=600.0)
    results = rounds.measure(iteration.config_of([*flags, "--device", "cpu", "--torch-threads", "1"]), args)
    (setting,) = results["settings"]
    best = setting["best"]
    counts = {name: result["decisions"] for name, result in best.items()}
    assert len(set(counts.values())) == 1 and counts["eager update"] >= 3, counts
    assert sum(setting["parts_s"].values()) == pytest.approx(setting["iteration_s"])
    both = best["eager collect"]["wall_s"] + best["eager update"]["wall_s"]
    assert setting["ratio"] == pytest.approx(both / setting["iteration_s"])
