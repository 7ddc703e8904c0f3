"""An iteration of chess-tiny on a CPU in the code of two commits, in turn.

    python benchmarks/against_commit.py 4abbd28                     # the commit before the fast path, against HEAD
    python benchmarks/against_commit.py 4abbd28 --after-flags "--velocity fused --compile on"

`git archive` writes both into a temporary folder; `flowrl-train` runs from there with the bundled policy of the working tree,
on the same scenes. Each repeat is a process of its own; of repeats the fastest counts, since other programs can only slow a
machine down. Validation and start-up are not part of it. What is committed is compared, not what lies in the working tree.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flowrl.record import read_log, write_json

ROOT = Path(__file__).parents[1]
SIDES = ("before", "after")
PARTS = ("rollout_s", "update_s")
SAME = ("decisions", "train_return", "train_success")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("commit", help="the older one")
    parser.add_argument("--after", default="HEAD", help="the newer one")
    parser.add_argument("--episodes", type=int, default=20)
    parser.add_argument("--envs", type=int, default=2)
    parser.add_argument("--iterations", type=int, default=3, help="of a process")
    parser.add_argument("--skip", type=int, default=1, help="its first so many are not counted")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--torch-threads", type=int, default=2)
    parser.add_argument(
        "--limit", type=float, default=3600.0, help="no repeat is begun after so many seconds"
    )
    parser.add_argument("--policy", type=Path, default=ROOT / "models/chess-tiny")
    parser.add_argument(
        "--after-flags", default="", help="further flags of the newer flowrl-train, as one text"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/performance")
    args = parser.parse_args()
    if args.skip >= args.iterations:
        parser.error(f"--skip {args.skip}: must be less than --iterations {args.iterations}")
    deadline = time.monotonic() + args.limit
    commits = {side: commit_of(name) for side, name in zip(SIDES, (args.commit, args.after))}
    lines: dict[str, list[list[dict[str, Any]]]] = {side: [] for side in SIDES}
    with tempfile.TemporaryDirectory() as scratch:
        for side, commit in commits.items():
            unpack(commit, Path(scratch) / side)
        for repeat in range(args.repeats):
            if repeat and time.monotonic() > deadline:
                break
            for side in SIDES:
                flags = args.after_flags.split() if side == "after" else []
                lines[side].append(train(Path(scratch) / side, f"run{repeat}", args, flags))
                print(
                    f"{side}: " + ", ".join(f"{name} {total(lines[side][-1], name):.1f}" for name in PARTS),
                    flush=True,
                )
            machine = machine_of(Path(scratch) / "after/run0")
            write(args, commits, lines, machine)  # after each repeat: what is cut off leaves the whole ones


def write(
    args: argparse.Namespace,
    commits: dict[str, str],
    lines: dict[str, list[list[dict[str, Any]]]],
    machine: dict[str, Any],
) -> None:
    """The result of the repeats so far."""
    result = {side: {"commit": commits[side]} | summary(lines[side]) for side in SIDES}
    seen = [{tuple(line[name] for name in SAME) for run in lines[side] for line in run} for side in SIDES]
    same, ratio = seen[0] == seen[1], result["before"]["iteration_s"] / result["after"]["iteration_s"]
    print(f"{ratio:.2f} times as fast; the same episodes: {'yes' if same else 'no'}", flush=True)
    facts = {
        "ratio": ratio,
        "same_episodes": same,
        "after_flags": args.after_flags,
        "commit": commits["after"],
    }
    facts["command"] = shlex.join(["python", "benchmarks/against_commit.py", *sys.argv[1:]])
    words = [word for word in args.after_flags.split() if not word.startswith("-")]
    name = "-".join(["cpu-against", commits["before"][:7], *words])
    write_json(args.out / f"{name}.json", result | facts | machine)


def commit_of(name: str) -> str:
    """The whole hash."""
    command = ["git", "-C", str(ROOT), "rev-parse", "--verify", f"{name}^{{commit}}"]
    found = subprocess.run(command, capture_output=True, text=True)
    if found.returncode:
        sys.exit(f"error: {name}: no such commit; git log names them")
    return found.stdout.strip()


def unpack(commit: str, folder: Path) -> None:
    """The packages of a commit."""
    folder.mkdir()
    archive = subprocess.run(
        ["git", "-C", str(ROOT), "archive", commit, "packages"], check=True, capture_output=True
    )
    subprocess.run(["tar", "-x", "-C", str(folder)], check=True, input=archive.stdout)


def train(code: Path, name: str, args: argparse.Namespace, flags: Sequence[str]) -> list[dict[str, Any]]:
    """Trains with the packages in `code`; the log's lines of the iterations that count."""
    sources = [str(path) for path in sorted(code.glob("packages/*/src"))]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sources), "CUDA_VISIBLE_DEVICES": ""}
    check = f"import flowrl; assert flowrl.__file__.startswith({str(code)!r}), flowrl.__file__"
    values = {
        "policy": args.policy.resolve(), "envs": args.envs, "episodes": args.episodes, "iterations": args.iterations,
        "torch-threads": args.torch_threads, "out": code / name, "val-episodes": 1, "val-every": 1000,
        "save-every": 1000, "critic-warmup": 0, "target-kl": 1000,
    }  # fmt: skip
    words = [word for flag, value in values.items() for word in (f"--{flag}", str(value))]
    command = [sys.executable, "-c", f"{check}; from flowrl.cli import train; train()", *words, *flags]
    log = code / f"{name}.log"
    with log.open("wb") as file:
        ended = subprocess.run(command, cwd=code, env=environment, stdout=file, stderr=subprocess.STDOUT)
    if ended.returncode:
        last = log.read_text(errors="replace").strip().splitlines()[-1:]
        sys.exit(f"error: flowrl-train of {code.name}: exit code {ended.returncode}: {''.join(last)}")
    return [json.loads(line) for line in read_log(code / name, args.iterations + 1)[1 + args.skip :]]


def summary(runs: Sequence[list[dict[str, Any]]]) -> dict[str, Any]:
    """The fastest process, an iteration of it."""
    best = min(runs, key=lambda run: sum(total(run, name) for name in PARTS))
    found: dict[str, Any] = {name: total(best, name) / len(best) for name in PARTS}
    found |= {"iteration_s": sum(found.values()), "decisions": round(total(best, "decisions") / len(best))}
    return found | {"all_iterations_s": [sum(total(run, name) for name in PARTS) / len(run) for run in runs]}


def total(run: Sequence[dict[str, Any]], name: str) -> float:
    return sum(line[name] for line in run)


def machine_of(run: Path) -> dict[str, Any]:
    """What the run's record says of the machine."""
    record = json.loads((run / "args.json").read_text())
    return {name: record[name] for name in ("device_name", "machine", "cpus", "torch_threads", "versions")}


if __name__ == "__main__":
    main()
