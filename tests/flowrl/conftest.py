"""A very small random SmolVLA, built once, and observations for it."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from small_smolvla import SMALL, statistics

from flowrl.policy.smolvla import SmolVLAFlowPolicy
from flowrl.policy.tiny import build_smolvla, save_policy_folder

TASK = "Pick up the white chess piece."


@pytest.fixture(scope="session")
def base_folder(tmp_path_factory) -> Path:
    """A policy folder with a preset; tests must not change it."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("policy") / "base"
    policy = build_smolvla(folder / "vlm", size=SMALL, seed=1)
    save_policy_folder(folder, policy, statistics())
    (folder / "preset.json").write_text('{"lr": 1e-5}')
    return folder


@pytest.fixture
def folder_copy(base_folder, tmp_path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(base_folder, tmp_path / "copy"))


@pytest.fixture(scope="session")
def policy(base_folder) -> SmolVLAFlowPolicy:
    """The loaded policy; tests must not change its weights."""
    return SmolVLAFlowPolicy.load(base_folder)


@pytest.fixture
def make_observation():
    """Random batched Gymnasium observations."""

    def make(batch: int, seed: int = 0, cameras: tuple[str, ...] = ("top", "wrist")) -> dict:
        rng = np.random.default_rng(seed)
        return {
            "pixels": {
                camera: rng.integers(0, 256, (batch, 48, 64, 3), dtype=np.uint8) for camera in cameras
            },
            "agent_pos": rng.normal(size=(batch, 6)).astype(np.float32) * 30,
        }

    return make


@pytest.fixture
def tasks():
    return lambda batch: [TASK] * batch
