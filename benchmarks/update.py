"""One PPO minibatch of a policy on a CPU, backpropagated whole and in parts: decisions a second and peak memory.

    python benchmarks/update.py                      # parts of 8, 16, 32, 64 and 256 of a minibatch of 256, 2 threads
    python benchmarks/update.py --parts 16 --threads 1

The observations are noise, so that no simulator is needed; the arithmetic is that of `flowrl-train` with the policy's
preset. Every size runs in a process of its own, since peak memory never falls.
"""

import argparse
import os
import resource
import subprocess
import sys
import time

MINIBATCH = 256
STATE_SPREAD = 10.0  # of the random joint positions [deg]


def main() -> None:
    parser = argparse.ArgumentParser(description="An update in parts of a minibatch.")
    parser.add_argument("--policy", default="models/chess-tiny")
    parser.add_argument("--parts", type=int, nargs="+", default=[8, 16, 32, 64, 256])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        measure(args.policy, args.parts[0], args.threads)
        return
    print(f"{'part':>5} {'decisions/s':>12} {'peak before [MB]':>17} {'peak after [MB]':>16}")
    for part in args.parts:
        command = [sys.executable, __file__, "--child", "--policy", args.policy, "--parts", str(part)]
        subprocess.run(
            [*command, "--threads", str(args.threads)], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )


def measure(path: str, part: int, threads: int) -> None:
    """Times one optimizer step and prints a row."""
    import numpy as np
    import torch

    import flowrl.ppo
    from flowrl.config import TrainConfig
    from flowrl.device import prepare_torch
    from flowrl.flow.sampler import episode_noise, sample_chain
    from flowrl.policy.critic import Critic
    from flowrl.policy.loading import load_policy
    from flowrl.policy.noise import NoiseModel
    from flowrl.rollout import Decisions

    prepare_torch("cpu", threads)
    policy = load_policy(path)
    noise = NoiseModel(policy.spec, sigma_start=0.2, sigma_end=0.05, basis="dct", num_modes=6)
    rng = np.random.default_rng(0)
    size = policy.module.config.resize_imgs_with_padding[0]
    cameras = [name.removeprefix("observation.images.") for name in policy.module.config.image_features]
    observation = {
        "pixels": {
            name: rng.integers(0, 255, (MINIBATCH, size, size, 3), dtype=np.uint8) for name in cameras
        },
        "agent_pos": (STATE_SPREAD * rng.normal(size=(MINIBATCH, 6))).astype(np.float32),
    }
    prefix = policy.encode(observation, ["Pick up the white chess piece."] * MINIBATCH)
    drawn = [episode_noise(number, 0, policy.spec, noise.num_elements) for number in range(MINIBATCH)]
    eps = torch.stack([noises for _, noises in drawn if noises is not None])
    chain = sample_chain(policy, prefix, torch.stack([start for start, _ in drawn]), noise, eps)
    assert chain.log_prob is not None
    features = policy.prefix_features(prefix)
    decisions = Decisions(
        prefix=prefix,
        states=chain.states,
        log_prob=chain.log_prob,
        features=features,
        num_executed=torch.full((MINIBATCH,), policy.spec.n_action_steps),
        episode=np.arange(MINIBATCH),
        order=np.zeros(MINIBATCH, dtype=np.int64),
        rounds=[
            np.arange(2)
        ],  # what is rescored before the update; little, so that the step is what is timed
    )
    flowrl.ppo.CPU_PART = part
    config = TrainConfig(minibatch=MINIBATCH, critic_warmup=0, target_kl=10.0, epochs=1)
    ppo = flowrl.ppo.PPO(policy, noise, Critic(features.shape[1]), config)
    before = peak_mb()
    start = time.perf_counter()
    ppo.update(decisions, rng.normal(size=MINIBATCH), rng.normal(size=MINIBATCH), iteration=1)
    seconds = time.perf_counter() - start
    print(f"{part:>5} {MINIBATCH / seconds:>12.1f} {before:>17.0f} {peak_mb():>16.0f}", flush=True)


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    main()
