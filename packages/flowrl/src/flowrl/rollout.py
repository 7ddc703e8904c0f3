"""Complete episodes from vector environments, with the policy batched over the environments that are live.

A round of a group of environments is: reset those that get a new scene, encode the live observations, sample a chunk for
each, step. With several groups the others simulate meanwhile (`fleet`).
Results do not depend on the number of environments or groups: noise belongs to the episode and the decision, and a batch
of one is padded to two with a repeat, because other kernels (with other rounding) run at batch size one. Episodes are
counted by who started first, so short ones are not favoured.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from flowrl.episode import Episode
from flowrl.errors import FlowRLError
from flowrl.fleet import Fleet, Group
from flowrl.flow.sampler import Chain, episode_noise, sample_chain
from flowrl.policy.interface import FlowPolicy
from flowrl.policy.noise import NoiseModel
from flowrl.prefix import Offload, Prefix, PrefixStore, join_rows
from flowrl.scenes import Scene
from flowrl.sub_environment import select_rows
from flowrl.threads import CpuThreads
from flowrl.vector_env import Environments, group_list


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

    seconds: prepare (encode), sample (denoise; on a GPU the encoding's tail is in here too), env and reset (what was waited
    for the environments, and the messages to and from them); they do not overlap, and bookkeeping is in none.
    wall_s: from the start to the end [s]. rounds: batches that were sampled.
    interrupted: the rollout was told to stop, and its episodes are not complete.
    """

    episodes: list[Episode]
    decisions: Decisions | None
    seconds: dict[str, float]
    wall_s: float
    rounds: int
    interrupted: bool = False

    def parts(self) -> dict[str, float]:
        """For the log: seconds of each part and the number of rounds."""
        return {**{name: round(value, 4) for name, value in self.seconds.items()}, "rounds": self.rounds}


def collect(
    policy: FlowPolicy,
    vec_env: Environments,
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
        vec_env: Vector environment with autoreset disabled, or several of one kind, of which some simulate while another has
            its chunks sampled. Environments that are not needed are not reset.
        scenes: One per episode.
        noise: Exploration noise, or None for the deterministic policy.
        early_stop: Value of that reset option, where the environment knows it.
        keep_decisions: Keep prefixes and chains for an update (needs `noise`).
        keep_final_features: Keep the critic's features of a truncated episode's last observation.
        default_task: Instruction where the environment gives none.
        offload: Where the kept prefixes wait for the update, see `PrefixStore`.
        on_episode: Called at the end of each episode.
        should_stop: Asked before every wait for the environments; True abandons the rollout.

    Raises:
        FlowRLError: failing environment, no instruction, or actions that are not finite.
    """
    kept: list[tuple[Chain, Tensor, list[tuple[int, int]]]] = []
    store = PrefixStore(offload, policy.device)
    clock = _Clock("prepare", "sample", "env", "reset")
    rounds = 0
    groups = group_list(vec_env)
    with (
        CpuThreads(policy) as threads,
        Fleet(groups, scenes, early_stop, default_task, policy.takes_instruction) as fleet,
    ):
        fleet.begin()
        clock.count("reset")
        while fleet.busy:
            if should_stop():
                episodes = fleet.ordered_episodes()
                return Rollout(episodes, None, clock.seconds, clock.wall_s, rounds, interrupted=True)
            clock.count(None)
            group, what = fleet.wait()
            clock.count(what)
            if keep_final_features:
                _add_final_features(policy, group)
                clock.count("prepare")
            if on_episode is not None:
                for episode in group.finished.values():
                    on_episode(episode)
            clock.count(None)
            fleet.refill(group)
            clock.count("reset")
            if not group.episodes:
                continue

            live = group.episodes
            rows = pad_to_two(list(live))
            episodes = [live[row] for row in rows]
            prefix = policy.encode(select_rows(group.observation, np.array(rows)), [e.task for e in episodes])
            clock.count("prepare")
            slices = threads.slices(len(rows))
            chain = _sample(policy, prefix, episodes, noise, threads, slices)
            actions = _to_actions(policy, chain, episodes)
            clock.count("sample")
            where = [(episode.number, len(episode.rewards)) for episode in live.values()]
            fleet.step(group, dict(zip(live, actions)))  # of a padded pair the row that is kept
            clock.count("env")
            if keep_decisions:  # while the environments simulate
                prefix, chain, features = _without_padding(policy, prefix, chain, len(where))
                for part in slices:  # the batches that were sampled
                    store.add(prefix[part])
                    kept.append((chain[part], features[part], where[part]))
            rounds += 1
        decisions = _join(kept, store, fleet.episodes) if kept else None
        return Rollout(fleet.ordered_episodes(), decisions, clock.seconds, clock.wall_s, rounds)


class _Clock:
    """Counts the time since the last count to a part; `None` counts it to none."""

    def __init__(self, *parts: str) -> None:
        self.seconds = dict.fromkeys(parts, 0.0)
        self._start = self._last = time.perf_counter()

    def count(self, part: str | None) -> None:
        now = time.perf_counter()
        if part is not None:
            self.seconds[part] += now - self._last
        self._last = now

    @property
    def wall_s(self) -> float:
        """Time since the start [s]."""
        return time.perf_counter() - self._start


def pad_to_two(rows: list[int]) -> list[int]:
    """A batch of one becomes two equal rows: batch size one runs other kernels, with other rounding."""
    return rows * 2 if len(rows) == 1 else rows


def _sample(
    policy: FlowPolicy,
    prefix: Prefix,
    episodes: Sequence[Episode],
    noise: NoiseModel | None,
    threads: CpuThreads,
    slices: Sequence[slice],
) -> Chain:
    """The chains of a round; its slices are sampled side by side."""
    num_elements = noise.num_elements if noise is not None else None
    drawn = [episode_noise(e.torch_seed, len(e.rewards), policy.spec, num_elements) for e in episodes]
    x_0 = torch.stack([start for start, _ in drawn]).to(policy.device)
    eps = None
    if noise is not None:
        eps = torch.stack([noises for _, noises in drawn if noises is not None]).to(policy.device)
    if len(slices) == 1:
        return sample_chain(policy, prefix, x_0, noise, eps)

    def sample(rows: slice) -> Chain:
        return sample_chain(policy, prefix[rows], x_0[rows], noise, None if eps is None else eps[rows])

    return Chain.concatenate(threads.map(sample, slices))


def _to_actions(policy: FlowPolicy, chain: Chain, episodes: Sequence[Episode]) -> np.ndarray:
    """The chunks in the environment's units, float32 (B, T, A)."""
    if policy.device.type == "cuda":  # a plain copy would spin on a core that a simulator needs
        done = torch.cuda.Event(blocking=True)
        done.record(torch.cuda.current_stream(policy.device))
        done.synchronize()
    actions = policy.unnormalize(chain.actions[..., : policy.spec.action_dim]).float().cpu().numpy()
    bad = ~np.isfinite(actions).reshape(len(actions), -1).all(axis=1)
    if bad.any():
        scene = episodes[int(np.argmax(bad))].scene
        raise FlowRLError(
            f"the policy's actions are not finite in scene {scene.seed}:{scene.index}; its weights or normalization are broken"
        )
    return actions


def _without_padding(
    policy: FlowPolicy, prefix: Prefix, chain: Chain, count: int
) -> tuple[Prefix, Chain, Tensor]:
    features = policy.prefix_features(prefix).float()
    if count < len(prefix):
        prefix, features, chain = prefix[:count], features[:count], chain[:count]
    return prefix, chain, features


def _add_final_features(policy: FlowPolicy, group: Group) -> None:
    """Encodes the last observations of truncated episodes; without autoreset the step returned them."""
    finished = group.finished
    truncated = [env for env, episode in finished.items() if episode.truncated and not episode.terminated]
    if not truncated:
        return
    rows = pad_to_two(truncated)
    prefix = policy.encode(
        select_rows(group.observation, np.array(rows)), [finished[row].task for row in rows]
    )
    for row, features in zip(rows, policy.prefix_features(prefix).float()):
        finished[row].final_features = features


def _join(
    kept: list[tuple[Chain, Tensor, list[tuple[int, int]]]],
    store: PrefixStore,
    episodes: Mapping[int, Episode],
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
