"""The second check of `flowrl-check`: what each noise costs, and that it is the noise that was asked for."""

from collections.abc import Sequence

import torch

from flowrl.checks import MINIBATCH, Records, Row
from flowrl.config import TrainConfig
from flowrl.flow.sampler import sample_chain
from flowrl.flow.schedule import denoising_times
from flowrl.metrics import mean_interval, paired_difference, paired_mean_difference, wilson_interval
from flowrl.policy.interface import FlowPolicy
from flowrl.policy.noise import NoiseModel
from flowrl.rollout import Decisions
from flowrl.validate import reports_success

SIGMA_TOLERANCE = 0.01
"""Relative; the noise's size is known exactly from its standard normals, up to the rounding of small noise."""


def noise_cost(what: str, none: Records, noisy: Records, sigma_error: float | None) -> Row:
    """Success with a noise against none on the same scenes, returns where no success is reported.

    Fails only if the noise was not applied.

    Args:
        what: The noise.
        none, noisy: Records of the episodes; episodes with noise must run differently.
        sigma_error: Largest relative error of the noise's size, see `noise_size_error`; None without noise.
    """
    measured, difference = _success_cost(none, noisy) if reports_success(none) else _return_cost(none, noisy)
    row: Row = {"noise": what, **measured}
    if sigma_error is None:
        return {**row, "minus none": "", "episodes changed": "", "size error": "", "passed": None}
    changed = sum(dict(x) != dict(y) for x, y in zip(none, noisy))
    applied = changed > 0 and sigma_error <= SIGMA_TOLERANCE
    return {
        **row,
        "minus none": difference,
        "episodes changed": f"{changed}/{len(none)}",
        "size error": f"{sigma_error:.1e}",
        "passed": applied,
    }


def _success_cost(none: Records, noisy: Records) -> tuple[Row, str]:
    a, b = ([bool(record["success"]) for record in records] for records in (none, noisy))
    row = {"success": f"{sum(b)}/{len(b)}", "interval": _percent(*wilson_interval(sum(b), len(b)))}
    difference = paired_difference(a, b)
    return row, f"{100 * difference.paired_difference:+.1f} points ({_percent(*difference.ci95)})"


def _return_cost(none: Records, noisy: Records) -> tuple[Row, str]:
    a, b = ([float(record["return"]) for record in records] for records in (none, noisy))
    row = {"return": f"{sum(b) / len(b):.4g}", "interval": _interval(mean_interval(b))}
    difference, interval = paired_mean_difference(a, b)
    return row, f"{difference:+.4g} ({_interval(interval)})"


@torch.no_grad()
def noise_size_error(
    policy: FlowPolicy, decisions: Decisions, noise: NoiseModel, asked: Sequence[float]
) -> float:
    """Largest relative error of the noise's size over denoising steps and chains, on stored prefixes.

    The size of x_{k+1} - (x_k + dt v), less the drift of the flow's SDE where that is the noise, is compared with that of
    the standard normals behind it times the size asked for; the basis is orthonormal, so it leaves sizes alone.

    Args:
        policy, decisions: Chains are sampled anew on the decisions' prefixes.
        noise: Whose noise is measured.
        asked: The K sizes that it should have, see `asked_sizes`.
    """
    spec, count = policy.spec, min(len(decisions), MINIBATCH)
    generator = torch.Generator().manual_seed(0)
    shape = (count, spec.num_denoising_steps, noise.num_elements, spec.action_dim)
    eps = torch.randn(shape, generator=generator).to(decisions.states.device)
    prefix = decisions.prefix[:count]
    states = sample_chain(policy, prefix, decisions.states[:count, 0], noise, eps).states
    dt, times = denoising_times(spec.num_denoising_steps)
    worst = 0.0
    for step, time in enumerate(times):
        x_t = states[:, step].contiguous()
        v_t = policy.velocity(x_t, torch.full((count,), time, device=x_t.device), prefix)
        x_t, v_t = x_t.double(), v_t.double()
        mean = x_t + dt * v_t
        if noise.kind == "flow-sde":
            pulled, rows = x_t + (1 - time) * v_t, noise.basis_rows.double()
            pulled = pulled if noise.basis == "white" else rows.T @ (rows @ pulled)
            mean = mean - asked[step] ** 2 / (2 * time) * pulled
        delta = (states[:, step + 1].double() - mean)[..., : spec.action_dim]
        size = delta.square().sum(dim=(1, 2)).sqrt()
        expected = asked[step] * eps[:, step].double().square().sum(dim=(1, 2)).sqrt()
        worst = max(worst, float((size / expected - 1).abs().max()))
    return worst


def asked_sizes(config: TrainConfig, num_denoising_steps: int) -> list[float]:
    """The K noise sizes that the flags ask for at the start of a run, computed apart from the noise model."""
    count = num_denoising_steps
    if config.noise_kind == "flow-sde":
        left = [(1 - step / count) / (max(1, step) / count) for step in range(count)]  # t / (1 - t)
        return [config.flow_sde_level * (ratio / count) ** 0.5 for ratio in left]
    start, end = config.sigma_start, config.sigma_end
    return [start * (end / start) ** (step / (count - 1)) for step in range(count)] if count > 1 else [end]


def _interval(interval: tuple[float, float] | None) -> str:
    return f"{interval[0]:.4g} to {interval[1]:.4g}" if interval is not None else "unknown"


def _percent(low: float, high: float) -> str:
    return f"{100 * low:.1f} to {100 * high:.1f}"
