"""Where the time of one training iteration goes, and how near collecting comes to what the simulators alone can do.

    python benchmarks/iteration.py --json iteration.json                         # the policy's preset, 10 environments
    python benchmarks/iteration.py --envs 96 --episodes 256 --repeats 5          # 16 cores and a GPU
    python benchmarks/iteration.py --envs 4 --episodes 12 --env-kwargs '{"seconds": 5}'

The same episodes are collected with one group of environments and with two (`--pipeline`), in turn, each on processes of
its own; then the same chunks are given to the same environments without a policy ("simulators": physics, rendering, resets
and messages), and the weights are updated once. Of repeats the fastest counts, since other programs can only slow a machine
down. A first round is not counted. Processor time is of all threads; that of the workers is read from /proc (Linux).
"""

import argparse
import dataclasses
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from gymnasium.vector import AsyncVectorEnv, VectorEnv

from flowrl.config import TrainConfig, parse_env_kwargs
from flowrl.episode import Episode
from flowrl.fleet import Fleet
from flowrl.policy.loading import load_policy
from flowrl.preset import load_preset, with_preset, with_preset_env_kwargs
from flowrl.record import describe_machine, write_json
from flowrl.stop import StopRequest
from flowrl.train import Run
from flowrl.vector_env import close_vector_env, find_spec, make_vector_envs, resolve_env_kwargs


def main() -> None:
    defaults = TrainConfig()
    parser = argparse.ArgumentParser(description="Where the time of one training iteration goes.")
    parser.add_argument("--policy", default=defaults.policy)
    parser.add_argument("--env-id", default=defaults.env_id)
    parser.add_argument("--env-kwargs", default="{}", help="JSON, over the preset's")
    parser.add_argument("--envs", type=int, default=defaults.envs)
    parser.add_argument("--episodes", type=int, help="default: the preset's")
    parser.add_argument("--minibatch", type=int, help="default: the preset's")
    parser.add_argument("--pipeline", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--device", default=defaults.device)
    parser.add_argument("--torch-threads", type=int, default=defaults.torch_threads)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    preset = load_preset(args.policy)
    names = ("policy", "env_id", "env_kwargs", "envs", "episodes", "minibatch", "device", "torch_threads")
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    config = dataclasses.replace(with_preset(defaults, preset), **given, critic_warmup=0, pipeline=1)
    config = with_preset_env_kwargs(config, preset)
    with tempfile.TemporaryDirectory() as folder:
        config = dataclasses.replace(config, out=str(Path(folder) / "run"))
        results = measure(config, args.pipeline, args.repeats)
    show(results)
    if args.json is not None:
        write_json(args.json, {"arguments": vars(args), **results})


def measure(config: TrainConfig, pipelines: Sequence[int], repeats: int) -> dict[str, Any]:
    """All repeats; the fastest of each, and every wall time."""
    rounds: dict[str, list[dict[str, Any]]] = {}
    with StopRequest() as stop, Run(config, load_policy, {}) as run:
        spec, given = find_spec(config.env_id), parse_env_kwargs(config.env_kwargs)
        kwargs = resolve_env_kwargs(spec, given, config.seconds, run.policy.spec)
        groups = {
            pipeline: make_vector_envs(config.env_id, config.envs, kwargs, run.policy, pipeline)
            for pipeline in pipelines
        }
        close_vector_env(run.vec_envs)
        try:
            for repeat in range(repeats + 1):
                measured = measure_iteration(run, stop, groups)
                if stop.requested:
                    raise SystemExit("stopped")
                for name, result in measured.items() if repeat else ():
                    rounds.setdefault(name, []).append(result)
        finally:
            run.vec_envs = []
            for vec_envs in groups.values():
                close_vector_env(vec_envs)
        machine = describe_machine(run.policy.device, config.env_id)
    best = {name: min(found, key=lambda result: result["wall_s"]) for name, found in rounds.items()}
    limit = min(best[f"simulators {pipeline}"]["wall_s"] for pipeline in pipelines)
    for pipeline in pipelines:
        collected = best[f"collect {pipeline}"]
        collected["share_of_simulators"] = limit / collected["wall_s"]
    fastest = min(best[f"collect {pipeline}"]["wall_s"] for pipeline in pipelines)
    return {
        "best": best,
        "iteration_s": fastest + best["update"]["wall_s"],
        "walls_s": {name: [result["wall_s"] for result in found] for name, found in rounds.items()},
        "flags": {name: value for name, value in dataclasses.asdict(config).items() if name != "out"},
        **machine,
    }


def measure_iteration(
    run: Run, stop: StopRequest, groups: dict[int, list[VectorEnv]]
) -> dict[str, dict[str, Any]]:
    """One iteration's episodes with every number of groups, with the policy and without, and one update."""
    results: dict[str, dict[str, Any]] = {}
    rollout, iteration = None, run.iteration + 1
    for pipeline, vec_envs in groups.items():
        rollout, run.vec_envs = None, vec_envs  # the decisions of the one before may fill the GPU
        cpu = time.process_time(), worker_seconds(vec_envs)
        rollout = run.collect(iteration, stop)
        results[f"collect {pipeline}"] = {
            "wall_s": rollout.wall_s,
            **rollout.parts(),
            "cpu_s": time.process_time() - cpu[0],
            "workers_cpu_s": worker_seconds(vec_envs) - cpu[1],
            "decisions": sum(len(episode.rewards) for episode in rollout.episodes),
        }
        if stop.requested:
            return results
    assert rollout is not None
    for pipeline, vec_envs in groups.items():
        results[f"simulators {pipeline}"] = replay(vec_envs, rollout.episodes, run.config.early_stop)
    cpu_start, start = time.process_time(), time.perf_counter()
    line = run.learn(iteration, rollout)
    results["update"] = {
        "wall_s": time.perf_counter() - start,
        "cpu_s": time.process_time() - cpu_start,
        "decisions": line["decisions"],
    }
    for result in results.values():
        result["decisions_per_s"] = result["decisions"] / result["wall_s"]
    return results


def replay(vec_envs: Sequence[VectorEnv], recorded: Sequence[Episode], early_stop: bool) -> dict[str, Any]:
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


def show(results: dict[str, Any]) -> None:
    """A table of the fastest repeats."""
    columns = (
        *("wall_s", "prepare", "sample", "env", "reset", "rounds", "cpu_s", "workers_cpu_s"),
        *("decisions", "decisions_per_s", "share_of_simulators"),
    )
    print(f"{results['device_name']}, {results['cpus']} cores, commit {results['commit']}")
    print(f"{'':<14}" + "".join(f"{name.removesuffix('_of_simulators'):>16}" for name in columns))
    for name, result in results["best"].items():
        cells = [f"{result[column]:>16.4g}" if column in result else f"{'':>16}" for column in columns]
        print(f"{name:<14}" + "".join(cells))
    print(f"one iteration, the faster way of collecting and the update: {results['iteration_s']:.2f} s")


if __name__ == "__main__":
    main()
