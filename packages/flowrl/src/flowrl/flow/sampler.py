"""Denoising as a chain of Gaussian transitions. `likelihood.py` mirrors `integrate` line for line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from flowrl.flow.schedule import denoising_times
from flowrl.graphs import GraphCache
from flowrl.policy.interface import FlowPolicy, FlowSpec
from flowrl.policy.noise import NoiseModel
from flowrl.prefix import Prefix

_X_0_STREAM = 0
_FIRST_EXPLORATION_STREAM = 1


@dataclass(frozen=True)
class Chain:
    """All states of a batch of denoising chains.

    Attributes:
        states: (B, K+1, T, D) float32, from pure noise to the normalized action chunk.
        log_prob: (B, K, F, A) float32, log density of every transition per element; None without exploration noise.
    """

    states: Tensor
    log_prob: Tensor | None

    @property
    def actions(self) -> Tensor:
        """The last state, (B, T, D); its first A dimensions are the normalized actions."""
        return self.states[:, -1]

    def __getitem__(self, rows: slice) -> Chain:
        """Some of the chains."""
        return Chain(self.states[rows], None if self.log_prob is None else self.log_prob[rows])

    @staticmethod
    def concatenate(chains: Sequence[Chain]) -> Chain:
        """Batches of chains as one; all scored, or none."""
        if len(chains) == 1:
            return chains[0]
        log_probs = [chain.log_prob for chain in chains if chain.log_prob is not None]
        return Chain(
            torch.cat([chain.states for chain in chains]), torch.cat(log_probs) if log_probs else None
        )


@torch.no_grad()
def sample_chain(
    policy: FlowPolicy,
    prefix: Prefix,
    x_0: Tensor,
    noise: NoiseModel | None = None,
    eps: Tensor | None = None,
) -> Chain:
    """Integrates from noise to actions, with exploration noise or without.

    Without it the last state is LeRobot's own sample for the same x_0, bit for bit.

    Args:
        policy: The policy.
        prefix: B encoded observations, on the policy's device.
        x_0: (B, T, D) standard normal, the start of the chain.
        noise: Exploration noise, or None.
        eps: (B, K, F, A) standard normal; given exactly when `noise` is.

    Raises:
        ValueError: If a shape does not fit, or only one of `noise` and `eps` is given.
    """
    spec = policy.spec
    batch = len(prefix)
    _check_shape("x_0", x_0, (batch, spec.chunk_size, spec.padded_action_dim))
    if (noise is None) != (eps is None):
        raise ValueError("noise and eps must be given together")
    if noise is not None and eps is not None:
        _check_shape("eps", eps, (batch, spec.num_denoising_steps, noise.num_elements, spec.action_dim))

    if (rows := rows_as_sampled(policy, batch, x_0.device)) is not None:
        prefix, x_0, eps = prefix[rows], x_0[rows], None if eps is None else eps[rows]
    chain = (
        integrate(policy, prefix, x_0, noise, eps)
        if policy.graphs is None
        else _replay(policy, policy.graphs, prefix, x_0, noise, eps)
    )
    return chain[:batch]


def _replay(
    policy: FlowPolicy,
    graphs: GraphCache,
    prefix: Prefix,
    x_0: Tensor,
    noise: NoiseModel | None,
    eps: Tensor | None,
) -> Chain:
    """`integrate` as a CUDA graph."""
    names, token_axes = list(prefix.tensors), prefix.token_axes

    def function(x_0: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        encoded = Prefix(dict(zip(names, others)), token_axes)
        chain = integrate(policy, encoded, x_0, noise, None if noise is None else others[-1])
        return (chain.states,) if chain.log_prob is None else (chain.states, chain.log_prob)

    inputs = [x_0, *prefix.tensors.values()] + ([] if eps is None else [eps])
    own = () if noise is None else (*noise.parameters(), *noise.buffers())
    # A captured function keeps its noise alive, so that no other gets this number.
    outputs = graphs.run((id(noise), policy.velocity_mode, policy.compiled, *names), function, inputs, own)
    return Chain(outputs[0], outputs[1] if noise is not None else None)


def integrate(
    policy: FlowPolicy, prefix: Prefix, x_0: Tensor, noise: NoiseModel | None, eps: Tensor | None
) -> Chain:
    """`sample_chain` on a batch as it is, without waiting for the device."""
    dt, times = denoising_times(policy.spec.num_denoising_steps)
    sigma = None if noise is None else noise.sigma_for(policy, prefix)
    velocity = policy.velocity_field(prefix)
    x_t = x_0
    states, log_probs = [x_t], []
    for step, time in enumerate(times):
        v_t = velocity(x_t, time_tensor(time, x_t))
        if noise is None or eps is None:
            x_t = x_t + dt * v_t
        else:
            mean = noise.mean(x_t, v_t, dt, step)
            x_t = noise.perturb(mean, step, eps[:, step], sigma)
            log_probs.append(noise.log_prob(x_t, mean, step, sigma))
        states.append(x_t)
    return Chain(torch.stack(states, dim=1), torch.stack(log_probs, dim=1) if log_probs else None)


def rows_as_sampled(policy: FlowPolicy, count: int, device: torch.device) -> Tensor | None:
    """Which rows make `count` a batch as large as the policy samples it, the last one repeated; None: they are one."""
    size = policy.sampling_batch(count)
    return None if size == count else torch.arange(size, device=device).clamp_(max=count - 1)


def time_tensor(time: float, x_t: Tensor) -> Tensor:
    """One time for all rows, (B,) float32. Filled on the device: a copy from the host cannot be a part of a CUDA graph."""
    return torch.full((len(x_t),), time, dtype=torch.float32, device=x_t.device)


def episode_noise(
    torch_seed: int, decision: int, spec: FlowSpec, num_elements: int | None = None, stream: int = 0
) -> tuple[Tensor, Tensor | None]:
    """The noise of one decision: a pure function of its arguments, on the CPU.

    It belongs to the episode and the decision, not to the batch or the worker, so an episode can be repeated in any
    composition. The start of the chain has a stream of its own: it is the same with and without exploration noise.

    Args:
        torch_seed: Seed of the episode, >= 0 (the environment's `info["torch_seed"]`).
        decision: Number of the decision in its episode, from 0.
        spec: Sizes of the policy.
        num_elements: F of the noise model; None without exploration noise.
        stream: Which exploration noise, >= 0; another number gives other noise for the same x_0.

    Returns:
        x_0 (T, D) float32, and eps (K, F, A) float32 or None.
    """
    x_0 = torch.randn(
        spec.chunk_size, spec.padded_action_dim, generator=_generator(torch_seed, decision, _X_0_STREAM)
    )
    if num_elements is None:
        return x_0, None
    generator = _generator(torch_seed, decision, _FIRST_EXPLORATION_STREAM + stream)
    return x_0, torch.randn(spec.num_denoising_steps, num_elements, spec.action_dim, generator=generator)


def _generator(*key: int) -> torch.Generator:
    seed = int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0])
    return torch.Generator().manual_seed(seed >> 1)


def _check_shape(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected {shape}")
