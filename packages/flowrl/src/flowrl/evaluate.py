"""Evaluation on fixed scenes: success and return with intervals, and the paired comparison of two policies."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gymnasium
import torch

from flowrl.action_ranges import describe_ranges, executed_targets, joint_ranges, warn_of_ranges
from flowrl.checkpoint import resolve_checkpoint
from flowrl.config import EvalConfig, check_config, parse_env_kwargs, parse_rename
from flowrl.device import prepare_torch
from flowrl.episode import Episode
from flowrl.errors import FlowRLError
from flowrl.exploration import load_noise
from flowrl.facts import EnvironmentFacts, describe_weights, other_rate, seen_scenes
from flowrl.metrics import (
    LogMetrics,
    mean_interval,
    paired_difference,
    paired_mean_difference,
    wilson_interval,
)
from flowrl.plain import evaluate_plain
from flowrl.policy.interface import FlowPolicy
from flowrl.policy.loading import load_policy
from flowrl.policy.noise import NoiseModel
from flowrl.progress import tell
from flowrl.record import describe_machine, write_json
from flowrl.scenes import Scene, fixed_scenes
from flowrl.sub_environment import make_environment
from flowrl.train import LoadPolicy
from flowrl.validate import reports_success, summary, validate
from flowrl.vector_env import (
    check_spaces,
    close_vector_env,
    environment_errors,
    find_spec,
    group_sizes,
    make_single_env,
    make_vector_envs,
    resolve_env_kwargs,
)
from flowrl.video import ACTIONS, VIDEOS, check_can_render, find_encoder, record_videos, save_actions

RESULTS, VERSUS = "eval_results.json", "versus.json"


def evaluate(config: EvalConfig, load: LoadPolicy = load_policy) -> Path:
    """Evaluates one policy, or two on the same scenes, and returns the folder of the results.

    Raises:
        FlowRLError: bad input, failing environment, or a folder with results of other settings.
    """
    check_config(config)
    if config.noise and not config.fast:
        raise FlowRLError(
            "--noise without --fast: the policy library's own sampler has no exploration noise; add --fast"
        )
    out = Path(config.out or Path("outputs/eval") / policy_name(config.policy))
    if not config.versus:
        evaluate_one(config, config.policy, out, load)
        return out
    names = policy_name(config.policy), policy_name(config.versus)
    if names[0] == names[1]:
        names = f"{names[0]}-1", f"{names[1]}-2"
    own = evaluate_one(config, config.policy, out / names[0], load)
    other = evaluate_one(config, config.versus, out / names[1], load)
    comparison = compare(own["episodes"], other["episodes"])
    write_json(out / VERSUS, {"policy": config.policy, "versus": config.versus, **comparison})
    tell(
        f"{config.policy} minus {config.versus}: {describe_comparison(comparison)}, {comparison['episodes']} scenes"
    )
    return out


def compare(own: Sequence[Mapping[str, Any]], other: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A policy minus another on the same scenes: returns, and where it is reported success with McNemar's p and counts."""
    returns = ([float(record["return"]) for record in records] for records in (other, own))
    difference, interval = paired_mean_difference(*returns)
    comparison = {"episodes": len(own), "return_difference": difference, "return_ci95": interval}
    if not reports_success([*own, *other]):
        return comparison
    success = paired_difference(
        *([bool(record["success"]) for record in records] for records in (other, own))
    )
    return {
        **comparison,
        "paired_difference": success.paired_difference,
        "ci95": success.ci95,
        "mcnemar_p": success.mcnemar_p,
        "both": success.both,
        "only_policy": success.only_second,
        "only_versus": success.only_first,
        "neither": success.neither,
    }


def describe_comparison(comparison: Mapping[str, Any]) -> str:
    """A comparison in words: success where it is reported, else returns."""
    if "paired_difference" in comparison:
        low, high = comparison["ci95"]
        return (
            f"{100 * comparison['paired_difference']:+.1f} points ({100 * low:+.1f} to {100 * high:+.1f}), "
            f"p {comparison['mcnemar_p']:.3g}"
        )
    return f"return {comparison['return_difference']:+.4g}{_interval_text(comparison['return_ci95'], '+.4g')}"


def evaluate_one(config: EvalConfig, path: str, out: Path, load: LoadPolicy) -> dict[str, Any]:
    """Evaluates one policy into `out`; finished results of the same settings are read instead."""
    device = prepare_torch(config.device, config.torch_threads)
    machine = describe_machine(device, config.env_id)
    settings = {
        "policy": path,
        "policy_sha256": _policy_hash(path),
        **{
            name: getattr(config, name)
            for name in ("env_id", "env_kwargs", "rename", "task", "episodes", "seed")
        },
        **{name: getattr(config, name) for name in ("seconds", "fast", "noise", "expert_fp32")},
        "device_type": device.type,
        "torch_threads": config.torch_threads,  # threads and, on a GPU, the batch size choose kernels
        "batch": largest_batch(config, device) if config.fast and device.type != "cpu" else None,
        "velocity": config.velocity
        if config.fast and (device.type, config.velocity) != ("cpu", "auto")
        else None,
        **({"compile": config.compile} if config.fast and config.compile != "auto" else {}),
        "versions": machine["versions"],
    }
    settings = json.loads(json.dumps(settings))
    scenes = fixed_scenes(config.seed, config.episodes)
    if (finished := _finished_results(out, settings)) is not None:
        tell(f"{out / RESULTS}: finished before, not repeated")
        _record_videos(config, out, finished, scenes)
        return finished

    if line := seen_scenes(path, config.seed):
        tell(line)
    policy = load(
        path,
        device=device,
        expert_dtype="float32" if config.expert_fp32 else "loaded",
        rename=parse_rename(config.rename),
    )
    policy.choose_velocity(config.velocity, config.compile)
    noise = load_noise(path, policy) if config.noise else None
    spec = find_spec(config.env_id)
    kwargs = resolve_env_kwargs(spec, parse_env_kwargs(config.env_kwargs), config.seconds, policy.spec)
    if config.video_episodes:  # before an evaluation that may take hours
        find_encoder()
        env = make_single_env(config.env_id, kwargs, policy.spec)
        env.close()
        check_can_render(env)
    episodes: list[Episode] = []
    if config.fast:
        records, facts = run_fast(
            policy,
            config.env_id,
            kwargs,
            scenes,
            config.workers,
            config.pipeline,
            label=path,
            default_task=config.task,
            noise=noise,
            on_episode=episodes.append,
        )
    else:
        records, facts = run_plain(
            policy,
            config.env_id,
            kwargs,
            scenes,
            label=path,
            default_task=config.task,
            on_episode=episodes.append,
        )
    ranges = joint_ranges(executed_targets(episodes), facts.low, facts.high)
    weights = describe_weights(path)
    results = {
        "settings": settings,
        "weights": weights,
        "environment": {"id": config.env_id, "kwargs": {**spec.kwargs, **kwargs}},
        "n_action_steps": policy.spec.n_action_steps,
        "chunk_size": policy.spec.chunk_size,
        "control_rate": facts.control_rate,
        **machine,
        "summary": summarize(records, facts.log_metrics),
        "action_ranges": ranges,
        "episodes": records,
    }
    save_actions(out / ACTIONS, episodes)
    write_json(out / RESULTS, results)
    numbers = results["summary"]
    tell(f"{path} ({weights}): {describe(numbers)}; {out / RESULTS}")
    remarks = describe_ranges(ranges), *warn_of_ranges(ranges), other_rate(path, facts.control_rate)
    for line in filter(None, remarks):
        tell(line)
    _record_videos(config, out, results, scenes)
    return results


def _record_videos(
    config: EvalConfig, out: Path, results: Mapping[str, Any], scenes: Sequence[Scene]
) -> None:
    """Videos of the first episodes, as far as they are missing."""
    if config.video_episodes:
        kwargs = results["environment"]["kwargs"]
        sizes = results["chunk_size"], results["n_action_steps"]

        def make_env(render_mode: str) -> gymnasium.Env:
            find_spec(config.env_id)
            with environment_errors(f"--env-id {config.env_id}: cannot be made"):
                return make_environment(config.env_id, {**kwargs, "render_mode": render_mode}, *sizes)

        first = scenes[: config.video_episodes]
        record_videos(out, make_env, first, results["episodes"], config.task)
        tell(f"{out / VIDEOS}: {len(first)} videos")


def run_fast(
    policy: FlowPolicy,
    env_id: str,
    env_kwargs: Mapping[str, Any],
    scenes: Sequence[Scene],
    workers: int,
    pipeline: int = 1,
    *,
    label: str,
    default_task: str = "",
    noise: NoiseModel | None = None,
    on_episode: Callable[[Episode], None] = lambda _: None,
) -> tuple[list[dict[str, Any]], EnvironmentFacts]:
    """One record per scene, batched over `workers` environments by the trainer's rollout, and what to report of them."""
    vec_envs = make_vector_envs(env_id, min(workers, len(scenes)), env_kwargs, policy, pipeline)
    failed = True
    try:
        check_spaces(vec_envs[0], policy.spec)
        records = validate(
            policy,
            vec_envs,
            scenes,
            label=label,
            default_task=default_task,
            noise=noise,
            on_episode=on_episode,
        )
        failed = False
    finally:
        close_vector_env(vec_envs, failed)
    return records, EnvironmentFacts.of(vec_envs[0])


def run_plain(
    policy: FlowPolicy,
    env_id: str,
    env_kwargs: Mapping[str, Any],
    scenes: Sequence[Scene],
    *,
    label: str,
    default_task: str = "",
    on_episode: Callable[[Episode], None] = lambda _: None,
) -> tuple[list[dict[str, Any]], EnvironmentFacts]:
    """The same by one environment and the sampler of the policy's library, see `plain`."""
    env = make_single_env(env_id, env_kwargs, policy.spec)
    try:
        check_spaces(env, policy.spec)
        records = evaluate_plain(
            policy, env, scenes, label=label, default_task=default_task, on_episode=on_episode
        )
    finally:
        env.close()
    return records, EnvironmentFacts.of(env)


def summarize(records: Sequence[Mapping[str, Any]], log_metrics: LogMetrics) -> dict[str, Any]:
    """Mean return and its interval, and where it is reported counts, rate and Wilson interval of success.

    For all episodes, and by each metric that the environment reports success by.

    Raises:
        FlowRLError: the environment reports success in some episodes only.
    """
    keys = {condition[0][0] for _, _, *condition in log_metrics.values() if condition}
    groups = {
        key: {
            str(value): _numbers([r for r in records if r.get(key) == value])
            for value in sorted({r[key] for r in records if r.get(key) is not None}, key=str)
        }
        for key in sorted(keys)
    }
    return {**summary([dict(r) for r in records], log_metrics), **_numbers(records), "by": groups}


def describe(numbers: Mapping[str, Any]) -> str:
    """A summary in words: success where it is reported, else the mean return."""
    if "successes" in numbers:
        low, high = numbers["ci95"]
        return f"{numbers['successes']}/{numbers['episodes']} = {numbers['success']:.1%} ({low:.1%} to {high:.1%})"
    interval = _interval_text(numbers["return_ci95"], ".4g")
    return f"return {numbers['return']:.4g}{interval}, {numbers['episodes']} episodes"


def largest_batch(config: EvalConfig, device: torch.device) -> int:
    """Observations that --fast encodes at once."""
    return group_sizes(min(config.workers, config.episodes), config.pipeline, device)[0]


def policy_name(path: str) -> str:
    """A folder name for a policy: its own, with the run's in front of names that every run has."""
    parts = Path(path).parts
    own = parts[-1] if parts else "policy"
    generic = own in ("best", "last") or own.startswith("iter_")
    return f"{parts[-2]}-{own}" if generic and len(parts) > 1 else own


def _numbers(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    returns = [float(record["return"]) for record in records]
    numbers = {
        "episodes": len(records),
        "return": sum(returns) / len(returns),
        "return_ci95": mean_interval(returns),
    }
    if not reports_success(records):
        return numbers
    successes = sum(bool(record["success"]) for record in records)
    return {
        **numbers,
        "successes": successes,
        "success": successes / len(records),
        "ci95": wilson_interval(successes, len(records)),
    }


def _interval_text(interval: tuple[float, float] | None, form: str) -> str:
    return f" ({interval[0]:{form}} to {interval[1]:{form}})" if interval is not None else ""


def _finished_results(out: Path, settings: Mapping[str, Any]) -> dict[str, Any] | None:
    path = out / RESULTS
    if not path.is_file():
        return None
    try:
        results = json.loads(path.read_text())
        finished = results["settings"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FlowRLError(
            f"{path}: no results of flowrl-eval ({error}); choose another --out or delete it"
        ) from error
    if finished != settings:
        different = sorted(name for name in settings if settings[name] != finished.get(name))
        raise FlowRLError(
            f"{path}: results with other {', '.join(different)}; choose another --out or delete it"
        )
    return results


def _policy_hash(path: str) -> str | None:
    """Of all files of a policy folder that its actions depend on; None for a hub id."""
    folder = resolve_checkpoint(path)
    files = [*folder.glob("*.json"), *folder.glob("*.safetensors"), *folder.glob("vlm/*.json")]
    digest = hashlib.sha256()
    for file in sorted(files):
        with file.open("rb") as content:
            digest.update(f"{file.relative_to(folder)} ".encode())
            digest.update(hashlib.file_digest(content, "sha256").digest())
    return digest.hexdigest() if files else None
