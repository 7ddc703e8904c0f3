"""CPU time of SmolVLA's parts in LeRobot's code and in flowrl's, alternating, in one thread.

    python benchmarks/denoising.py                     # models/chess-tiny, 10 observations, a minibatch of 16; bits are equal
    python benchmarks/denoising.py --velocity fused --compile on

The time is that of the processor, so that other programs on the machine disturb little. Results are compared first. `rate` is
that of the counted operations of flowrl's matrix products over all of its time, `of a product` its share of a large one's.
"""

import argparse
import os
import time
from collections.abc import Callable

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from eager import cache_of, denoise_step, lerobot_encode
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from flowrl.policy.loading import load_policy
from flowrl.policy.smolvla import SmolVLAFlowPolicy

TASK = "Pick up the white chess piece."


def main() -> None:
    parser = argparse.ArgumentParser(description="CPU time of SmolVLA in LeRobot's code and in flowrl's.")
    parser.add_argument("--policy", default="models/chess-tiny")
    parser.add_argument("--batch", type=int, default=10, help="observations that are sampled together")
    parser.add_argument("--minibatch", type=int, default=16, help="decisions of the update")
    parser.add_argument("--velocity", default="exact", help="flowrl's way: exact, fused, ...")
    parser.add_argument("--compile", default="auto", help="auto, on, off")
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    policy = load_policy(options.policy)
    assert isinstance(policy, SmolVLAFlowPolicy)
    policy.choose_velocity(options.velocity, options.compile)
    ceiling = product_rate()
    print(
        f"{'':>36} {'LeRobot ms':>10} {'flowrl ms':>10} {'ratio':>6} {'rate GF/s':>10} {'of a product':>13}  bits"
    )
    for name, ways in (
        (f"encode {options.batch}", encoding(policy, options.batch)),
        (f"denoise {options.batch}", denoising(policy, options.batch)),
        (f"update of {options.minibatch}, forward, backward", updating(policy, options.minibatch)),
    ):
        first, second = (way() for way in ways)
        times: list[list[float]] = [[], []]
        for _ in range(options.repeats):
            for way, values in zip(ways, times):
                values.append(1e3 * processor_s(way))
        theirs, ours = (float(np.median(values)) for values in times)
        bits = (
            "equal" if torch.equal(first, second) else f"differ by {float((first - second).abs().max()):.1e}"
        )
        rate = operations(ways[1], policy) / (1e-3 * ours)
        print(
            f"{name:>36} {theirs:>10.1f} {ours:>10.1f} {theirs / ours:>6.2f} {rate / 1e9:>10.0f} {rate / ceiling:>13.2f}  {bits}"
        )


def processor_s(way: Callable[[], object]) -> float:
    """Processor time of one call [s]."""
    start = time.process_time()
    way()
    return time.process_time() - start


def product_rate(side: int = 1024, repeats: int = 9) -> float:
    """Operations/s of a large matrix product."""
    a, b = torch.randn(side, side), torch.randn(side, side)
    return 2 * side**3 / float(np.median([processor_s(lambda: a @ b) for _ in range(repeats)]))


def operations(way: Callable[[], object], policy: SmolVLAFlowPolicy) -> float:
    """Of the matrix products and convolutions, counted one by one."""
    compiled, policy._compiler.enabled = policy._compiler.enabled, False
    try:
        with FlopCounterMode(display=False) as counter:
            way()
    finally:
        policy._compiler.enabled = compiled
    return float(counter.get_total_flops())


Way = Callable[[], Tensor]


def encoding(policy: SmolVLAFlowPolicy, batch: int) -> tuple[Way, Way]:
    """Keys of the prefix, from pictures."""
    observation, tasks = random_observation(policy, batch), [TASK] * batch

    def theirs() -> Tensor:
        return lerobot_encode(policy, observation, tasks).tensors["keys"]

    return theirs, lambda: policy.encode(observation, tasks).tensors["keys"]


def denoising(policy: SmolVLAFlowPolicy, batch: int) -> tuple[Way, Way]:
    """A chunk from a prefix, without noise."""
    prefix = policy.encode(random_observation(policy, batch), [TASK] * batch)
    spec = policy.spec
    x_0 = torch.randn(batch, spec.chunk_size, spec.padded_action_dim)
    dt = -1.0 / spec.num_denoising_steps

    def integrate(velocity: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        x_t = x_0
        for step in range(spec.num_denoising_steps):
            x_t = x_t + dt * velocity(x_t, torch.full((batch,), 1.0 + step * dt))
        return x_t

    @torch.no_grad()
    def theirs() -> Tensor:
        cache = cache_of(prefix)  # one for all steps, as LeRobot has it
        return integrate(lambda x_t, when: denoise_step(policy, prefix, cache, x_t, when))

    @torch.no_grad()
    def ours() -> Tensor:
        return integrate(policy.velocity_field(prefix))

    return theirs, ours


def updating(policy: SmolVLAFlowPolicy, minibatch: int) -> tuple[Way, Way]:
    """Velocities of all denoising steps from stored prefixes, and their gradients."""
    prefix, spec = policy.encode(random_observation(policy, minibatch), [TASK] * minibatch), policy.spec
    steps = spec.num_denoising_steps
    x_t = torch.randn(minibatch * steps, spec.chunk_size, spec.padded_action_dim)
    when = (1.0 - torch.arange(steps) / steps).repeat(minibatch)
    weights = list(policy.trainable_parameters().values())

    def differentiate(v_t: Tensor) -> Tensor:
        torch.autograd.grad(v_t.square().mean(), weights)
        return v_t.detach()

    def theirs() -> Tensor:
        many = prefix.repeat_interleave(steps)
        return differentiate(denoise_step(policy, many, cache_of(many), x_t, when))

    return theirs, lambda: differentiate(policy.velocity_field(prefix, steps)(x_t, when))


def random_observation(policy: SmolVLAFlowPolicy, batch: int) -> dict[str, object]:
    rng = np.random.default_rng(0)
    config = policy.module.config
    side = config.resize_imgs_with_padding[0]
    names = [name.removeprefix("observation.images.") for name in config.image_features]
    return {
        "pixels": {name: rng.integers(0, 256, (batch, side, side, 3), dtype=np.uint8) for name in names},
        "agent_pos": (10 * rng.normal(size=(batch, 6))).astype(np.float32),
    }


if __name__ == "__main__":
    main()
