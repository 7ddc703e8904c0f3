"""All measurements behind docs/performance.md in one command with a time limit.

    python benchmarks/scaling.py 540                       # GPUs, each with 16 cores of its own; again: what is left
    python benchmarks/scaling.py 540 --only iteration-450m policy-chess-tiny
    CUDA_VISIBLE_DEVICES= python benchmarks/scaling.py 600 # a CPU
    python benchmarks/performance_page.py                  # then the page

The parts run in the order of importance, one on each GPU at a time, and on a CPU one at a time. Each leaves a file in --out,
named after the kind of machine and the part; parts whose file is there are not run again. What did not fit into the time is
said, and the exit code is then 1. Logs are in --scratch.
"""

import argparse
import json
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args, get_type_hints

from jobs import Job, Machine, Step, run_jobs

from flowrl.config import TrainConfig
from flowrl.record import write_json

BENCHMARKS = Path(__file__).parent
CORES_OF_A_GPU = 16
ITERATION, TINY = "benchmarks/iteration.py", "models/chess-tiny"
WHOLE = ("--target-kl", "1000")
"""Every epoch is run, however far the policy moves."""


@dataclass(frozen=True)
class Part:
    """One program whose result is one file.

    Attributes:
        name: Of the file, without the kind of machine.
        words: Script and flags, without `--json`.
        needs_s: About how long it takes [s].
        chunk_size: Of a policy that is built before, under `{policy}` in `words`.
    """

    name: str
    words: Sequence[str]
    needs_s: float
    chunk_size: int | None = None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("seconds", type=float, help="time limit of all")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/performance"))
    parser.add_argument("--scratch", type=Path, default=Path("runs/performance"))
    parser.add_argument("--only", nargs="+", help="these parts; default: all")
    parser.add_argument(
        "--flags", default="", help="further flags of flowrl-train in the iterations, as one text"
    )
    parser.add_argument("--list", action="store_true", help="say the parts and their commands, and run none")
    args = parser.parse_args()
    deadline = time.monotonic() + args.seconds
    machine = Machine()
    kind = "gpu" if machine.gpus else "cpu"
    parts = [with_flags(part, args.flags) for part in (gpu_parts() if machine.gpus else cpu_parts())]
    names = [part.name for part in parts]
    if unknown := sorted(set(args.only or ()) - set(names)):
        parser.error(f"no part {', '.join(unknown)} for this machine; there are {', '.join(names)}")
    chosen = [part for part in parts if not args.only or part.name in args.only]
    if args.list:
        for part in chosen:
            print(f"{part.name} (about {part.needs_s:.0f} s): {shlex.join(['python', *part.words])}")
        return
    args.out.mkdir(parents=True, exist_ok=True)
    results = {part.name: args.out / f"{kind}-{part.name}.json" for part in chosen}
    jobs = [job_of(part, results[part.name], args.scratch) for part in chosen]
    parallel = max(1, len(machine.gpus))
    waiting = sum(not job.done() for job in jobs)
    cores = (
        machine.cores[: CORES_OF_A_GPU * min(parallel, max(1, waiting))] if machine.gpus else machine.cores
    )
    outcome = run_jobs(jobs, args.scratch, deadline, Machine(cores, machine.gpus), parallel)
    for part in chosen:
        print(f"{part.name}: {outcome[part.name]}")
        if results[part.name].is_file():
            name_command(results[part.name], part.words)
    sys.exit(any(text != "done" for text in outcome.values()))


def with_flags(part: Part, flags: str) -> Part:
    """An iteration with further flags of flowrl-train."""
    return replace(part, words=[*part.words, *shlex.split(flags)]) if ITERATION in part.words else part


def job_of(part: Part, result: Path, scratch: Path) -> Job:
    """The part's program, after that which builds its policy."""
    policy = scratch / f"policy-{part.name}"
    words = [word.format(policy=policy) for word in part.words]
    steps = [
        Step(lambda: [sys.executable, *words, "--json", str(result)], result.is_file, needs_s=part.needs_s)
    ]
    if part.chunk_size is not None:
        size = part.name.split("-")[1]
        build = [sys.executable, str(BENCHMARKS / "sized_policy.py"), size, str(policy)]
        build += ["--chunk-size", str(part.chunk_size)]
        built = lambda: result.is_file() or (policy / "model.safetensors").is_file()  # noqa: E731
        steps.insert(0, Step(lambda: build, built, needs_s=part.needs_s + 30))
    return Job(part.name, steps)


def name_command(result: Path, words: Sequence[str]) -> None:
    """Writes the command into the result, where it is not yet."""
    content = json.loads(result.read_text())
    if "command" not in content:
        write_json(result, content | {"command": shlex.join(["python", *words])})


def policy_part(
    name: str,
    policy: str,
    batches: Sequence[int],
    needs_s: float,
    *flags: str,
    velocity: Sequence[str] = ("auto",),
    chunk_size: int | None = None,
) -> Part:
    """Chunks and minibatches beside LeRobot's own code."""
    words = ["benchmarks/policy.py", "--policy", policy, "--batches", *map(str, batches)]
    words += ["--velocity", *velocity, "--seconds", str(round(needs_s)), *flags]
    return Part(name, words, needs_s, chunk_size)


def iteration_part(
    name: str, envs: Sequence[int], episodes: Sequence[int], needs_s: float, *flags: str, policy: str = TINY
) -> Part:
    """Whole iterations."""
    words = [ITERATION, "--policy", policy, "--envs", *map(str, envs)]
    words += ["--episodes", *map(str, episodes), "--limit", str(round(needs_s / 2)), *flags]
    return Part(name, words, needs_s)


def gpu_parts() -> list[Part]:
    """The most important first."""
    ways = [way for way in get_args(get_type_hints(TrainConfig)["velocity"]) if way not in ("auto", "exact")]
    fastest = ("--velocity", "tf32" if "tf32" in ways else "split", "--update-precision", "tf32")
    return [
        iteration_part(
            "iteration-450m-fast",
            [64],
            [100],
            240,
            "--eager",
            "--repeats",
            "2",
            *WHOLE,
            *fastest,
            policy="450m",
        ),
        policy_part("policy-450m", "450m", [16, 64, 1, 4, 10, 32], 150),
        policy_part("policy-450m-ways", "450m", [16], 120, velocity=["exact", *ways]),
        iteration_part("iteration-chess-tiny", [64], [256], 70, "--eager", *WHOLE),
        policy_part("policy-chess-tiny", TINY, [16, 64, 1, 4, 10, 32], 60, velocity=["auto", "exact"]),
        iteration_part("iteration-chess-tiny-many-envs", [96, 32, 16], [256], 90, "--repeats", "2", *WHOLE),
        iteration_part("iteration-chess-tiny-few-envs", [8, 4, 2, 1], [32], 90, "--repeats", "1", *WHOLE),
        iteration_part("iteration-chess-tiny-episodes", [64], [64, 1024], 60, "--repeats", "2", *WHOLE),
        iteration_part(
            "iteration-450m-fast-short",
            [64],
            [100],
            120,
            "--seconds",
            "6.5",
            "--repeats",
            "2",
            *WHOLE,
            *fastest,
            policy="450m",
        ),
        iteration_part(
            "iteration-450m", [64], [100], 200, "--eager", "--repeats", "1", *WHOLE, policy="450m"
        ),
        policy_part("policy-30m", "30m", [16], 50),
        policy_part("policy-8m", "8m", [16], 40),
        policy_part("policy-450m-chunk25", "{policy}", [16], 70, chunk_size=25),
        policy_part("policy-450m-chunk100", "{policy}", [16], 90, chunk_size=100),
    ]


def cpu_parts() -> list[Part]:
    """A small set: the small policy alone."""
    cpu = ("--device", "cpu", "--torch-threads", "2", "--pipelines", "1")
    return [
        iteration_part("iteration-chess-tiny", [2], [20], 400, "--eager", "--repeats", "2", *WHOLE, *cpu),
        policy_part("policy-chess-tiny", TINY, [2, 10, 16], 120, "--device", "cpu"),
        iteration_part("iteration-chess-tiny-envs", [1, 2, 4], [8], 200, "--repeats", "1", *WHOLE, *cpu),
    ]


if __name__ == "__main__":
    main()
