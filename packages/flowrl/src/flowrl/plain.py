"""Evaluation without flowrl's own machinery: one environment in this process, and the sampler of the policy's library.

It shares with the rollout the scenes, the noise x_0 that each chunk starts from, and the padding of a batch of one to two
equal rows, because batch size one runs other kernels, with other rounding. So its episodes equal those of a rollout with
one environment on every device, and those of any number of environments where kernels of two and more rows round alike.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
import torch

from flowrl.errors import FlowRLError
from flowrl.flow.sampler import episode_noise
from flowrl.policy.interface import FlowPolicy
from flowrl.progress import Progress
from flowrl.rollout import Episode
from flowrl.scenes import Scene
from flowrl.vector_env import environment_errors


def evaluate_plain(
    policy: FlowPolicy, env: gymnasium.Env, scenes: Sequence[Scene], *, label: str, default_task: str = ""
) -> list[dict[str, Any]]:
    """One record per scene, in order, without exploration noise. Spoilt episodes run on (early_stop False).

    Raises:
        FlowRLError: failing environment, no instruction, or actions that are not finite.
    """
    with Progress(label, len(scenes), "episode") as progress:
        records = []
        for number, scene in enumerate(scenes):
            records.append(run_episode(policy, env, number, scene, default_task).record())
            progress.advance()
    return records


def run_episode(
    policy: FlowPolicy, env: gymnasium.Env, number: int, scene: Scene, default_task: str = ""
) -> Episode:
    """One complete episode on a scene; see `evaluate_plain`."""
    observation, info = reset_scene(env, scene)
    task = info.get("task") or default_task
    if not task and policy.takes_instruction:
        raise FlowRLError('the environment gives no instruction in info["task"]; give one with --task')
    torch_seed = int(info.get("torch_seed", scene.torch_seed))
    episode = Episode(number, scene, task, torch_seed, reset_info=_plain_values(info))
    while not (episode.terminated or episode.truncated):
        x_0, _ = episode_noise(torch_seed, len(episode.rewards), policy.spec)
        pair = stack_observations([observation, observation])
        chunk = policy.predict_action_chunk(pair, [task, task], torch.stack([x_0, x_0]))[0]
        action = chunk.float().cpu().numpy()
        if not np.isfinite(action).all():
            raise FlowRLError(
                f"the policy's actions are not finite in scene {scene.seed}:{scene.index}; "
                "its weights or normalization are broken"
            )
        with environment_errors("stepping the environment"):
            observation, reward, terminated, truncated, info = env.step(action)
        episode.rewards.append(float(reward))
        episode.num_executed.append(int(info.get("num_executed_frames", len(action))))
        episode.terminated, episode.truncated = bool(terminated), bool(truncated)
    episode.metrics = _plain_values(info.get("episode_metrics", {}))
    if "is_success" in info:
        episode.metrics.setdefault("success", bool(info["is_success"]))
    return episode


def reset_scene(env: gymnasium.Env, scene: Scene) -> tuple[dict[str, Any], dict[str, Any]]:
    """Observation and info of a scene's start; by a derived seed where the environment knows no index."""
    known = env.metadata.get("reset_options", ())
    options: dict[str, Any] = {"early_stop": False} if "early_stop" in known else {}
    seed = scene.derived_seed
    if "index" in known:
        options["index"], seed = scene.index, scene.seed
    with environment_errors("resetting the environment"):
        return env.reset(seed=seed, options=options)


def stack_observations(observations: Sequence[Any]) -> Any:
    """Equal trees of arrays as one tree of batches."""
    first = observations[0]
    if isinstance(first, Mapping):
        return {name: stack_observations([o[name] for o in observations]) for name in first}
    return np.stack([np.asarray(o) for o in observations])


def _plain_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """numpy's scalars as Python's own, NaN as None: as they come out of a vector environment."""
    plain = {}
    for name, value in values.items():
        item = value.item() if isinstance(value, np.generic) else value
        plain[name] = None if isinstance(item, float) and np.isnan(item) else item
    return plain
