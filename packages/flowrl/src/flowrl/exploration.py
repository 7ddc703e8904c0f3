"""The exploration noise of a run: made from its flags, loaded from a checkpoint, and what it costs in success."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from flowrl.checkpoint import load_training_state
from flowrl.config import TrainConfig
from flowrl.errors import FlowRLError
from flowrl.metrics import mean_interval, paired_difference, paired_mean_difference, wilson_interval
from flowrl.policy.interface import FlowPolicy
from flowrl.policy.noise import NoiseModel
from flowrl.randomness import random_state, restore_random_state
from flowrl.scenes import Scene
from flowrl.validate import reports_success, validate
from flowrl.vector_env import Environments

_ALWAYS = ("basis", "num_modes")
_BY_KIND = ("kind", "sigma_start", "sigma_end", "learn_sigma", "num_features", "flow_sde_level")
"""Settings that a noise may have; one without `kind` is geometric."""


def make_noise(config: TrainConfig, policy: FlowPolicy, num_features: int) -> NoiseModel:
    """The noise that the flags ask for, on the policy's device.

    Args:
        config: All flags.
        policy: The policy.
        num_features: Width of its prefix features.
    """
    return NoiseModel(
        policy.spec,
        kind=config.noise_kind,
        sigma_start=config.sigma_start,
        sigma_end=config.sigma_end,
        basis=config.noise_basis,
        num_modes=config.noise_modes if config.noise_basis == "dct" else None,
        learn_sigma=config.learn_sigma,
        flow_sde_level=config.flow_sde_level,
        num_features=num_features if config.noise_kind == "head" else None,
    ).to(policy.device)


def load_noise(path: str | Path, policy: FlowPolicy) -> NoiseModel:
    """The noise that a checkpoint was trained with, on the policy's device.

    Raises:
        FlowRLError: the folder is no checkpoint, or stores no noise.
    """
    state = load_training_state(path)
    if any(name not in state.sampler for name in _ALWAYS):
        raise FlowRLError(f"--noise: {path} stores no exploration noise; evaluate without it")
    settings = {name: state.sampler[name] for name in (*_ALWAYS, *_BY_KIND) if name in state.sampler}
    noise = NoiseModel(policy.spec, **settings)
    if noise.trained:
        state.restore_module("noise", noise)
    return noise.to(policy.device)


def measure_noise_tax(
    policy: FlowPolicy,
    vec_env: Environments,
    scenes: Sequence[Scene],
    noise: NoiseModel,
    default_task: str = "",
) -> dict[str, Any]:
    """Runs the scenes without the noise and with it; see `noise_tax`.

    The random generators are left as they were, so that a run does not depend on whether this is measured.

    Raises:
        FlowRLError: failing environment, or one that reports success in some episodes only.
    """
    before = random_state(policy.device)
    none, noisy = (
        validate(policy, vec_env, scenes, label=label, default_task=default_task, noise=which)
        for label, which in (("noise tax: without noise", None), ("noise tax: with noise", noise))
    )
    restore_random_state(before.tensors, before.values, policy.device)
    return noise_tax(none, noisy)


def noise_tax(none: Sequence[Mapping[str, Any]], noisy: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What the noise costs: success without it and with it on the same scenes, with 95 % intervals, for the record.

    Where the environment reports no success, the mean returns; of a single episode the intervals are None then.

    Args:
        none, noisy: Records of the episodes, in the same order of scenes.

    Raises:
        FlowRLError: success is reported in some episodes only.
    """
    if not reports_success([*none, *noisy]):
        returns = [[float(record["return"]) for record in records] for records in (none, noisy)]
        cost, interval = paired_mean_difference(*returns)
        return {
            "episodes": len(none),
            "return_without_noise": fmean(returns[0]),
            "ci95_without_noise": mean_interval(returns[0]),
            "return_with_noise": fmean(returns[1]),
            "ci95_with_noise": mean_interval(returns[1]),
            "paired_difference": cost,
            "paired_ci95": interval,
        }
    without, with_ = ([bool(record["success"]) for record in records] for records in (none, noisy))
    difference = paired_difference(without, with_)
    return {
        "episodes": len(without),
        "successes_without_noise": sum(without),
        "ci95_without_noise": wilson_interval(sum(without), len(without)),
        "successes_with_noise": sum(with_),
        "ci95_with_noise": wilson_interval(sum(with_), len(with_)),
        "paired_difference": difference.paired_difference,
        "paired_ci95": difference.ci95,
        "mcnemar_p": difference.mcnemar_p,
    }


def describe_noise_tax(tax: Mapping[str, Any]) -> str:
    """The tax in a line."""
    if "return_without_noise" in tax:
        without, with_, cost = (
            f"{tax[value]:{form}}"
            + ("" if tax[ci] is None else f" ({tax[ci][0]:{form}} to {tax[ci][1]:{form}})")
            for value, ci, form in (
                ("return_without_noise", "ci95_without_noise", ".4g"),
                ("return_with_noise", "ci95_with_noise", ".4g"),
                ("paired_difference", "paired_ci95", "+.4g"),
            )
        )
        return f"noise tax: return without noise {without}, with it {with_}, paired difference {cost}"

    def rate(kind: str) -> str:
        low, high = tax[f"ci95_{kind}_noise"]
        successes, episodes = tax[f"successes_{kind}_noise"], tax["episodes"]
        return f"{successes}/{episodes} = {successes / episodes:.1%} ({low:.1%} to {high:.1%})"

    low, high = tax["paired_ci95"]
    return (
        f"noise tax: success without noise {rate('without')}, with it {rate('with')}, "
        f"paired difference {tax['paired_difference']:+.1%} ({low:+.1%} to {high:+.1%})"
    )
