"""Noise-free success on fixed scenes, during training and in an evaluation."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium
from gymnasium.vector import VectorEnv

from flowrl.episode import Episode
from flowrl.errors import FlowRLError
from flowrl.finite import check_rewards
from flowrl.metrics import SUCCESS_ONLY, LogMetrics, mean_interval, summarize_episodes, wilson_interval
from flowrl.policy.interface import FlowPolicy
from flowrl.policy.noise import NoiseModel
from flowrl.progress import Progress
from flowrl.rollout import Rollout, collect
from flowrl.scenes import Scene
from flowrl.vector_env import Environments


def validate(
    policy: FlowPolicy,
    vec_env: Environments,
    scenes: Sequence[Scene],
    *,
    label: str,
    default_task: str = "",
    noise: NoiseModel | None = None,
    on_episode: Callable[[Episode], None] = lambda _: None,
) -> list[dict[str, Any]]:
    """One record per scene, in order; without exploration noise unless it is given.

    Spoilt episodes run on (early_stop False): success here means what it means in an evaluation. `on_episode` is called
    with each episode at its end.
    """

    def finished(episode: Episode) -> None:
        on_episode(episode)
        progress.advance()

    with Progress(label, len(scenes), "episode") as progress:
        rollout = collect(
            policy,
            vec_env,
            scenes,
            noise,
            early_stop=False,
            default_task=default_task,
            on_episode=finished,
        )
    return episode_records(rollout)


def episode_records(rollout: Rollout) -> list[dict[str, Any]]:
    """The episodes' records in the order of their scenes.

    Raises:
        FlowRLError: a reward is not finite.
    """
    check_rewards(rollout.episodes)
    return [episode.record() for episode in rollout.episodes]


def log_metrics_of(env: VectorEnv | gymnasium.Env) -> LogMetrics:
    """What the environment wants reported; success alone when it does not say."""
    return env.metadata.get("log_metrics", SUCCESS_ONLY)


def summary(records: Sequence[dict[str, Any]], log_metrics: LogMetrics) -> dict[str, Any]:
    """`episodes`, `return`, and a number for each of the environment's metrics."""
    metrics = {"success": ("success", "mean"), "return": ("return", "mean"), **log_metrics}
    return {"episodes": len(records), **summarize_episodes(records, metrics)}


def reports_success(records: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the environment says if an episode has succeeded.

    Raises:
        FlowRLError: it does so in some episodes only.
    """
    reported = [record.get("success") is not None for record in records]
    if any(reported) and not all(reported):
        raise FlowRLError(
            'the environment reports success in some episodes only; info["is_success"] or info["episode_metrics"] '
            "must have it at every end, or never"
        )
    return all(reported)


def validation_bound(records: Sequence[dict[str, Any]]) -> float:
    """What `best` is chosen by: the lower end of the 95 % interval of the success rate.

    In an environment that reports no success that of the mean return; of a single episode the return itself.
    """
    if reports_success(records):
        return wilson_interval(sum(bool(record["success"]) for record in records), len(records))[0]
    returns = [r["return"] for r in records]
    interval = mean_interval(returns)
    return interval[0] if interval is not None else returns[0]
