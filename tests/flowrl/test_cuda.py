"""The same training on a GPU."""

import json
from dataclasses import replace

import pytest
import torch

from flowrl.config import TrainConfig
from flowrl.prefix import HostPrefix, Prefix, PrefixStore
from flowrl.record import TIME_FIELDS
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


def test_results_do_not_depend_on_where_the_decisions_wait(tmp_path):
    """In host memory, pinned, or on the GPU: the same log but for times."""
    logs = []
    for offload in ("gpu", "cpu"):
        config = TrainConfig(
            policy="none",
            env_id="toy_env:ToyReach-v0",
            out=str(tmp_path / offload),
            iterations=2,
            envs=3,
            episodes=8,
            val_episodes=4,
            lr=1e-3,
            minibatch=4,
            device="cuda",
            offload=offload,
        )
        out = train(config, lambda path, *, device, **_: load_toy(path, device))
        lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
        logs.append([{key: value for key, value in line.items() if key not in TIME_FIELDS} for line in lines])
    assert logs[0] == logs[1] and logs[0][2]["kl"] > 0


def test_rows_in_pinned_memory_come_to_the_device_bit_for_bit():
    prefix = Prefix(
        {"keys": torch.randn(6, 5, device="cuda").bfloat16(), "mask": torch.ones(6, 2, device="cuda") > 0}
    )
    store = PrefixStore("cpu", prefix.tensors["keys"].device)
    store.add(prefix[:4])
    store.add(prefix[4:])
    joined = store.join()
    assert isinstance(joined, HostPrefix) and all(tensor.is_pinned() for tensor in joined.tensors.values())
    for index in (torch.tensor([5, 0, 2], device="cuda"), slice(1, 3)):
        rows, expected = joined[index], prefix[index]
        for name, tensor in expected.tensors.items():
            assert rows.tensors[name].device == tensor.device and torch.equal(rows.tensors[name], tensor)
