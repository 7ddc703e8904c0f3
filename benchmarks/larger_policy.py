"""One larger policy through the whole way: cloned, started over from sloppy demonstrations, improved by PPO, tested. One GPU, 16 cores.

    python benchmarks/larger_policy.py run SECONDS          goes on where it stopped; the same command until everything is done
    python benchmarks/larger_policy.py collect DEST results    logs and evaluations
    python benchmarks/larger_policy.py collect DEST end        the RL policy, as its difference to the start (30m: about 3 files of 15 MB)
    python benchmarks/larger_policy.py collect DEST start      the start, whole (30m: about 8 files)
    python benchmarks/larger_policy.py unpack DEST results|end|start

The ways of models/chess-tiny (`chess_tiny.sh`): vision and everything else from good episodes; the action expert drawn anew and fitted, on
frozen vision, to few sloppy ones; RL with chess-tiny's preset; validation scenes for both, then 300 test scenes. The RL run is as long as
--iterations; fewer, given later, end it where it is. With two GPUs two sizes run side by side:

    GPUS=0 taskset -c 0-15 python benchmarks/larger_policy.py run 580 --size 8m --out runs/8m &
    GPUS=1 taskset -c 16-31 python benchmarks/larger_policy.py run 580 --size 30m --out runs/30m & wait
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

from export_model import clean_policy, iteration_of
from gain import (
    FAILED,
    NOT_FINISHED,
    TEST_SEED,
    VALIDATION_SEED,
    evaluation,
    program,
)
from jobs import Job, Machine, Step, run_jobs
from parcel import DIGEST, RESULT_FILES, WEIGHTS, read_parts, rebuild, write_difference, write_parts

PRESET = Path(__file__).parents[1] / "apps/presets/chess-tiny.json"


def main() -> None:
    args = parse()
    if args.stage == "collect":
        collect(args)
    elif args.stage == "unpack":
        unpack(args)
    else:
        run(args)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("stage", choices=["run", "collect", "unpack"])
    parser.add_argument("argument", metavar="SECONDS|DEST")
    parser.add_argument("what", nargs="?", choices=["results", "end", "start"], default="results")
    parser.add_argument("--out", type=Path, default=Path("runs/larger"))
    parser.add_argument("--size", default="30m", help="a size of chess-bc")
    parser.add_argument("--envs", type=int, default=64)
    parser.add_argument("--good", type=int, default=5000, help="scenes for vision")
    parser.add_argument("--sloppy", type=int, default=400, help="scenes for the expert")
    parser.add_argument("--vision-steps", type=int, default=8000)
    parser.add_argument(
        "--vision-seconds", type=float, default=280.0, help="its fit ends by then, whatever its steps"
    )
    parser.add_argument("--vision-lr", type=float, default=5e-4)
    parser.add_argument("--expert-steps", type=int, default=2500)
    parser.add_argument("--expert-seconds", type=float, default=120.0)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--iterations", type=int, default=100)
    parser.add_argument("--episodes", type=int, default=256, help="training episodes of an iteration")
    parser.add_argument("--val-episodes", type=int, default=256)
    parser.add_argument("--eval-episodes", type=int, default=300, help="of validation and of test scenes")
    parser.add_argument("--train-seed", type=int, default=7700021)
    parser.add_argument("--flags", default="", help="further flags of flowrl-train, as one text")
    return parser.parse_args()


def run(args: argparse.Namespace) -> None:
    """All steps that are not done, in their order, until the time limit."""
    begin = time.monotonic()
    machine = Machine()
    job = Job(f"larger-{args.size}", steps_of(args, len(machine.cores)))
    outcome = run_jobs([job], args.out, begin + float(args.argument), machine, parallel=1)[job.name]
    print(f"\n{job.name}: {outcome}, {time.monotonic() - begin:.0f} s on {len(machine.cores)} cores")
    report(args.out)
    failed = outcome.startswith("FAILED")
    sys.exit(FAILED if failed else 0 if outcome == "done" else NOT_FINISHED)


def steps_of(args: argparse.Namespace, cores: int) -> list[Step]:
    """Vision, start, its validation, RL, its export, and the evaluations of both ends."""
    vision = ["--size", args.size, "--record.episodes", str(args.good), "--steps", str(args.vision_steps)]
    start = [
        "--policy", str(args.out / "vision"), "--train", "expert", "--reset-expert", "--record.episodes", str(args.sloppy),
        "--record.first-index", "100000", "--record.aim-error-mm", "3", "--record.hesitation-frames", "8",
        "--record.close-shift-frames", "2", "--stride", "2", "--steps", str(args.expert_steps), "--preset", str(PRESET),
    ]  # fmt: skip
    rate = SCENES_PER_CORE_SECOND * cores
    return [
        cloning(args, "vision", vision, cores, args.vision_lr, args.vision_seconds, args.good / rate),
        cloning(args, "start", start, cores, 1e-3, args.expert_seconds, args.sloppy / rate),
        evaluation(
            args, args.out / "start", args.out / "validation" / "start", VALIDATION_SEED, args.eval_episodes
        ),
        reinforcement(args),
        Step(lambda: [sys.executable, "-c", EXPORT, str(args.out)], (args.out / "end").is_dir),
        *(
            evaluation(args, args.out / name, args.out / folder / name, seed, args.eval_episodes)
            for folder, seed in (("validation", VALIDATION_SEED), ("test", TEST_SEED))
            for name in ("end", "start")
            if (folder, name) != ("validation", "start")
        ),
    ]


SCENES_PER_CORE_SECOND = 1.8
"""Recorded scenes; from the 8 minutes of `chess_tiny.sh` on 16 cores, so that no clone begins that cannot end."""
EXPORT = (
    f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); from larger_policy import export; "
    "from pathlib import Path; export(Path(sys.argv[1]))"
)


def export(out: Path) -> None:
    """The run's last checkpoint without its optimizer, as OUT/end."""
    clean_policy(out / "runs" / "rl" / "last", out / "end")


def cloning(
    args: argparse.Namespace,
    name: str,
    flags: list[str],
    workers: int,
    lr: float,
    seconds: float,
    recording_s: float,
) -> Step:
    """chess-bc into OUT/NAME; what an interruption left of it is done again."""
    command = [
        *program("chess_apps.cli", "bc"), "--out", str(args.out / name), *flags, "--record.workers", str(workers),
        "--batch", str(args.batch), "--lr", str(lr), "--max-seconds", str(seconds),
    ]  # fmt: skip
    return Step(lambda: command, (args.out / name).is_dir, needs_s=recording_s + seconds + 30)


def reinforcement(args: argparse.Namespace) -> Step:
    """flowrl-train from OUT/start with its preset, in OUT/runs/rl."""
    out = args.out / "runs" / "rl"

    def command() -> list[str]:
        start = program("flowrl.cli", "train")
        length = [
            "--iterations",
            str(args.iterations),
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
            *start, "--policy", str(args.out / "start"), "--out", str(out), *length, "--train-seed", str(args.train_seed),
            "--episodes", str(args.episodes), "--val-episodes", str(args.val_episodes), "--torch-threads", "1", *args.flags.split(),
        ]  # fmt: skip

    return Step(command, lambda: (iteration_of(out / "last") or -1) >= args.iterations, needs_s=40.0)


def report(out: Path) -> None:
    """A line for each part that exists: parameters and loss of the clones, the RL run, the evaluations."""
    for name in ("vision", "start"):
        if (record := out / name / "clone.json").is_file():
            clone = json.loads(record.read_text())
            step, loss = clone["loss"][-1]
            print(
                f"{name}: {clone['episodes_kept']} episodes, {clone['observations']} observations, {step} steps, loss {loss}"
            )
    if (log := out / "runs" / "rl" / "log.jsonl").is_file():
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        validation = [f"{100 * line['val_success']:.1f}" for line in lines if line["val_success"] is not None]
        print(f"rl: iteration {lines[-1]['iteration']}, validation {' '.join(validation)}")
    for path in sorted(out.glob("*/*/eval_results.json")):
        numbers = json.loads(path.read_text())["summary"]
        place = path.parent.relative_to(out)
        print(f"{place}: {numbers['successes']}/{numbers['episodes']} = {numbers['success']:.1%}")


def collect(args: argparse.Namespace) -> None:
    """Packs results, the start, or the end as its difference to the start."""
    out, dest = args.out, Path(args.argument)
    archive = dest / f"larger-{args.what}.tar.gz"
    if args.what == "results":
        files = {
            path: path.relative_to(out)
            for name in (*RESULT_FILES, "*.log")
            for path in sorted(out.rglob(name))
        }
        files |= {path: path.relative_to(out) for path in out.glob("*.jsonl")}
        write_parts(files, archive)
    else:
        policy = out / args.what
        if not (policy / WEIGHTS).is_file():
            sys.exit(f"error: {policy} does not exist yet; `run` makes it")
        small = args.what == "end"
        files = {
            path: path.relative_to(out)
            for path in policy.rglob("*")
            if path.is_file() and not (small and path.name == WEIGHTS)
        }
        with tempfile.TemporaryDirectory() as scratch:
            if small:
                write_difference(out / "start", policy, Path(scratch))
                files |= {path: Path("end") / path.name for path in Path(scratch).iterdir()}
            write_parts(files, archive)
    for path in sorted(dest.glob(f"{archive.name}.*")):
        print(f"{path}: {path.stat().st_size / 1e6:.1f} MB")


def unpack(args: argparse.Namespace) -> None:
    """The contrary of `collect`; "end" needs the start unpacked before."""
    read_parts(Path(args.argument) / f"larger-{args.what}.tar.gz", args.out)
    if (args.out / "end" / DIGEST).is_file() and (args.out / "start" / WEIGHTS).is_file():
        rebuild(args.out / "start", args.out / "end")


if __name__ == "__main__":
    main()
