"""Times and noise sizes of the denoising steps, shared by the sampler, the likelihood and the noise model."""

from __future__ import annotations

import math


def denoising_times(num_denoising_steps: int) -> tuple[float, list[float]]:
    """Step size and times of LeRobot's Euler integration: dt = -1/K and [1 + k * dt for k in 0..K-1].

    Python floats on purpose: LeRobot rounds to float32 only when it makes the time tensor, and the chain has to be
    equal to its sampler bit for bit.

    Source: `lerobot.policies.common.flow_matching.euler_integrate`, LeRobot 0.6.1.
    """
    dt = -1.0 / num_denoising_steps
    return dt, [1.0 + step * dt for step in range(num_denoising_steps)]


def geometric_schedule(start: float, end: float, num_denoising_steps: int) -> list[float]:
    """K noise sizes from `start` at the first step to `end` at the last, in a constant ratio; both ends are exact.

    Raises:
        ValueError: If an end is not a positive finite number.
    """
    for name, value in (("start", start), ("end", end)):
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"the {name} of a noise schedule must be positive and finite, got {value}")
    if num_denoising_steps == 1:
        return [end]
    last = num_denoising_steps - 1
    inner = [start * (end / start) ** (step / last) for step in range(1, last)]
    return [start, *inner, end]


def flow_sde_schedule(level: float, num_denoising_steps: int) -> list[float]:
    """K noise sizes of the flow's SDE: sigma_k = s_k sqrt(1/K), s_k = level * sqrt(t_k / (1 - t_k)).

    At t = 1 the diffusion s is infinite; the first step takes 1 - t of the second, as the source's program does, so that its
    size is `level`. With K = 1 there is no second step, and 1 - t is 1.

    Source: Liu et al. 2025, "Flow-GRPO", eq. 9 and the text below it.
    """
    _, times = denoising_times(num_denoising_steps)
    ends = [1.0 - time for time in times]
    ends[0] = 1.0 / num_denoising_steps
    return [level * math.sqrt(time / end / num_denoising_steps) for time, end in zip(times, ends)]
