"""Where a GPU's time goes in SmolVLA's chunk and minibatch: kernels by name, and levers that were tried, each against what is in use.

    python benchmarks/gpu_kernels.py --json gpu_kernels.json                # 450 M parameters, random weights
    python benchmarks/gpu_kernels.py --only attention streams

`kernels`: sums over one call of the encoder, of the denoising and of a minibatch's gradients, each a CUDA graph, beside its time from end to
end: what is between the two is no kernel's. `products`: the expert's matrix products at the sizes of a batch of 16 and of a minibatch, in
TF32, as rates. `attention`: written out, and torch's fused kernel. `streams`: the denoising of a batch, and of its halves in two streams.
`gelu`: after its product, and in the product's kernel. `copies`: pictures to pinned memory, and from there to the device. Not a test.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from clock import Work
from policy import TASK, Benchmark, open_policy
from torch.nn import functional

from flowrl.flow.sampler import sample_chain
from flowrl.flow.schedule import denoising_times
from flowrl.policy.gelu_product import linear_gelu
from flowrl.precision import matrix_products
from flowrl.record import describe_machine

REPEATS = 20
TOP = 25
BATCH = 16


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--policy", default="450m", help="a policy folder, or a size")
    parser.add_argument("--velocity", default="tf32", help="fused, split or tf32")
    parser.add_argument("--only", nargs="+", choices=list(LEVERS), default=list(LEVERS))
    parser.add_argument("--json", type=Path, help="write all numbers here, after each part")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("error: kernels of a GPU are measured, and torch sees none")
    torch.backends.cudnn.allow_tf32 = False
    device = torch.device("cuda")
    bench = Benchmark(open_policy(options.policy, device), 600.0)
    bench.policy.choose_velocity(options.velocity, "auto")
    results: dict[str, Any] = {**describe_machine(device), **vars(options), "ceilings": bench.clock.ceilings}
    results["json"] = str(options.json)
    print(f"{options.policy}, {options.velocity}, {results['device_name']}, commit {results['commit']}")
    for name in options.only:
        start = time.perf_counter()
        results[name] = LEVERS[name](bench)
        print(f"\n{name} ({time.perf_counter() - start:.0f} s)", flush=True)
        for row in results[name]:
            print("  " + ", ".join(f"{key} {_short(value)}" for key, value in row.items()), flush=True)
        if options.json:
            options.json.write_text(json.dumps(results, indent=2) + "\n")


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def graph_ms(work: Work) -> float:
    """Median time of a CUDA graph of the work [ms]."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            work()
    torch.cuda.synchronize()
    graph, times = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph, stream=stream):
        work()
    for _ in range(REPEATS):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        first.record()
        graph.replay()
        last.record()
        torch.cuda.synchronize()
        times.append(first.elapsed_time(last))
    return float(np.median(times))


def kernels(bench: Benchmark) -> list[dict[str, Any]]:
    policy = bench.policy
    observation, tasks = bench._observation(BATCH), [TASK] * BATCH
    prefix, (x_0, _) = policy.encode(observation, tasks), bench._draw(BATCH)
    parts: dict[str, Work] = {
        "encoder": lambda: policy.encode(observation, tasks),
        "denoising": lambda: sample_chain(policy, prefix, x_0),
        "minibatch, TF32": bench.minibatch(BATCH)["flowrl, TF32"],
    }
    rows = []
    for name, work in parts.items():
        ms = bench.clock.alternate({"flowrl": work})[0]["flowrl"]
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            work()
            torch.cuda.synchronize()
        events = [e for e in profile.key_averages() if e.device_type == torch.autograd.DeviceType.CUDA]
        found = sorted(((e.self_device_time_total / 1e3, e.count, e.key) for e in events), reverse=True)
        total = sum(row[0] for row in found)
        rows.append({"part": name, "ms": ms, "kernels_ms": total, "count": sum(row[1] for row in found)})
        rows += [
            {"part": name, "kernels_ms": own, "count": n, "kernel": key[:100]} for own, n, key in found[:TOP]
        ]
    return rows


def products(bench: Benchmark) -> list[dict[str, Any]]:
    expert = bench.policy.module.model.vlm_with_expert.lm_expert.layers[0]
    layers = {
        "query": expert.self_attn.q_proj,
        "out": expert.self_attn.o_proj,
        "gate": expert.mlp.gate_proj,
        "down": expert.mlp.down_proj,
    }
    rows = []
    for tokens in (BATCH * 50, BATCH * 10 * 50):
        for name, layer in layers.items():
            width, inner = layer.weight.shape
            x, weight = torch.randn(tokens, inner, device=bench.device), layer.weight.detach()

            def work(x: torch.Tensor = x, weight: torch.Tensor = weight) -> None:
                with matrix_products("tf32"):
                    for _ in range(10):
                        functional.linear(x, weight)

            ms = graph_ms(work) / 10
            rate = 2 * tokens * width * inner / (1e-3 * ms)
            share = rate / bench.clock.ceilings["tf32_flops"]
            rows.append({"product": name, "rows": tokens, "us": 1e3 * ms, "of_a_large_product": share})
    return rows


def attention(bench: Benchmark) -> list[dict[str, Any]]:
    rows = []
    for batch, queries, keys in ((BATCH, 150, 184), (BATCH, 150, 240), (BATCH, 1500, 184)):
        q, k, v = (torch.randn(batch, 5, n, 64, device=bench.device) for n in (queries, keys, keys))
        bias = torch.zeros(batch, 1, queries, keys, device=bench.device)

        def written_out(q: Any = q, k: Any = k, v: Any = v, bias: Any = bias) -> torch.Tensor:
            with matrix_products("tf32"):
                scores = torch.add(bias, torch.matmul(q, k.transpose(-1, -2)), alpha=0.125)
                return torch.matmul(scores.softmax(-1), v)

        def fused(q: Any = q, k: Any = k, v: Any = v, bias: Any = bias) -> torch.Tensor:
            return functional.scaled_dot_product_attention(q, k, v, attn_mask=bias.expand(-1, 5, -1, -1))

        shape = f"{batch} x 5 x {queries} x {keys}"
        rows.append({"shape": shape, "written_out_ms": graph_ms(written_out), "fused_ms": graph_ms(fused)})
    return rows


@torch.no_grad()
def streams(bench: Benchmark) -> list[dict[str, Any]]:
    policy = bench.policy
    prefix, (x_0, _) = policy.encode(bench._observation(BATCH), [TASK] * BATCH), bench._draw(BATCH)
    dt, times = denoising_times(policy.spec.num_denoising_steps)

    def chain(rows: slice) -> None:
        velocity, x_t = policy.velocity_field(prefix[rows]), x_0[rows]
        for when in times:
            x_t = x_t + dt * velocity(x_t, torch.full((len(x_t),), when, device=bench.device))

    halves = slice(BATCH // 2), slice(BATCH // 2, BATCH)
    sides = [torch.cuda.Stream() for _ in halves]

    def side_by_side() -> None:
        current = torch.cuda.current_stream()
        for side, half in zip(sides, halves):
            side.wait_stream(current)
            with torch.cuda.stream(side):
                chain(half)
        for side in sides:  # after both have begun
            current.wait_stream(side)

    works: dict[str, Callable[[], None]] = {
        "whole": lambda: chain(slice(BATCH)),
        "half": lambda: chain(halves[0]),
        "halves in two streams": side_by_side,
    }
    return [{"denoising": name, "ms": graph_ms(work)} for name, work in works.items()]


@torch.no_grad()
def gelu(bench: Benchmark) -> list[dict[str, Any]]:
    shapes = (2 * BATCH * 1024, 768), (3072, 768), (3072,)
    x, weight, bias = (torch.randn(shape, device=bench.device).mul(0.1).bfloat16() for shape in shapes)
    works: dict[str, Work] = {
        "product alone": lambda: functional.linear(x, weight, bias),
        "gelu after it": lambda: functional.gelu(functional.linear(x, weight, bias), approximate="tanh"),
        "gelu in its kernel": lambda: linear_gelu(x, weight, bias),
    }
    return [{"way": name, "ms": graph_ms(work)} for name, work in works.items()]


def copies(bench: Benchmark) -> list[dict[str, Any]]:
    rows = []
    for side in (256, 512):
        image = torch.randint(0, 256, (BATCH, side, side, 3), dtype=torch.uint8)
        times: list[tuple[float, float]] = []
        for _ in range(REPEATS):
            start = time.perf_counter()
            staged = torch.empty(image.shape, dtype=image.dtype, pin_memory=True).copy_(image)
            middle = time.perf_counter()
            staged.to(bench.device)
            torch.cuda.synchronize()
            times.append((middle - start, time.perf_counter() - middle))
        staging, transfer = (1e3 * float(np.median(part)) for part in zip(*times))
        rows.append({"pictures": f"{BATCH} of {side}x{side}", "staging_ms": staging, "transfer_ms": transfer})
    return rows


LEVERS: dict[str, Callable[[Benchmark], list[dict[str, Any]]]] = {
    "kernels": kernels,
    "products": products,
    "attention": attention,
    "streams": streams,
    "gelu": gelu,
    "copies": copies,
}

if __name__ == "__main__":
    main()
