"""Evaluation without flowrl's own machinery: one environment in this process, and the sampler of the policy's library.

It shares with the rollout the scenes, the noise x_0 that each chunk starts from, and the padding of a batch of one to two
equal rows, because batch size one runs other kernels, with other rounding. So its episodes equal those of a rollout with
one environment on every device, and those of any number of environments where kernels of two and more rows round alike.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import torch

from flowrl.episode import Episode
from flowrl.errors import FlowRLError
from flowrl.finite import check_rewards
from flowrl.flow.sampler import episode_noise
from flowrl.policy.interface import FlowPolicy
from flowrl.progress import Progress
from flowrl.scenes import Scene
from flowrl.vector_env import environment_errors


def evaluate_plain(
    policy: FlowPolicy,
    env: gymnasium.Env,
    scenes: Sequence[Scene],
    *,
    label: str,
    default_task: str = "",
    on_episode: Callable[[Episode], None] = lambda _: None,
) -> list[dict[str, Any]]:
    """One record per scene, in order, without exploration noise. Spoilt episodes run on (early_stop False).

    `on_episode` is called with each episode at its end.

    Raises:
        FlowRLError: failing environment, no instruction, or actions or rewards that are not finite.
    """
    with Progress(label, len(scenes), "episode") as progress:
        records = []
        for number, scene in enumerate(scenes):
            episode = run_episode(policy, env, number, scene, default_task)
            check_rewards([episode])
            on_episode(episode)
            records.append(episode.record())
            progress.advance()
    return records


def run_episode(
    policy: FlowPolicy, env: gymnasium.Env, number: int, scene: Scene, default_task: str = ""
) -> Episode:
    """One complete episode of the policy on a scene; see `evaluate_plain`."""
    return play_episode(partial(predict_chunk, policy), env, number, scene, default_task)


def predict_chunk(policy: FlowPolicy, observation: Any, episode: Episode) -> np.ndarray:
    """The policy's chunk for the next decision of an episode, float32 (T, A), by the sampler of its library.

    Raises:
        FlowRLError: it is not finite, or the policy reads instructions and there is none.
    """
    if policy.takes_instruction and not episode.task:
        raise FlowRLError('the environment gives no instruction in info["task"]; give one with --task')
    scene = episode.scene
    x_0, _ = episode_noise(episode.torch_seed, len(episode.rewards), policy.spec)
    pair = stack_observations([observation, observation])
    chunk = policy.predict_action_chunk(pair, [episode.task, episode.task], torch.stack([x_0, x_0]))[0]
    action = chunk.float().cpu().numpy()
    if not np.isfinite(action).all():
        raise FlowRLError(
            f"the policy's actions are not finite in scene {scene.seed}:{scene.index}; "
            "its weights or normalization are broken"
        )
    return action


def play_episode(
    act: Callable[[Any, Episode], np.ndarray],
    env: gymnasium.Env,
    number: int,
    scene: Scene,
    default_task: str = "",
    on_step: Callable[[Episode], None] = lambda _: None,
) -> Episode:
    """One complete episode on a scene.

    Args:
        act: Gives the next chunk, float32 (T, A), from the observation and the episode so far.
        env: The environment, left at the episode's end.
        number: The episode's number.
        scene: Where it begins.
        default_task: Instruction where the environment gives none.
        on_step: Called after the reset and after every step, the last one included.

    Raises:
        FlowRLError: failing environment.
    """
    observation, info = reset_scene(env, scene)
    task = info.get("task") or default_task
    torch_seed = int(info.get("torch_seed", scene.torch_seed))
    episode = Episode(number, scene, task, torch_seed, reset_info=_plain_values(info))
    on_step(episode)
    while not (episode.terminated or episode.truncated):
        action = act(observation, episode)
        with environment_errors("stepping the environment"):
            observation, reward, terminated, truncated, info = env.step(action)
        episode.actions.append(action)
        episode.rewards.append(float(reward))
        episode.num_executed.append(int(info.get("num_executed_frames", len(action))))
        episode.terminated, episode.truncated = bool(terminated), bool(truncated)
        on_step(episode)
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
