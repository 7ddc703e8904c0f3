"""How large the approximation is that padded action dimensions are carried, but neither noised nor scored.

    python benchmarks/padded_dimensions.py

A small SmolVLA with random weights, 6 of 32 action dimensions in use, and a change of its expert that moves log r as a PPO
update does. Given x_0 and the scored dimensions of a chain, the padded ones are a function of the policy, so the exact density
under the changed policy integrates them again; flowrl scores with those that were stored.
"""

import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from flowrl.flow.likelihood import rescore
from flowrl.flow.sampler import episode_noise, sample_chain
from flowrl.flow.schedule import denoising_times
from flowrl.policy.noise import NoiseModel
from flowrl.policy.smolvla import SmolVLAFlowPolicy
from flowrl.policy.tiny import SmolVLASize, build_smolvla, save_policy_folder
from flowrl.prefix import Prefix

SIZE = SmolVLASize(64, 2, 2, 1, 32, 128, 64, 2, 2, 128, image_size=64)
COUNT, PADDED = 16, 32


@torch.no_grad()
def exact_log_prob(policy: SmolVLAFlowPolicy, prefix: Prefix, states: Tensor, noise: NoiseModel) -> Tensor:
    """Density of the scored dimensions with the padded ones integrated by the policy, (B, K, F, A)."""
    num_scored = policy.spec.action_dim
    dt, times = denoising_times(policy.spec.num_denoising_steps)
    padded, log_probs = states[:, 0, :, num_scored:], []
    for step, time in enumerate(times):
        x_t = torch.cat([states[:, step, :, :num_scored], padded], dim=-1)
        v_t = policy.velocity(x_t, torch.full((len(states),), time), prefix)
        mean = noise.mean(x_t, v_t, dt, step)
        log_probs.append(noise.log_prob(states[:, step + 1], mean, step))
        padded = mean[..., num_scored:]
    return torch.stack(log_probs, dim=1)


def main() -> None:
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "policy"
        statistics = {
            name: {"mean": np.zeros(6), "std": np.full(6, 2.0)} for name in ("observation.state", "action")
        }
        save_policy_folder(
            path, build_smolvla(path / "vlm", size=SIZE, padded_dim=PADDED, seed=1), statistics
        )
        policy = SmolVLAFlowPolicy.load(path)
    cameras = {name: rng.integers(0, 256, (COUNT, 64, 64, 3), dtype=np.uint8) for name in ("top", "wrist")}
    observation = {"pixels": cameras, "agent_pos": rng.normal(size=(COUNT, 6)).astype(np.float32)}
    prefix = policy.encode(observation, ["Pick up the white chess piece."] * COUNT)
    weights = list(policy.trainable_parameters().values())
    start = [weight.detach().clone() for weight in weights]
    generator = torch.Generator().manual_seed(0)
    direction = [torch.randn(weight.shape, generator=generator).sign() for weight in weights]
    print(
        "| noise | step of each weight | KL an element | std of log r | rms error of log r | a decision's log r: std, rms error |"
    )
    print("|---|---|---|---|---|---|")
    for name, noise in {
        "white, .2 to .002": NoiseModel(policy.spec),
        "6 cosine modes, .2 to .05": NoiseModel(policy.spec, sigma_end=0.05, basis="dct", num_modes=6),
    }.items():
        drawn = [episode_noise(number, 0, policy.spec, noise.num_elements) for number in range(COUNT)]
        x_0, eps = (torch.stack(part) for part in zip(*drawn))
        states = sample_chain(policy, prefix, x_0, noise, eps).states
        with torch.no_grad():
            old = rescore(policy, prefix, states, noise)
            assert torch.allclose(old, exact_log_prob(policy, prefix, states, noise), atol=1e-3)
            for size in (3e-6, 3e-5, 3e-4):
                for weight, value, sign in zip(weights, start, direction):
                    weight.copy_(value + size * sign)
                ours = rescore(policy, prefix, states, noise) - old
                exact = exact_log_prob(policy, prefix, states, noise) - old
                error, kl = ours - exact, (ours.exp() - 1 - ours).mean()
                chunk, chunk_error = ours.sum((1, 2, 3)), error.sum((1, 2, 3))
                print(
                    f"| {name} | {size:g} | {float(kl):.1e} | {float(ours.std()):.2g} | {float(error.square().mean().sqrt()):.2g} "
                    f"| {float(chunk.std()):.2g}, {float(chunk_error.square().mean().sqrt()):.2g} |"
                )
                for weight, value in zip(weights, start):
                    weight.copy_(value)


if __name__ == "__main__":
    main()
