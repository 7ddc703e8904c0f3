"""Evaluation on fixed scenes: success with its interval, and the paired comparison of two policies."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gymnasium

from flowrl.checkpoint import resolve_checkpoint
from flowrl.config import EvalConfig, check_config, parse_env_kwargs, parse_rename
from flowrl.errors import FlowRLError
from flowrl.exploration import load_noise
from flowrl.metrics import LogMetrics, paired_difference, wilson_interval
from flowrl.plain import evaluate_plain
from flowrl.policy.interface import FlowPolicy
from flowrl.policy.loading import load_policy
from flowrl.policy.noise import NoiseModel
from flowrl.progress import tell
from flowrl.record import describe_machine, write_json
from flowrl.rollout import Episode
from flowrl.scenes import Scene, fixed_scenes
from flowrl.sub_environment import make_environment
from flowrl.train import LoadPolicy, prepare_torch
from flowrl.validate import log_metrics_of, summary, validate
from flowrl.vector_env import (
    check_spaces,
    close_vector_env,
    environment_errors,
    find_spec,
    make_single_env,
    make_vector_env,
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
    comparison = paired_difference(_successes(other), _successes(own))
    write_json(
        out / VERSUS,
        {
            "policy": config.policy,
            "versus": config.versus,
            "episodes": len(own["episodes"]),
            "paired_difference": comparison.paired_difference,
            "ci95": comparison.ci95,
            "mcnemar_p": comparison.mcnemar_p,
            "both": comparison.both,
            "only_policy": comparison.only_second,
            "only_versus": comparison.only_first,
            "neither": comparison.neither,
        },
    )
    low, high = comparison.ci95
    tell(
        f"{config.policy} minus {config.versus}: {100 * comparison.paired_difference:+.1f} points "
        f"({100 * low:+.1f} to {100 * high:+.1f}), p {comparison.mcnemar_p:.3g}, {len(own['episodes'])} scenes"
    )
    return out


def evaluate_one(config: EvalConfig, path: str, out: Path, load: LoadPolicy) -> dict[str, Any]:
    """Evaluates one policy into `out`; finished results of the same settings are read instead."""
    device = prepare_torch(config.device, config.torch_threads)
    machine = describe_machine(device)
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
        "batch": min(config.workers, config.episodes) if config.fast and device.type != "cpu" else None,
        "versions": machine["versions"],
    }
    settings = json.loads(json.dumps(settings))
    scenes = fixed_scenes(config.seed, config.episodes)
    if (finished := _finished_results(out, settings)) is not None:
        tell(f"{out / RESULTS}: finished before, not repeated")
        _record_videos(config, out, finished, scenes)
        return finished

    policy = load(
        path,
        device=device,
        expert_dtype="float32" if config.expert_fp32 else "loaded",
        rename=parse_rename(config.rename),
    )
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
        records, log_metrics = run_fast(
            policy,
            config.env_id,
            kwargs,
            scenes,
            config.workers,
            label=path,
            default_task=config.task,
            noise=noise,
            on_episode=episodes.append,
        )
    else:
        records, log_metrics = run_plain(
            policy,
            config.env_id,
            kwargs,
            scenes,
            label=path,
            default_task=config.task,
            on_episode=episodes.append,
        )
    results = {
        "settings": settings,
        "environment": {"id": config.env_id, "kwargs": {**spec.kwargs, **kwargs}},
        "n_action_steps": policy.spec.n_action_steps,
        "chunk_size": policy.spec.chunk_size,
        **machine,
        "summary": summarize(records, log_metrics),
        "episodes": records,
    }
    save_actions(out / ACTIONS, episodes)
    write_json(out / RESULTS, results)
    numbers = results["summary"]
    tell(
        f"{path}: {numbers['successes']}/{numbers['episodes']} = {numbers['success']:.1%} "
        f"({numbers['ci95'][0]:.1%} to {numbers['ci95'][1]:.1%}); {out / RESULTS}"
    )
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
    *,
    label: str,
    default_task: str = "",
    noise: NoiseModel | None = None,
    on_episode: Callable[[Episode], None] = lambda _: None,
) -> tuple[list[dict[str, Any]], LogMetrics]:
    """One record per scene, batched over `workers` environments by the trainer's rollout, and what to report of them."""
    vec_env = make_vector_env(env_id, min(workers, len(scenes)), env_kwargs, policy.spec)
    failed = True
    try:
        check_spaces(vec_env, policy.spec)
        records = validate(
            policy,
            vec_env,
            scenes,
            label=label,
            default_task=default_task,
            noise=noise,
            on_episode=on_episode,
        )
        failed = False
    finally:
        close_vector_env(vec_env, failed)
    return records, log_metrics_of(vec_env)


def run_plain(
    policy: FlowPolicy,
    env_id: str,
    env_kwargs: Mapping[str, Any],
    scenes: Sequence[Scene],
    *,
    label: str,
    default_task: str = "",
    on_episode: Callable[[Episode], None] = lambda _: None,
) -> tuple[list[dict[str, Any]], LogMetrics]:
    """The same by one environment and the sampler of the policy's library, see `plain`."""
    env = make_single_env(env_id, env_kwargs, policy.spec)
    try:
        check_spaces(env, policy.spec)
        records = evaluate_plain(
            policy, env, scenes, label=label, default_task=default_task, on_episode=on_episode
        )
    finally:
        env.close()
    return records, log_metrics_of(env)


def summarize(records: Sequence[Mapping[str, Any]], log_metrics: LogMetrics) -> dict[str, Any]:
    """Counts, rate and Wilson interval of success, for all and by each metric that the environment reports it by.

    Raises:
        FlowRLError: the environment reports no success.
    """
    if any(record.get("success") is None for record in records):
        raise FlowRLError(
            'the environment reports no success in info["is_success"] or info["episode_metrics"]'
        )
    keys = {condition[0][0] for _, _, *condition in log_metrics.values() if condition}
    groups = {
        key: {
            str(value): _success([r for r in records if r.get(key) == value])
            for value in sorted({r[key] for r in records if r.get(key) is not None}, key=str)
        }
        for key in sorted(keys)
    }
    return {**summary([dict(r) for r in records], log_metrics), **_success(records), "by": groups}


def policy_name(path: str) -> str:
    """A folder name for a policy: its own, with the run's in front of names that every run has."""
    parts = Path(path).parts
    own = parts[-1] if parts else "policy"
    generic = own in ("best", "last") or own.startswith("iter_")
    return f"{parts[-2]}-{own}" if generic and len(parts) > 1 else own


def _success(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    successes = sum(bool(record["success"]) for record in records)
    interval = wilson_interval(successes, len(records))
    return {
        "episodes": len(records),
        "successes": successes,
        "success": successes / len(records),
        "ci95": interval,
    }


def _successes(results: Mapping[str, Any]) -> list[bool]:
    return [bool(record["success"]) for record in results["episodes"]]


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
