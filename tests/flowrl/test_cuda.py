"""The same training on a GPU."""

import json
from dataclasses import replace

import pytest
import torch

from flowrl.config import TrainConfig
from flowrl.train import train
from toy import load_toy

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("change", [{}, {"noise_basis": "dct", "noise_modes": 2, "learn_sigma": True}])
def test_training_on_a_gpu_scores_exactly_and_learns_something(tmp_path, change):
    config = TrainConfig(
        policy="none",
        env_id="toy_env:ToyReach-v0",
        out=str(tmp_path / "run"),
        iterations=3,
        envs=3,
        episodes=8,
        val_episodes=4,
        lr=1e-3,
        target_kl=1.0,
        bootstrap_truncated=True,
        grad_cosine=True,
        critic_epochs=1,
        device="cuda",
    )
    out = train(replace(config, **change), lambda path, *, device, **_: load_toy(path, device))
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert [line["ratio_max_dev"] for line in lines] == [None, 0.0, 0.0, 0.0]
    assert lines[2]["kl"] > 0 and lines[2]["skipped"] == 0
