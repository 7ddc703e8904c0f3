"""benchmarks/gpu_kernels.py as far as it goes without a GPU."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_in_one_line():
    ended = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks/gpu_kernels.py")], capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 1
    assert ended.stderr.strip() == "error: kernels of a GPU are measured, and torch sees none"


def test_products_are_those_of_the_expert_at_both_sizes(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    kernels, policy = importlib.import_module("gpu_kernels"), importlib.import_module("policy")
    calls = []

    def one_call(work):
        work()
        calls.append(work)
        return 2.0

    monkeypatch.setattr(kernels, "graph_ms", one_call)
    monkeypatch.setattr(kernels, "BATCH", 2)
    bench = policy.Benchmark(policy.open_policy(str(ROOT / "models/chess-tiny"), torch.device("cpu")), 60.0)
    bench.clock.ceilings["tf32_flops"] = 1e12
    rows = kernels.products(bench)
    assert [row["rows"] for row in rows] == [100] * 4 + [1000] * 4 and len(calls) == 8
    down = rows[3]
    expert = bench.policy.module.model.vlm_with_expert.lm_expert.layers[0]
    # Ten products in 2 ms.
    assert down["us"] == pytest.approx(200.0)
    operations = 2 * 100 * expert.mlp.down_proj.weight.numel()
    assert down["of_a_large_product"] == pytest.approx(operations / 200e-6 / 1e12)
    assert next(row["shape"] for row in kernels.attention(bench)) == "2 x 5 x 150 x 184"
