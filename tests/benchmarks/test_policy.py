"""How far the actions of the benchmark of SmolVLA are from those of a float32 VLM."""

import importlib
from pathlib import Path

import pytest
import torch
from small_smolvla import SMALL, statistics

from flowrl.flow.sampler import sample_chain
from flowrl.policy.smolvla import SmolVLAFlowPolicy
from flowrl.policy.tiny import build_smolvla, save_policy_folder


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_differences_are_those_to_the_same_policy_with_a_float32_vlm(tmp_path, monkeypatch, dtype):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    benchmark = importlib.import_module("policy")
    module = build_smolvla(tmp_path / "vlm", size=SMALL, seed=2, num_denoising_steps=3)
    module.model.vlm_with_expert.vlm.to(dtype)
    save_policy_folder(tmp_path, module, statistics())
    policy, exact = SmolVLAFlowPolicy.load(tmp_path), SmolVLAFlowPolicy.load(tmp_path)
    exact.module.model.vlm_with_expert.vlm.float()
    bench = benchmark.Benchmark(policy, 60.0)
    observation, tasks, x_0 = bench._observation(2), [benchmark.TASK] * 2, torch.randn(2, 50, 6)
    lerobot, truth = (p.predict_action_chunk(observation, tasks, x_0) for p in (policy, exact))
    ours = policy.unnormalize(sample_chain(policy, policy.encode(observation, tasks), x_0).actions)
    found = bench._differences(ours + 0.5, lerobot, observation, x_0)
    distance = (lerobot - truth).abs().max().item()
    assert found["lerobot_to_float32_deg"] == distance and (distance > 1e-4) == (dtype == torch.bfloat16)
    assert found["difference_deg"] == pytest.approx(0.5, abs=1e-5)  # the exact way is LeRobot's bit for bit
    assert found["to_float32_deg"] == pytest.approx((lerobot + 0.5 - truth).abs().max().item(), abs=1e-5)
    assert found["lerobot_batch_deg"] < 0.5 and policy.dtypes["vlm"] == str(dtype).removeprefix("torch.")
