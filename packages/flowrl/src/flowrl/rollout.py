"""Complete episodes from a vector environment, with the policy batched over the environments that are live.

A round is: reset environments that get a new scene, encode the live observations, sample a chunk for each, step.
Results do not depend on the number of environments: noise belongs to the episode and the decision, and a batch of one
is padded to two with a repeat, because other kernels (with other rounding) run at batch size one. Episodes are counted
by who started first, so short ones are not favoured.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from gymnasium.vector import VectorEnv
from torch import Tensor

from flowrl.errors import FlowRLError
from flowrl.flow.sampler import Chain, episode_noise, sample_chain
from flowrl.policy.interface import FlowPolicy
from flowrl.policy.noise import NoiseModel
from flowrl.prefix import Offload, Prefix, PrefixStore, join_rows
from flowrl.scenes import Scene
from flowrl.sub_environment import select_rows
from flowrl.vector_env import environment_errors, info_of


@dataclass
class Episode:
    """One complete episode.

    `rewards`, `num_executed` (targets of the chunk that ran before the episode ended) and `actions` (the chunk, float32
    (T, A), in the environment's units) have an entry per decision.
    `metrics` is the environment's `info["episode_metrics"]`; `final_features` (F,) are the critic's features of the last
    observation, kept for truncated episodes that are bootstrapped.
    """

    number: int
    scene: Scene
    task: str
    torch_seed: int
    reset_info: dict[str, Any]
    rewards: list[float] = field(default_factory=list)
    num_executed: list[int] = field(default_factory=list)
    actions: list[np.ndarray] = field(default_factory=list)
    terminated: bool = False
    truncated: bool = False
    metrics: dict[str, Any] = field(default_factory=dict)
    final_features: Tensor | None = None

    @property
    def return_(self) -> float:
        """Undiscounted sum of the rewards."""
        return float(sum(self.rewards))

    def record(self) -> dict[str, Any]:
        """What is reported of the episode: scene, length, return, and the environment's own metrics."""
        own = {
            "index": self.scene.index,
            "seed": self.scene.seed,
            "decisions": len(self.rewards),
            "return": self.return_,
        }
        about: dict[str, Any] = {
            name: self.reset_info[name] for name in ("piece", "square", "task") if name in self.reset_info
        }
        return {**own, **about, **self.metrics}


@dataclass
class Decisions:
    """All decisions of a rollout, episode by episode and in the order they were made, on the policy's device (N decisions).

    So row n is the same decision whatever number of environments it was collected with, and so are the minibatches.

    prefix: N encoded observations, in the dtypes they were used in; they may wait in host memory (`HostPrefix`).
    states: (N, K+1, T, D). log_prob: (N, K, F, A), float32, as sampled. features: (N, F) float32, what the critic reads.
    num_executed: (N,) int64, targets that ran. episode, order: (N,) int64 on the CPU, the episode's number and the
    decision's place in it. rounds: int64 arrays on the CPU, the rows that were sampled in one batch, in its order.
    """

    prefix: Prefix
    states: Tensor
    log_prob: Tensor
    features: Tensor
    num_executed: Tensor
    episode: np.ndarray
    order: np.ndarray
    rounds: list[np.ndarray]

    def __len__(self) -> int:
        return len(self.states)


@dataclass
class Rollout:
    """Episodes in the order of their scenes, their decisions when they were kept, and where the time went.

    seconds: prepare (encode), sample (denoise; on a GPU the encoding's tail is in here too), env, reset.
    interrupted: the rollout was told to stop, and its episodes are not complete.
    """

    episodes: list[Episode]
    decisions: Decisions | None
    seconds: dict[str, float]
    rounds: int
    interrupted: bool = False

    def parts(self) -> dict[str, float]:
        """For the log: seconds of each part and the number of rounds."""
        return {**{name: round(value, 4) for name, value in self.seconds.items()}, "rounds": self.rounds}


def collect(
    policy: FlowPolicy,
    vec_env: VectorEnv,
    scenes: Sequence[Scene],
    noise: NoiseModel | None,
    *,
    early_stop: bool,
    keep_decisions: bool = False,
    keep_final_features: bool = False,
    default_task: str = "",
    offload: Offload = "auto",
    on_episode: Callable[[Episode], None] | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Rollout:
    """Runs one complete episode on every scene.

    Args:
        policy: The policy, in eval mode.
        vec_env: Vector environment with autoreset disabled; environments that are not needed are not reset.
        scenes: One per episode.
        noise: Exploration noise, or None for the deterministic policy.
        early_stop: Value of that reset option, where the environment knows it.
        keep_decisions: Keep prefixes and chains for an update (needs `noise`).
        keep_final_features: Keep the critic's features of a truncated episode's last observation.
        default_task: Instruction where the environment gives none.
        offload: Where the kept prefixes wait for the update, see `PrefixStore`.
        on_episode: Called at the end of each episode.
        should_stop: Asked before every round; True abandons the rollout.

    Raises:
        FlowRLError: failing environment, no instruction, or actions that are not finite.
    """
    fleet = _Fleet(vec_env, scenes, early_stop, default_task, policy.takes_instruction)
    kept: list[tuple[Chain, Tensor, list[tuple[int, int]]]] = []
    store = PrefixStore(offload, policy.device)
    seconds = dict.fromkeys(("prepare", "sample", "env", "reset"), 0.0)
    rounds = 0
    while True:
        if should_stop():
            return Rollout(fleet.episodes, None, seconds, rounds, interrupted=True)
        clock = time.perf_counter()
        fleet.reset_free()
        seconds["reset"] += time.perf_counter() - clock
        live = fleet.live()
        if not live:
            break

        clock = time.perf_counter()
        rows = pad_to_two(sorted(live))
        episodes = [live[row] for row in rows]
        prefix = policy.encode(select_rows(fleet.observation, np.array(rows)), [e.task for e in episodes])
        seconds["prepare"] += time.perf_counter() - clock

        clock = time.perf_counter()
        chain = _sample(policy, prefix, episodes, noise)
        actions = policy.unnormalize(chain.actions[..., : policy.spec.action_dim]).float().cpu().numpy()
        _check_actions(actions, episodes)
        if keep_decisions:
            where = [(live[row].number, len(live[row].rewards)) for row in sorted(live)]
            prefix, chain, features = _without_padding(policy, prefix, chain, len(where))
            store.add(prefix)
            kept.append((chain, features, where))
        seconds["sample"] += time.perf_counter() - clock

        clock = time.perf_counter()
        finished = fleet.step(dict(zip(sorted(live), actions)))  # of a padded pair the row that is kept
        seconds["env"] += time.perf_counter() - clock
        if keep_final_features:
            _add_final_features(policy, fleet, finished)
        if on_episode is not None:
            for episode in finished.values():
                on_episode(episode)
        rounds += 1
    return Rollout(fleet.episodes, _join(kept, store, fleet.episodes) if kept else None, seconds, rounds)


def pad_to_two(rows: list[int]) -> list[int]:
    """A batch of one becomes two equal rows: batch size one runs other kernels, with other rounding."""
    return rows * 2 if len(rows) == 1 else rows


class _Fleet:
    """Deals scenes to environments, and keeps their episodes and last observations."""

    def __init__(
        self,
        vec_env: VectorEnv,
        scenes: Sequence[Scene],
        early_stop: bool,
        default_task: str,
        takes_instruction: bool,
    ) -> None:
        self.vec_env = vec_env
        self.options = tuple(vec_env.metadata.get("reset_options", ()))
        self.waiting = list(enumerate(scenes))[::-1]
        self.early_stop = early_stop
        self.default_task, self.takes_instruction = default_task, takes_instruction
        self.episodes: list[Episode] = []
        self.current: dict[int, Episode] = {}  # environment -> the episode that it runs
        self.observation: Any = None
        shape = vec_env.single_action_space.shape
        self.actions = np.zeros((vec_env.num_envs, *(shape or ())), dtype=np.float32)

    def live(self) -> dict[int, Episode]:
        return dict(self.current)

    def reset_free(self) -> None:
        """Starts the next scenes on the environments that are free."""
        free = [env for env in range(self.vec_env.num_envs) if env not in self.current]
        started = {env: self.waiting.pop() for env in free[: len(self.waiting)]}
        if not started:
            return
        mask = np.zeros(self.vec_env.num_envs, dtype=np.bool_)
        mask[list(started)] = True
        seeds: list[int | None] = [None] * self.vec_env.num_envs
        options: dict[str, Any] = {"reset_mask": mask}
        if "early_stop" in self.options:
            options["early_stop"] = self.early_stop
        if "index" in self.options:
            options["index"] = np.zeros(self.vec_env.num_envs, dtype=np.int64)
        for env, (_, scene) in started.items():
            seeds[env] = scene.seed if "index" in self.options else scene.derived_seed
            if "index" in self.options:
                options["index"][env] = scene.index
        with environment_errors("resetting the environments"):
            self.observation, infos = self.vec_env.reset(seed=seeds, options=options)
        for env, (number, scene) in started.items():
            info = info_of(infos, env)
            task = info.get("task") or self.default_task
            if not task and self.takes_instruction:
                raise FlowRLError(
                    'the environment gives no instruction in info["task"]; give one with --task'
                )
            torch_seed = int(info.get("torch_seed", scene.torch_seed))
            episode = Episode(number, scene, task, torch_seed, reset_info=info)
            self.current[env] = episode
            self.episodes.append(episode)

    def step(self, actions: Mapping[int, np.ndarray]) -> dict[int, Episode]:
        """Steps the live environments; returns those whose episode has ended."""
        for env, action in actions.items():
            self.actions[env] = action
        with environment_errors("stepping the environments"):
            self.observation, rewards, terminated, truncated, infos = self.vec_env.step(self.actions)
        finished = {}
        for env, episode in self.live().items():
            info = info_of(infos, env)
            episode.actions.append(self.actions[env].copy())
            episode.rewards.append(float(rewards[env]))
            episode.num_executed.append(int(info.get("num_executed_frames", self.actions.shape[1])))
            if terminated[env] or truncated[env]:
                episode.terminated, episode.truncated = bool(terminated[env]), bool(truncated[env])
                episode.metrics = dict(info.get("episode_metrics", {}))
                if "is_success" in info:
                    episode.metrics.setdefault("success", bool(info["is_success"]))
                finished[env] = self.current.pop(env)
        return finished


def _sample(
    policy: FlowPolicy, prefix: Prefix, episodes: Sequence[Episode], noise: NoiseModel | None
) -> Chain:
    num_elements = noise.num_elements if noise is not None else None
    drawn = [episode_noise(e.torch_seed, len(e.rewards), policy.spec, num_elements) for e in episodes]
    x_0 = torch.stack([start for start, _ in drawn]).to(policy.device)
    if noise is None:
        return sample_chain(policy, prefix, x_0)
    eps = torch.stack([noises for _, noises in drawn if noises is not None]).to(policy.device)
    return sample_chain(policy, prefix, x_0, noise, eps)


def _check_actions(actions: np.ndarray, episodes: Sequence[Episode]) -> None:
    bad = ~np.isfinite(actions).reshape(len(actions), -1).all(axis=1)
    if bad.any():
        scene = episodes[int(np.argmax(bad))].scene
        raise FlowRLError(
            f"the policy's actions are not finite in scene {scene.seed}:{scene.index}; its weights or normalization are broken"
        )


def _without_padding(
    policy: FlowPolicy, prefix: Prefix, chain: Chain, count: int
) -> tuple[Prefix, Chain, Tensor]:
    features = policy.prefix_features(prefix).float()
    if count < len(prefix):
        assert chain.log_prob is not None
        prefix, features = prefix[:count], features[:count]
        chain = Chain(chain.states[:count], chain.log_prob[:count])
    return prefix, chain, features


def _add_final_features(policy: FlowPolicy, fleet: _Fleet, finished: Mapping[int, Episode]) -> None:
    """Encodes the last observations of truncated episodes; without autoreset the step returned them."""
    truncated = [env for env, episode in finished.items() if episode.truncated and not episode.terminated]
    if not truncated:
        return
    rows = pad_to_two(sorted(truncated))
    prefix = policy.encode(
        select_rows(fleet.observation, np.array(rows)), [finished[row].task for row in rows]
    )
    for row, features in zip(rows, policy.prefix_features(prefix).float()):
        finished[row].final_features = features


def _join(
    kept: list[tuple[Chain, Tensor, list[tuple[int, int]]]], store: PrefixStore, episodes: Sequence[Episode]
) -> Decisions:
    """The rounds' batches as one; the pieces are freed tensor by tensor, so the peak is little above the result."""
    where = np.array([place for *_, places in kept for place in places])
    sampled = np.lexsort((where[:, 1], where[:, 0]))  # row -> when it was sampled
    where = where[sampled]
    rounds = np.split(np.argsort(sampled), np.cumsum([len(places) for *_, places in kept])[:-1])
    device = kept[0][1].device
    rows = [torch.as_tensor(part, device=device) for part in rounds]
    states = join_rows([chain.states for chain, _, _ in kept], rows)
    log_prob = join_rows([chain.log_prob for chain, _, _ in kept if chain.log_prob is not None], rows)
    features = join_rows([features for _, features, _ in kept], rows)
    kept.clear()
    prefix = store.join(rows)
    num_executed = [episodes[number].num_executed[order] for number, order in where]
    return Decisions(
        prefix=prefix,
        states=states,
        log_prob=log_prob,
        features=features,
        num_executed=torch.tensor(num_executed, device=device),
        episode=where[:, 0],
        order=where[:, 1],
        rounds=rounds,
    )
