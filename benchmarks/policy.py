"""Speed of SmolVLA: a chunk of actions and a PPO minibatch, LeRobot's own code and flowrl's in turn.

    python benchmarks/policy.py --json policy.json                             # 450 M parameters, random weights: a GPU
    python benchmarks/policy.py --policy models/chess-tiny --batches 2 4       # any policy folder; a CPU too
    python benchmarks/policy.py --batches 16 1 --velocity split tf32 --compile off on

Both run on the same observations and noise, alternating, and the medians are compared. The observations are random
pictures; no simulator is needed. The floor is the larger of two times: counted operations over the rate of a large matrix
product, and the fewest bytes over the rate of a large copy, both measured in the same run. On a GPU times are those of
device events; on a CPU those of the clock. `first_s` is what the first call took, compilation and capture included.
`difference_deg` is the largest difference between the actions of both; `lerobot_batch_deg` that between LeRobot's own, when it
gets the same rows in batches of another size: kernels round by batch size. `lerobot_to_float32_deg` and `to_float32_deg` tell
which is nearer to the truth: how far LeRobot's actions and flowrl's are from LeRobot's with the VLM's weights in float32. A size
named in `flowrl.policy.tiny.SIZES` is built here, with the VLM in bfloat16 as the published one. Not a test.
"""

import argparse
import copy
import itertools
import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from clock import Clock, Work
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import DynamicCache

from flowrl.flow.likelihood import rescore_flat
from flowrl.flow.sampler import episode_noise, sample_chain
from flowrl.graphs import GraphCache
from flowrl.policy.loading import load_policy
from flowrl.policy.noise import NoiseModel
from flowrl.policy.smolvla import SmolVLAFlowPolicy
from flowrl.policy.tiny import SIZES, build_smolvla, save_policy_folder
from flowrl.precision import matrix_products
from flowrl.prefix import Prefix
from flowrl.record import describe_machine

TASK = "Pick up the white chess piece."
FULL_PADDED_DIM = 32  # of the published SmolVLA
SPREAD = 20.0  # of the joints of a policy that is built here [deg]
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description="Speed of SmolVLA in LeRobot's code and in flowrl's.")
    parser.add_argument("--policy", default="450m", help="a policy folder, or a size: " + ", ".join(SIZES))
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 10, 16, 32, 64])
    parser.add_argument("--minibatch", type=int, default=16, help="decisions in the PPO minibatch")
    parser.add_argument(
        "--velocity", nargs="+", default=["auto"], help="ways of flowrl: auto, exact, fused, ..."
    )
    parser.add_argument(
        "--compile", nargs="+", default=["auto"], help="each way with these: auto, on, off (torch.compile)"
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=400.0, help="what is not begun by then is left out")
    parser.add_argument("--json", type=Path, help="write all numbers here")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    cuda = torch.cuda.is_available() and options.device != "cpu"
    device = torch.device("cpu" if not cuda else "cuda" if options.device == "auto" else options.device)
    bench = Benchmark(open_policy(options.policy, device), options.seconds)
    results: dict[str, Any] = {
        **describe_machine(device),
        "policy": options.policy,
        "dtypes": bench.policy.dtypes,
        "parameters": sum(p.numel() for p in bench.policy.module.parameters()),
        "ceilings": bench.clock.ceilings,
        "chunks": [],
        "updates": [],
    }

    def keep(kind: str, rows: Sequence[Row]) -> None:
        """Written at once: a run that is cut off leaves what it has measured."""
        results[kind] += rows
        if rows:
            print(f"measured: {', '.join(f'{row["what"]} {row["batch"]}' for row in rows)}", flush=True)
        if options.json:
            options.json.write_text(json.dumps(results, indent=2) + "\n")

    try:
        for mode, compiles in itertools.product(options.velocity, options.compile):
            bench.policy.choose_velocity(mode, compiles)
            for batch in options.batches:
                keep("chunks", bench.chunk(batch))
            keep("updates", bench.update(options.minibatch))
    except TimeoutError as error:
        results["left_out"] = str(error)
        keep("chunks", [])
    report(results)


def open_policy(name: str, device: torch.device) -> SmolVLAFlowPolicy:
    """A policy folder, or a policy of a named size with random weights, its VLM in bfloat16."""
    if name not in SIZES:
        policy = load_policy(name, device=device)
    else:
        rng = np.random.default_rng(0)
        joints = {"mean": SPREAD * rng.normal(size=6), "std": np.full(6, SPREAD)}
        with tempfile.TemporaryDirectory() as folder:
            module = build_smolvla(Path(folder) / "vlm", size=name, padded_dim=FULL_PADDED_DIM)
            module.model.vlm_with_expert.vlm.to(torch.bfloat16)
            save_policy_folder(folder, module, {"observation.state": joints, "action": joints})
            del module
            policy = load_policy(folder, device=device)
    assert isinstance(policy, SmolVLAFlowPolicy)
    return policy


class Benchmark:
    """One policy, the ceilings of its machine, and the time that is left."""

    def __init__(self, policy: SmolVLAFlowPolicy, seconds: float) -> None:
        self.policy, self.device = policy, policy.device
        self.clock = Clock(self.device, seconds)
        self.noise = NoiseModel(policy.spec, sigma_start=0.2, sigma_end=0.05, basis="dct", num_modes=6)
        self.noise.to(self.device)
        self.vlm_dtype = policy.dtypes["vlm"]

    def chunk(self, batch: int) -> list[Row]:
        """A chunk for `batch` environments: its two parts, and all from pictures to actions."""
        policy, noise = self.policy, self.noise
        observation, tasks = self._observation(batch), [TASK] * batch
        x_0, eps = self._draw(batch)
        start = time.perf_counter()
        prefix = policy.encode(observation, tasks)
        sample_chain(policy, prefix, x_0).actions.cpu()
        first = time.perf_counter() - start
        mode = self._mode()

        def lerobot_encode() -> Prefix:
            return self._as("exact", lambda: policy.encode(observation, tasks))

        def ours() -> Tensor:
            chain = sample_chain(policy, policy.encode(observation, tasks), x_0)
            return policy.unnormalize(chain.actions[..., : policy.spec.action_dim])

        def lerobot() -> Tensor:
            return policy.predict_action_chunk(observation, tasks, x_0)

        degrees = self._differences(ours(), lerobot(), observation, x_0)
        encode_flops = self._count(lambda: policy.encode(observation, tasks))
        chain_flops = self._count(lambda: sample_chain(policy, prefix, x_0))
        steps = policy.spec.num_denoising_steps
        vlm_bytes, expert_bytes = self._bytes(".vlm.") + prefix.num_bytes, self._bytes("lm_expert")
        floors = {
            "prefix": self.clock.floor(encode_flops, vlm_bytes, self.vlm_dtype),
            "denoising": self.clock.floor(
                chain_flops, steps * (expert_bytes + prefix.num_bytes), self._expert_products()
            ),
        }
        floors["chunk"] = floors["prefix"] + floors["denoising"]
        parts = {
            "prefix": (lerobot_encode, lambda: policy.encode(observation, tasks)),
            "denoising": (
                lambda: self._lerobot_chain(prefix, x_0),
                lambda: sample_chain(policy, prefix, x_0),
            ),
            "chunk": (lerobot, ours),
        }
        rows = []
        for name, pair in parts.items():
            times, memory = self.clock.alternate(dict(zip(("lerobot", "flowrl"), pair)))
            row = {"what": name, "batch": batch, "mode": mode, **_compared(times), "peak_mb": memory}
            rows.append(row | {"floor_ms": floors[name]})
        rows[-1] |= {**degrees, "first_s": first}
        noisy, memory = self.clock.alternate(
            {"flowrl": lambda: sample_chain(policy, prefix, x_0, noise, eps)}
        )
        rows.append({"what": "denoising with noise", "batch": batch, "mode": mode, **_compared(noisy)})
        rows[-1] |= {"peak_mb": memory, "floor_ms": floors["denoising"]}
        return rows

    def minibatch(self, minibatch: int) -> dict[str, Work]:
        """Forward and backward of a PPO minibatch, all denoising steps in one batch, in each way; gradients are in `.grad`."""
        policy, noise = self.policy, self.noise
        observation, tasks = self._observation(minibatch), [TASK] * minibatch
        prefix = policy.encode(observation, tasks)
        x_0, eps = self._draw(minibatch)
        chain = sample_chain(policy, prefix, x_0, noise, eps)
        old = chain.log_prob
        assert old is not None
        generator = torch.Generator().manual_seed(0)
        advantage = torch.randn(minibatch, 1, 1, 1, generator=generator).to(self.device)
        weights = list(policy.trainable_parameters().values())

        def step(encoded: Callable[[], Prefix], score: Callable[[Prefix], Tensor], precision: Any) -> None:
            for weight in weights:
                weight.grad = None
            with matrix_products(precision):
                ((score(encoded()) - old).exp() * advantage).mean().backward()

        names, axes = list(prefix.tensors), prefix.token_axes
        graphs = GraphCache("the update", self.device, [*weights, *noise.buffers()])

        def replayed(precision: Any) -> None:
            """As `PPO` does with a whole minibatch."""

            def function(states: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
                stored = Prefix(dict(zip(names, tensors)), axes)
                with torch.enable_grad(), matrix_products(precision):
                    new = rescore_flat(policy, stored, states, noise)
                    return torch.autograd.grad(((new - old).exp() * advantage).mean(), weights)

            inputs = [chain.states, *prefix.tensors.values()]
            use = self.device.type == "cuda" and policy.graphs is not None
            found = graphs.run(precision, function, inputs) if use else function(*inputs)
            for weight, gradient in zip(weights, found, strict=True):
                weight.grad = gradient

        def eager(stored: Prefix) -> Tensor:
            return self._lerobot_log_prob(stored, chain.states)

        def encode_again() -> Prefix:
            return self._as("exact", lambda: policy.encode(observation, tasks))

        ways: dict[str, Work] = {
            "lerobot": lambda: step(encode_again, eager, "float32"),
            "LeRobot, stored prefix": lambda: step(lambda: prefix, eager, "float32"),
            "flowrl": lambda: replayed("float32"),
            "flowrl, TF32": lambda: replayed("tf32"),
        }
        if self.device.type == "cpu":
            del ways["flowrl, TF32"]
        return ways

    def update(self, minibatch: int) -> list[Row]:
        """Times and gradients of a minibatch in each way."""
        ways, weights = self.minibatch(minibatch), list(self.policy.trainable_parameters().values())
        gradients, first = {}, {}
        for name, work in ways.items():
            start = time.perf_counter()
            work()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            first[name] = time.perf_counter() - start
            found = [weight.grad.flatten() for weight in weights if weight.grad is not None]
            gradients[name] = torch.cat(found)
        reference = gradients["LeRobot, stored prefix"].double()
        cosines = {
            name: float(torch.cosine_similarity(g.double(), reference, dim=0))
            for name, g in gradients.items()
        }
        del gradients, reference
        with matrix_products("float32"):
            flops = self._count(ways["flowrl"])
        floors = {
            "flowrl": self.clock.floor(
                flops, 0.0, "tf32" if self.policy.velocity_mode == "tf32" else "float32"
            ),
            "flowrl, TF32": self.clock.floor(flops, 0.0, "tf32"),
        }
        rows = []
        times, memory = self.clock.alternate(ways)
        for name, value in times.items():
            row = {"what": f"minibatch, {name}", "batch": minibatch, "mode": self._mode()}
            row |= {"ms": value, "ratio": times["lerobot"] / value, "cosine": cosines[name]}
            rows.append(row | {"floor_ms": floors.get(name), "first_s": first[name], "peak_mb": memory})
        return rows

    @torch.no_grad()
    def _lerobot_chain(self, prefix: Prefix, x_0: Tensor) -> Tensor:
        """LeRobot's denoising loop: `euler_integrate` with its own step."""
        cache, x_t = _cache(prefix), x_0
        for step in range(steps := self.policy.spec.num_denoising_steps):
            time_ = torch.tensor(1.0 - step / steps, dtype=torch.float32, device=self.device).expand(len(x_0))
            x_t = x_t - self._denoise(prefix, cache, x_t, time_) / steps
        return x_t

    def _lerobot_log_prob(self, prefix: Prefix, states: Tensor) -> Tensor:
        """Log-probabilities from LeRobot's step on all denoising steps in one batch."""
        steps = self.policy.spec.num_denoising_steps
        x_t, many = states[:, :-1], prefix.repeat_interleave(steps)
        time_ = (1.0 - torch.arange(steps, device=self.device) / steps).repeat(len(prefix))
        v_t = self._denoise(many, _cache(many), x_t.flatten(0, 1), time_).view_as(x_t)
        return self.noise.log_prob(states[:, 1:], self.noise.mean(x_t, v_t, -1 / steps))

    def _denoise(self, prefix: Prefix, cache: DynamicCache, x_t: Tensor, time_: Tensor) -> Tensor:
        return self.policy.module.model.denoise_step(
            prefix_pad_masks=prefix.tensors["pad_mask"], past_key_values=cache, x_t=x_t, timestep=time_
        )

    def _observation(self, batch: int) -> dict[str, Any]:
        rng = np.random.default_rng(batch)
        config = self.policy.module.config
        side = config.resize_imgs_with_padding[0]
        names = [name.removeprefix("observation.images.") for name in config.image_features]
        return {
            "pixels": {name: rng.integers(0, 256, (batch, side, side, 3), dtype=np.uint8) for name in names},
            "agent_pos": (SPREAD * rng.normal(size=(batch, 6))).astype(np.float32),
        }

    def _draw(self, count: int) -> tuple[Tensor, Tensor]:
        """Starts of chains and their noise."""
        spec, size = self.policy.spec, self.noise.num_elements
        drawn = [episode_noise(number, 0, spec, size) for number in range(count)]
        starts, noise = [x_0 for x_0, _ in drawn], [eps for _, eps in drawn if eps is not None]
        return torch.stack(starts).to(self.device), torch.stack(noise).to(self.device)

    def _as(self, mode: str, work: Callable[[], Prefix]) -> Prefix:
        """Runs in another way of the velocity; the graphs of the present one stay."""
        policy = self.policy
        before, policy.velocity_mode = policy.velocity_mode, mode  # type: ignore[assignment]
        try:
            return work()
        finally:
            policy.velocity_mode = before

    def _count(self, work: Work) -> float:
        """Floating-point operations of the matrix products, convolutions and attention, without graphs."""
        policy = self.policy
        graphs, encoders, mode = policy.graphs, policy._encoders, policy.velocity_mode
        policy.graphs = policy._encoders = None
        policy.velocity_mode = "fused" if mode == "split" else mode  # three bfloat16 products count as one
        compiles = policy._compiler.enabled
        policy._compiler.enabled = False  # operations are counted one by one
        try:
            with FlopCounterMode(display=False) as counter:
                work()
        finally:
            policy.graphs, policy._encoders, policy.velocity_mode = graphs, encoders, mode
            policy._compiler.enabled = compiles
        return float(counter.get_total_flops())

    def _differences(
        self, ours: Tensor, lerobot: Tensor, observation: Mapping[str, Any], x_0: Tensor
    ) -> dict[str, float]:
        """The largest differences of the actions (B, T, A) of both to each other, and to two references [deg]."""
        policy = self.policy
        with torch.no_grad():
            exact = copy.deepcopy(policy.module)
            exact.model.vlm_with_expert.vlm.float()
            batch = policy.prepare(observation, [TASK] * len(x_0))
            truth = policy.unnormalize(exact.predict_action_chunk(batch, noise=x_0))
        pairs = {
            "difference_deg": (ours, lerobot),
            "lerobot_batch_deg": (self._in_other_batches(observation, x_0), lerobot),
            "lerobot_to_float32_deg": (lerobot, truth),
            "to_float32_deg": (ours, truth),
        }
        return {name: (a - b).abs().max().item() for name, (a, b) in pairs.items()}

    def _in_other_batches(self, observation: Mapping[str, Any], x_0: Tensor) -> Tensor:
        """LeRobot's actions of the same rows in two halves; of a single row in a batch of two."""
        count = len(x_0)
        parts = [[0, 0]] if count == 1 else [range(count // 2), range(count // 2, count)]
        actions = []
        for part in map(list, parts):
            pixels = {name: image[part] for name, image in observation["pixels"].items()}
            rows = {"pixels": pixels, "agent_pos": observation["agent_pos"][part]}
            actions.append(self.policy.predict_action_chunk(rows, [TASK] * len(part), x_0[part]))
        return torch.cat(actions)[:count]

    def _mode(self) -> str:
        return self.policy.velocity_mode + (", compiled" if self.policy.compiled else "")

    def _expert_products(self) -> str:
        mode = self.policy.velocity_mode
        return mode if mode in ("split", "tf32") else "float32"

    def _bytes(self, part: str) -> float:
        named = self.policy.module.named_parameters()
        unread = ("embed_tokens", "lm_head")  # single rows of these are read, or none
        read = [p for n, p in named if part in n and not any(u in n for u in unread)]
        return float(sum(p.numel() * p.element_size() for p in read))


def _cache(prefix: Prefix) -> DynamicCache:
    cache = DynamicCache()
    for layer in range(prefix.tensors["keys"].shape[1]):
        cache.update(prefix.tensors["keys"][:, layer], prefix.tensors["values"][:, layer], layer)
    return cache


def _compared(times: Mapping[str, float]) -> Row:
    lerobot = times.get("lerobot")
    return {
        "lerobot_ms": lerobot,
        "ms": times["flowrl"],
        "ratio": None if lerobot is None else lerobot / times["flowrl"],
    }


def report(results: Mapping[str, Any]) -> None:
    """Tables; [ms], ratio = LeRobot's time over flowrl's."""
    ceilings = results["ceilings"]
    rates = ", ".join(f"{name} {value / 1e12:.2f} T/s" for name, value in ceilings.items())
    print(f"{results['policy']}, {results['parameters'] / 1e6:.1f} M parameters, {results['device_name']}")
    print(f"commit {results['commit']}; ceilings: {rates}")
    common = "what", "batch", "mode"
    _table(results["updates"], (*common, "ms", "ratio", "floor_ms", "cosine", "first_s", "peak_mb"))
    degrees = "difference_deg", "lerobot_batch_deg", "lerobot_to_float32_deg", "to_float32_deg"
    columns = *common, "lerobot_ms", "ms", "ratio", "floor_ms", *degrees, "first_s", "peak_mb"
    _table(results["chunks"], columns)
    if "left_out" in results:
        print(f"not complete: {results['left_out']}")


def _table(rows: Sequence[Row], columns: Sequence[str]) -> None:
    if not rows:
        return
    cells = [columns, *([_cell(row.get(column)) for column in columns] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    print()
    for line in cells:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths)))


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.6f}" if 0.99 < value < 1 else f"{value:.3g}" if value < 1000 else f"{value:.0f}"
    return str(value)


if __name__ == "__main__":
    main()
