"""What `iteration.py` measures: one training iteration in flowrl's way, in LeRobot's, and the environments without a policy."""

import argparse
import dataclasses
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from clock import DeviceTimes
from eager import EagerPPO, EagerSmolVLA, ObservationPrefix, eager_config
from gymnasium.vector import AsyncVectorEnv, VectorEnv
from sized_policy import policy_folder

from flowrl.config import TrainConfig, parse_env_kwargs
from flowrl.episode import Episode
from flowrl.fleet import Fleet
from flowrl.policy.loading import load_policy
from flowrl.record import describe_machine
from flowrl.rollout import Rollout
from flowrl.stop import StopRequest
from flowrl.train import Run
from flowrl.vector_env import close_vector_env, find_spec, make_vector_envs, resolve_env_kwargs

Result = dict[str, Any]
EAGER, NO_PICTURES = "eager", "without pictures"


def measure(config: TrainConfig, args: argparse.Namespace) -> Result:
    """All numbers of environments and of episodes, as `iteration.py`'s `args` say."""
    deadline = time.monotonic() + args.limit
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder = stack.enter_context(policy_folder(config.policy))
        config = dataclasses.replace(config, policy=folder, critic_warmup=0)
        stop = stack.enter_context(StopRequest())
        runs = {"flowrl": stack.enter_context(open_run(config, load_policy, scratch / "flowrl"))}
        if args.eager:
            eager = stack.enter_context(open_run(eager_config(config), EagerSmolVLA.load, scratch / "eager"))
            eager.ppo = EagerPPO(eager.policy, eager.noise, eager.critic, eager.config)
            runs[EAGER] = eager
        policy = runs["flowrl"].policy
        results: Result = {
            **describe_machine(policy.device, config.env_id),
            "cores": len(os.sched_getaffinity(0)),
            "parameters": sum(parameter.numel() for parameter in policy.module.parameters()),
            "velocity": policy.velocity_mode,
            "compiled": policy.compiled,
            "update_precision": runs["flowrl"].ppo.precision,
            "flags": dataclasses.asdict(config),
            "settings": [],
        }
        left_out: list[str] = []
        for num_envs in args.envs or [config.envs]:
            with environments(runs["flowrl"], num_envs, args.pipelines) as groups:
                for episodes in args.episodes or [config.episodes]:
                    setting = {"envs": num_envs, "episodes": episodes}
                    if time.monotonic() > deadline:
                        left_out.append(f"{num_envs} environments, {episodes} episodes")
                        continue
                    for run in runs.values():
                        run.config = dataclasses.replace(run.config, envs=num_envs, episodes=episodes)
                    rounds = repeat_rounds(runs, groups, stop, args, deadline)
                    results["settings"].append(setting | summarize(rounds, args.pipelines))
    return results | ({"left_out": "; ".join(left_out)} if left_out else {})


@contextmanager
def open_run(config: TrainConfig, load: Any, out: Path) -> Iterator[Run]:
    """A training run without environments; they come from `environments`."""
    with Run(dataclasses.replace(config, envs=1, pipeline=1, out=str(out)), load, {}) as run:
        close_vector_env(run.vec_envs)
        run.vec_envs = []
        try:
            yield run
        finally:
            run.vec_envs = []


@contextmanager
def environments(run: Run, num_envs: int, pipelines: Sequence[int]) -> Iterator[dict[Any, list[VectorEnv]]]:
    """The same environments in each number of groups, and, where the environment can, some that draw no pictures."""
    config = run.config
    spec = find_spec(config.env_id)
    kwargs = resolve_env_kwargs(spec, parse_env_kwargs(config.env_kwargs), config.seconds, run.policy.spec)
    groups: dict[Any, list[VectorEnv]] = {}
    try:
        for pipeline in dict.fromkeys([*pipelines, 1]):
            groups[pipeline] = make_vector_envs(config.env_id, num_envs, kwargs, run.policy, pipeline)
        if "observation" in spec.kwargs and kwargs.get("observation") != "state":
            blind = {**kwargs, "observation": "state"}
            groups[NO_PICTURES] = make_vector_envs(config.env_id, num_envs, blind, run.policy, max(pipelines))
        yield groups
    finally:
        for vec_envs in groups.values():
            close_vector_env(vec_envs)


def repeat_rounds(
    runs: dict[str, Run],
    groups: dict[Any, list[VectorEnv]],
    stop: StopRequest,
    args: argparse.Namespace,
    deadline: float,
) -> dict[str, list[Result]]:
    """The counted rounds of everything; one at least."""
    rounds: dict[str, list[Result]] = {}
    for repeat in range(args.repeats + 1):
        if repeat > 1 and time.monotonic() > deadline:
            break
        measured: dict[str, Result] = {}
        if EAGER in runs:
            measured |= eager_iteration(runs[EAGER], groups[1], stop, warming=repeat == 0)
        measured |= flowrl_iteration(runs["flowrl"], groups, args.pipelines, stop)
        if stop.requested:
            raise SystemExit("stopped")
        for name, result in measured.items() if repeat else ():
            rounds.setdefault(name, []).append(result)
    return rounds


def flowrl_iteration(
    run: Run, groups: dict[Any, list[VectorEnv]], pipelines: Sequence[int], stop: StopRequest
) -> dict[str, Result]:
    """One iteration's episodes with every number of groups, with the policy and without, and one update."""
    results: dict[str, Result] = {}
    rollout, iteration = None, run.iteration + 1
    for pipeline in pipelines:
        rollout = None  # the decisions of the one before may fill the GPU
        rollout, results[f"collect {pipeline}"] = collect(run, iteration, groups[pipeline], stop)
        if stop.requested:
            return results
    assert rollout is not None
    for name, vec_envs in groups.items():
        if name in pipelines or name == NO_PICTURES:
            results[f"simulators {name}"] = replay(vec_envs, rollout.episodes, run.config.early_stop)
    results["update"] = update(run, iteration, rollout)
    after, next_index = run.iteration, run.next_index
    results["critic alone"] = update(run, 0, rollout)  # no later than the warm-up of 0 iterations
    run.iteration, run.next_index = after, next_index
    return results


def eager_iteration(
    run: Run, vec_envs: list[VectorEnv], stop: StopRequest, warming: bool
) -> dict[str, Result]:
    """The same episodes and an update in LeRobot's own operations; fewer episodes while warming."""
    policy, config, iteration = run.policy, run.config, run.iteration + 1
    assert isinstance(policy, EagerSmolVLA)
    if warming:
        run.config = dataclasses.replace(config, episodes=min(config.episodes, config.envs))
    policy.seen.clear()
    rollout, collected = collect(run, iteration, vec_envs, stop)
    if stop.requested:
        return {}
    decisions = rollout.decisions
    assert decisions is not None
    stored: Any = ObservationPrefix(policy, decisions)
    policy.seen.clear()
    rollout.decisions = dataclasses.replace(decisions, prefix=stored)
    del decisions
    updated = update(run, iteration, rollout)
    run.config = config
    run.next_index += config.episodes - len(rollout.episodes)  # the next scenes are again those of flowrl's
    return {f"{EAGER} collect": collected, f"{EAGER} update": updated}


def collect(run: Run, iteration: int, vec_envs: list[VectorEnv], stop: StopRequest) -> tuple[Rollout, Result]:
    """The iteration's episodes, timed."""
    run.vec_envs = vec_envs
    with DeviceTimes(run.policy) as times:
        cpu = time.process_time(), worker_seconds(vec_envs)
        rollout = run.collect(iteration, stop)
        result = {
            "wall_s": rollout.wall_s,
            **rollout.parts(),
            "cpu_s": time.process_time() - cpu[0],
            "workers_cpu_s": worker_seconds(vec_envs) - cpu[1],
            "decisions": sum(len(episode.rewards) for episode in rollout.episodes),
        }
    run.vec_envs = []
    return rollout, result | times.seconds()


def update(run: Run, iteration: int, rollout: Rollout) -> Result:
    """Advantages, policy and critic, timed."""
    cpu_start, start = time.process_time(), time.perf_counter()
    line = run.learn(iteration, rollout)
    return {
        "wall_s": time.perf_counter() - start,
        "cpu_s": time.process_time() - cpu_start,
        "decisions": line["decisions"],
        "epochs_done": line["epochs_done"],
        "kl": line["kl"],
    }


def replay(vec_envs: Sequence[VectorEnv], recorded: Sequence[Episode], early_stop: bool) -> Result:
    """Gives the recorded chunks to the environments again; the same decisions, without a policy."""
    scenes = [episode.scene for episode in recorded]
    cpu_start, workers_start, start = time.process_time(), worker_seconds(vec_envs), time.perf_counter()
    with Fleet(vec_envs, scenes, early_stop, default_task="", needs_task=False) as fleet:
        fleet.begin()
        while fleet.busy:
            group, _ = fleet.wait()
            fleet.refill(group)
            if group.episodes:
                live = group.episodes.items()
                fleet.step(group, {env: recorded[e.number].actions[len(e.rewards)] for env, e in live})
        again = fleet.ordered_episodes()
    wall = time.perf_counter() - start
    if [episode.rewards for episode in again] != [episode.rewards for episode in recorded]:
        raise SystemExit(
            "the environment does not repeat its episodes: given the same chunks the rewards differ"
        )
    return {
        "wall_s": wall,
        "cpu_s": time.process_time() - cpu_start,
        "workers_cpu_s": worker_seconds(vec_envs) - workers_start,
        "decisions": sum(len(episode.rewards) for episode in again),
    }


def worker_seconds(vec_envs: Sequence[VectorEnv]) -> float:
    """Processor time of all environment processes so far [s]."""
    ticks = 0
    for vec_env in vec_envs:
        assert isinstance(vec_env, AsyncVectorEnv)
        for process in vec_env.processes:
            fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])  # utime, stime
    return ticks / os.sysconf("SC_CLK_TCK")


def summarize(rounds: dict[str, list[Result]], pipelines: Sequence[int]) -> Result:
    """The fastest of everything, all wall times, and what follows from them."""
    best = {name: min(found, key=lambda result: result["wall_s"]) for name, found in rounds.items()}
    for result in best.values():
        result["decisions_per_s"] = result["decisions"] / result["wall_s"]
    limit = min(best[f"simulators {pipeline}"]["wall_s"] for pipeline in pipelines)
    for pipeline in pipelines:
        best[f"collect {pipeline}"]["share_of_simulators"] = limit / best[f"collect {pipeline}"]["wall_s"]
    fastest = min((best[f"collect {pipeline}"] for pipeline in pipelines), key=lambda r: r["wall_s"])
    summary: Result = {
        "best": best,
        "iteration_s": fastest["wall_s"] + best["update"]["wall_s"],
        "share_of_simulators": fastest["share_of_simulators"],
        "parts_s": parts(fastest, best["update"], best["critic alone"]),
        "walls_s": {name: [result["wall_s"] for result in found] for name, found in rounds.items()},
    }
    if f"simulators {NO_PICTURES}" in best:
        same = best[f"simulators {max(pipelines)}"]
        blind = best[f"simulators {NO_PICTURES}"]
        summary["pictures_cpu_s"] = same["workers_cpu_s"] - blind["workers_cpu_s"]
    if f"{EAGER} collect" in best:
        both = best[f"{EAGER} collect"], best[f"{EAGER} update"]
        summary["eager_iteration_s"] = both[0]["wall_s"] + both[1]["wall_s"]
        # Noise is the episodes' own, but after an update of another rounding they differ: the ratio is per decision.
        eager_s = sum(result["wall_s"] / result["decisions"] for result in both)
        own_s = sum(result["wall_s"] / result["decisions"] for result in (fastest, best["update"]))
        summary["ratio"] = eager_s / own_s
    return summary


def parts(collected: Result, updated: Result, critic: Result) -> dict[str, float]:
    """Where an iteration's time goes on the trainer's own clock [s]; the parts add up to the iteration."""
    names = {"env": "environments", "reset": "resets", "prepare": "encoding", "sample": "denoising"}
    found = {name: collected[key] for key, name in names.items()}
    found["bookkeeping"] = collected["wall_s"] - sum(found.values())
    found["critic"] = min(critic["wall_s"], updated["wall_s"])
    found["update of the policy"] = updated["wall_s"] - found["critic"]
    return found
