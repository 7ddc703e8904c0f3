"""The proof that PPO raises a policy's success (docs/experiments.md, "the protocol of the proof"), in stages that go on where they stopped.

    python benchmarks/gain.py train SECONDS               three RL runs side by side: seeds 1, 2, 3
    python benchmarks/gain.py control SECONDS [NAME ...]  filtered, longer, longer-twice, critic-only
    python benchmarks/gain.py ablate SECONDS [NAME ...]   base, no-critic, ratio-step, ratio-chunk, learn-sigma, no-average; seeds 1, 2
    python benchmarks/gain.py test SECONDS [MODEL ...]    the start, once, and each model in OUT/final, on the test scenes
    python benchmarks/gain.py collect DEST                all results and final policies in files of at most 15 MB
    python benchmarks/gain.py unpack DEST                 the same back into OUT, on another machine

A stage ends within SECONDS, keeps what is done, and ends with a table; the same command goes on. Exit code 0: everything of the
stage is done; 3: call it again; 1: a program failed. OUT is --out; GPUS and CORES (environment) restrict the machine, see `jobs.Machine`.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from export_model import clean_policy, iteration_of
from jobs import Job, Machine, Step, run_jobs
from parcel import pack_gain, unpack_gain

HERE = Path(__file__).resolve().parent
NOT_FINISHED, FAILED = 3, 1
EXPORT_S = 12.0
"""Kept of the SECONDS for what follows the programs: policies into OUT/final, and the table."""
SEEDS = {"train": {1: 7700004, 2: 7700005, 3: 7700006}, "ablate": {1: 7700011, 2: 7700012}}
TEST_SEED, VALIDATION_SEED = 9000003, 9300003
ABLATIONS: dict[str, list[str]] = {
    "base": [],
    "no-critic": ["--lam", "1", "--critic-epochs", "0"],
    "ratio-step": ["--ratio", "step"],
    "ratio-chunk": ["--ratio", "chunk"],
    "learn-sigma": ["--learn-sigma"],
    "no-average": ["--average-decay", "0"],
}
FITS = {"filtered": (4000, 1e-4), "filtered-more": (12000, 3e-4)}
"""Steps and peak rate of the two fits of filtered cloning to the same episodes; the start was cloned in 2,500 steps at 1e-3."""
DEMONSTRATIONS = {"longer": 400, "longer-twice": 800}
MODELS = (*(f"rl-seed{seed}" for seed in SEEDS["train"]), *FITS, *DEMONSTRATIONS, "critic-only")


def main() -> None:
    args = parse()
    if args.stage == "collect":
        pack_gain(args.out, Path(args.argument), args.policy)
        return
    if args.stage == "unpack":
        unpack_gain(Path(args.argument), args.out, args.policy)
        return
    start = time.monotonic()
    machine = Machine()
    jobs = STAGES[args.stage](args)
    known = {name for job in jobs for name in (job.name, job.name[:-3], job.name.removeprefix("rl-seed"))}
    if unknown := sorted(set(args.names) - known):
        sys.exit(
            f"error: {args.stage} has no {', '.join(unknown)}; a model to test must be in {args.out / 'final'}"
        )
    deadline = start + float(args.argument) - EXPORT_S
    outcome = run_jobs(jobs, args.out, deadline, machine, parallel=args.parallel)
    export_finished(args)
    seconds = time.monotonic() - start
    usage = {"stage": args.stage, "seconds": round(seconds, 1)}
    usage |= {"cores": len(machine.cores), "gpus": len(machine.gpus)}
    with (args.out / "stages.jsonl").open("a") as file:
        file.write(json.dumps(usage) + "\n")
    print(f"\n{args.stage}: {seconds:.0f} s on {len(machine.cores)} cores and {len(machine.gpus)} GPUs")
    for name, text in outcome.items():
        print(f"{name:16s} {text:14s} {progress(args, name)}")
    if args.stage == "test" and (
        absent := [name for name in MODELS if not (args.out / "final" / name).is_dir()]
    ):
        print(f"not in {args.out / 'final'}, so not tested: {', '.join(absent)}")
    failed = [name for name, text in outcome.items() if text.startswith("FAILED")]
    waiting = [name for name, text in outcome.items() if text.startswith("not")]
    if failed:
        print(f"FAILED: {', '.join(failed)}; see {args.out / 'logs'}")
    if waiting:
        print(f"NOT FINISHED, call again: {', '.join(waiting)}")
    if not failed and not waiting:
        print(f"{args.stage}: everything is done")
    sys.exit(FAILED if failed else NOT_FINISHED if waiting else 0)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("stage", choices=[*STAGES, "collect", "unpack"])
    parser.add_argument("argument", metavar="SECONDS|DEST")
    parser.add_argument("names", nargs="*", help="only these jobs")
    parser.add_argument("--out", type=Path, default=Path("runs/gain"))
    parser.add_argument("--policy", default="models/chess-tiny", help="the start")
    parser.add_argument("--parallel", type=int, default=4, help="programs at once")
    parser.add_argument(
        "--envs", type=int, default=48, help="environments of a program; filtered has twice as many"
    )
    parser.add_argument("--iterations", type=int, default=150)
    parser.add_argument("--ablation-iterations", type=int, default=40)
    parser.add_argument("--episodes", type=int, default=256, help="training episodes of an iteration")
    parser.add_argument("--val-episodes", type=int, default=256)
    parser.add_argument(
        "--ablation-episodes", type=int, default=512, help="validation scenes after an ablation"
    )
    parser.add_argument("--test-episodes", type=int, default=1000)
    parser.add_argument(
        "--into", default="test", help="folder in OUT of the test's results: another for a CPU's renderer"
    )
    parser.add_argument("--flags", default="", help="further flags of flowrl-train, as one text")
    parser.add_argument(
        "--fit-steps", type=int, nargs=2, default=[s for s, _ in FITS.values()], help="filtered cloning"
    )
    parser.add_argument("--longer-steps", type=int, default=5000)
    parser.add_argument(
        "--longer-scenes", type=int, default=400, help="demonstrations tried; longer-twice has twice as many"
    )
    args = parser.parse_args()
    if args.stage in STAGES and not args.argument.isdigit():
        parser.error(f"{args.stage} needs its SECONDS, a whole number, not {args.argument!r}")
    return args


def program(module: str, function: str, folder: Path | None = None) -> list[str]:
    """Words that run a function of a module, of one in `folder` if given. A script's file would be imported, with torch and
    LeRobot, by each of its environments' processes."""
    path = f"import sys; sys.path.insert(0, {str(folder)!r}); " if folder else ""
    return [sys.executable, "-c", f"{path}from {module} import {function} as main; main()"]


def evaluation(args: argparse.Namespace, policy: Path | str, out: Path, seed: int, episodes: int) -> Step:
    """One policy on fixed scenes without noise. Each is evaluated by itself; `results.py` pairs them."""
    command = [
        *program("flowrl.cli", "evaluate"), "--policy", str(policy), "--fast", "--expert-fp32", "--seed", str(seed),
        "--episodes", str(episodes), "--workers", str(args.envs), "--torch-threads", "1", "--out", str(out),
    ]  # fmt: skip
    return Step(lambda: command, lambda: evaluated(out, episodes), needs_s=20 + episodes / 25)


def evaluated(out: Path, episodes: int) -> bool:
    path = out / "eval_results.json"
    return path.is_file() and len(json.loads(path.read_text())["episodes"]) == episodes


def training(
    args: argparse.Namespace,
    name: str,
    iterations: int,
    train_seed: int,
    flags: Sequence[str],
    start: Sequence[str],
) -> Step:
    """An RL run in OUT/runs/NAME, begun or gone on with."""
    out = args.out / "runs" / name

    def command() -> list[str]:
        length = [
            "--iterations",
            str(iterations),
            "--val-every",
            "20",
            "--save-every",
            "10",
            "--envs",
            str(args.envs),
        ]
        if (out / "args.json").is_file():
            return [*start, "--out", str(out), "--resume", *length]
        return [
            *start, "--policy", args.policy, "--out", str(out), *length, "--train-seed", str(train_seed),
            "--episodes", str(args.episodes), "--val-episodes", str(args.val_episodes), "--torch-threads", "1",
            *args.flags.split(), *flags,
        ]  # fmt: skip

    return Step(command, lambda: iteration_of(out / "last") == iterations)


TRAIN = program("flowrl.cli", "train")


def train_jobs(args: argparse.Namespace) -> list[Job]:
    return [
        Job(name, [training(args, name, args.iterations, train_seed, [], TRAIN)])
        for seed, train_seed in SEEDS["train"].items()
        if wanted(args, name := f"rl-seed{seed}", f"{seed}")
    ]


def control_jobs(args: argparse.Namespace) -> list[Job]:
    """With 32 cores and two GPUs: filtered cloning on 16 cores and the first GPU, the others on the second."""
    final, episodes = args.out / "final", args.iterations * args.episodes

    decisions = args.out / "filtered" / "decisions.safetensors"

    def filtering(*flags: str) -> list[str]:
        return [
            *program("filtered_cloning", "main", HERE.parent / "apps/baselines"), "--policy", args.policy,
            "--decisions", str(decisions), "--train-seed", str(SEEDS["train"][1]), "--envs", str(2 * args.envs),
            "--episodes", str(episodes), "--collect-at-once", "1024", "--torch-threads", "1", *flags,
        ]  # fmt: skip

    def fit(name: str, steps: int) -> Step:
        """One of the fits to what was played."""
        flags = ["--out", str(final / name), "--steps", str(steps), "--lr", str(FITS[name][1])]
        return Step(lambda: filtering(*flags), (final / name).is_dir, needs_s=30 + steps / 50)

    play = Step(filtering, lambda: decisions.is_file() or fitted(), needs_s=episodes / 150)
    fits = [fit(name, steps) for name, steps in zip(FITS, args.fit_steps)]

    def fitted() -> bool:
        return all(step.done() for step in fits)

    def longer(name: str) -> Step:
        scenes = args.longer_scenes * (DEMONSTRATIONS[name] // DEMONSTRATIONS["longer"])
        command = [
            *program("chess_apps.cli", "bc"), "--policy", args.policy, "--train", "expert", "--out", str(final / name),
            "--record.episodes", str(scenes), "--record.first-index", "100000", "--record.workers", "5",
            "--record.aim-error-mm", "3", "--record.hesitation-frames", "8", "--record.close-shift-frames", "2",
            "--stride", "2", "--steps", str(args.longer_steps), "--batch", "256", "--lr", "5e-4",
            "--preset", str(Path(args.policy) / "preset.json"),
        ]  # fmt: skip
        return Step(lambda: command, lambda: (final / name).is_dir(), needs_s=60.0)

    warmup = ["--critic-warmup", "8"]
    critic = training(args, "critic-only", 8, SEEDS["train"][1], warmup, TRAIN)
    jobs = [
        Job("filtered", [play, *fits], weight=16, gpu=0),
        Job("longer", [longer("longer")], weight=5, gpu=1),
        Job("longer-twice", [longer("longer-twice")], weight=5, gpu=1),
        Job("critic-only", [critic], weight=6, gpu=1),
    ]
    return [job for job in jobs if wanted(args, job.name)]


def ablation_jobs(args: argparse.Namespace) -> list[Job]:
    jobs = []
    for variant, flags in ABLATIONS.items():
        start = program("without_critic", "main", HERE) if variant == "no-critic" else TRAIN
        for seed, train_seed in SEEDS["ablate"].items():
            name = f"{variant}-s{seed}"
            if wanted(args, name, variant):
                run = training(args, name, args.ablation_iterations, train_seed, flags, start)
                policy, out = args.out / "runs" / name / "last", args.out / "validation" / name
                jobs.append(
                    Job(name, [run, evaluation(args, policy, out, VALIDATION_SEED, args.ablation_episodes)])
                )
    return jobs


def test_jobs(args: argparse.Namespace) -> list[Job]:
    export_finished(args)
    policies: dict[str, Path | str] = {"start": args.policy}
    policies |= {path.name: path for path in sorted((args.out / "final").glob("*"), key=test_order)}
    return [
        Job(name, [evaluation(args, path, args.out / args.into / name, TEST_SEED, args.test_episodes)])
        for name, path in policies.items()
        if wanted(args, name) or name == "start"
    ]


def test_order(path: Path) -> tuple[bool, bool, str]:
    """RL first, the critic alone, which changes nothing, last."""
    return path.name == "critic-only", not path.name.startswith("rl-"), path.name


def wanted(args: argparse.Namespace, *names: str) -> bool:
    return not args.names or any(name in args.names for name in names)


def export_finished(args: argparse.Namespace) -> None:
    """Runs that have all their iterations become policies in OUT/final: their last checkpoint, declared beforehand."""
    lengths = {f"rl-seed{seed}": args.iterations for seed in SEEDS["train"]} | {"critic-only": 8}
    for name, iterations in lengths.items():
        last, policy = args.out / "runs" / name / "last", args.out / "final" / name
        if iteration_of(last) == iterations and not policy.is_dir():
            clean_policy(last, policy)


def progress(args: argparse.Namespace, name: str) -> str:
    """What there is of a job, from its files: iterations and successes of a run, or an evaluation's result."""
    parts = []
    log = args.out / "runs" / name / "log.jsonl"
    if args.stage != "test" and log.is_file():
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        train = [line["train_success"] for line in lines if line["train_success"] is not None]
        validation = [line["val_success"] for line in lines if line["val_success"] is not None]
        fifth = max(1, len(train) // 5)
        if train:
            ends = [sum(part) / fifth for part in (train[:fifth], train[-fifth:])]
            parts.append(f"iteration {lines[-1]['iteration']}, with noise {ends[0]:.1%} -> {ends[1]:.1%}")
        parts.append("validation " + " ".join(f"{100 * value:.1f}" for value in validation))
    folder = args.out / {"test": args.into, "ablate": "validation"}.get(args.stage, "none") / name
    if (folder / "eval_results.json").is_file():
        numbers = json.loads((folder / "eval_results.json").read_text())["summary"]
        parts.append(f"{numbers['successes']}/{numbers['episodes']} = {numbers['success']:.1%}")
    return ", ".join(parts)


STAGES: dict[str, Callable[[argparse.Namespace], list[Job]]] = {
    "train": train_jobs,
    "control": control_jobs,
    "ablate": ablation_jobs,
    "test": test_jobs,
}

if __name__ == "__main__":
    main()
