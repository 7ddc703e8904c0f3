"""Log density of stored chains. Mirrors `sampler.integrate` line for line."""

from __future__ import annotations

import torch
from torch import Tensor

from flowrl.flow.sampler import rows_as_sampled, time_tensor
from flowrl.flow.schedule import denoising_times
from flowrl.policy.interface import FlowPolicy
from flowrl.policy.noise import NoiseModel
from flowrl.prefix import Prefix


def rescore(policy: FlowPolicy, prefix: Prefix, states: Tensor, noise: NoiseModel) -> Tensor:
    """Scores chains step by step, in the kernels and shapes of the sampler.

    On the batch as it was sampled the result equals the sampler's bit for bit. In another composition of the batch
    the float32 ratio deviates by less than 1e-3 per element at the default schedule; on a CPU, batches of one run
    other kernels and deviate most.
    A compiled policy rounds otherwise where gradients are enabled: there it holds without them.

    Args:
        policy: The policy.
        prefix: B stored prefixes, on the policy's device.
        states: (B, K+1, T, D) stored chains.
        noise: The noise model they were sampled with (or its later state).

    Returns:
        (B, K, F, A) float32.
    """
    _check_states(policy, prefix, states)
    batch = len(prefix)
    if (rows := rows_as_sampled(policy, batch, states.device)) is not None:
        prefix, states = prefix[rows], states[rows]
    dt, times = denoising_times(policy.spec.num_denoising_steps)
    sigma = noise.sigma_for(policy, prefix)
    velocity = policy.velocity_field(prefix)
    log_probs = []
    for step, time in enumerate(times):
        x_t = states[:, step].contiguous()  # as in the sampler: a strided view takes another path on a GPU
        v_t = velocity(x_t, time_tensor(time, x_t))
        mean = noise.mean(x_t, v_t, dt, step)
        log_probs.append(noise.log_prob(states[:, step + 1], mean, step, sigma))
    return torch.stack(log_probs, dim=1)[:batch]


def rescore_flat(policy: FlowPolicy, prefix: Prefix, states: Tensor, noise: NoiseModel) -> Tensor:
    """Scores all K steps in one batch of B * K, as the update does; differentiable.

    Args and result: as in `rescore`.
    """
    _check_states(policy, prefix, states)
    num_steps = policy.spec.num_denoising_steps
    dt, times = denoising_times(num_steps)
    x_t = states[:, :-1]
    time = torch.cat([time_tensor(time, x_t) for time in times]).view(num_steps, -1).T.flatten()
    v_t = policy.velocity_field(prefix, num_steps)(x_t.flatten(0, 1), time).view_as(x_t)
    mean = noise.mean(x_t, v_t, dt)
    return noise.log_prob(states[:, 1:], mean, sigma=noise.sigma_for(policy, prefix))


def _check_states(policy: FlowPolicy, prefix: Prefix, states: Tensor) -> None:
    spec = policy.spec
    expected = (len(prefix), spec.num_denoising_steps + 1, spec.chunk_size, spec.padded_action_dim)
    if tuple(states.shape) != expected:
        raise ValueError(f"states have shape {tuple(states.shape)}, expected {expected}")
