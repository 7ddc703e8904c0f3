"""Where the time of one training iteration goes, how near collecting comes to what the simulators alone can do, and how much
faster all is than LeRobot's own operations.

    python benchmarks/iteration.py --json iteration.json                          # the policy's preset, 10 environments
    python benchmarks/iteration.py --envs 16 64 96 --episodes 256 --eager         # 16 cores and a GPU
    python benchmarks/iteration.py --policy 450m --envs 64 --episodes 100 --eager --repeats 2
    python benchmarks/iteration.py --envs 4 --episodes 12 --env-kwargs '{"seconds": 5}' --velocity split

All flags of `flowrl-train` are understood; a size of `flowrl.policy.tiny.SIZES` as the policy is built here with random
weights. The same episodes are collected with one group of environments and with two (`--pipeline`), in turn, each on
processes of its own; then the same chunks are given to the same environments without a policy ("simulators": physics,
rendering, resets and messages), and to environments that draw no pictures; the weights are updated once, and once the critic
alone. With `--eager` all of it alternates with LeRobot's encoder and denoising step in one group of environments, and an
update in float32 that encodes the observations of each minibatch again (see `eager`). Validation is not part of it.

Of repeats the fastest counts, since other programs can only slow a machine down. A first round is not counted. Processor time
is of all threads; that of the workers is read from /proc (Linux).
"""

import argparse
import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from flowrl.cli import parse_flags, run_program
from flowrl.config import TrainConfig
from flowrl.preset import load_preset, with_preset, with_preset_env_kwargs


def main() -> None:
    sys.exit(run_program(run, sys.argv[1:]))


def run(words: Sequence[str]) -> None:
    """Measures as the command line says."""
    args, flags = parser().parse_known_args(words)
    config = config_of(flags)
    # Each of the environments' processes imports this file; torch and LeRobot only if they are imported at its top.
    from iteration_rounds import measure

    from flowrl.record import write_json

    results = measure(config, args) | {"policy": config.policy, "arguments": {**vars(args), "flags": flags}}
    show(results)
    if args.json is not None:
        write_json(args.json, results)


def parser() -> argparse.ArgumentParser:
    """The flags of this program; the others are those of flowrl-train."""
    own = argparse.ArgumentParser(
        description="Where the time of one training iteration goes. Takes the flags of flowrl-train too.",
        allow_abbrev=False,
    )
    own.add_argument("--envs", type=int, nargs="+", help="one after another; default: flowrl-train's")
    own.add_argument(
        "--episodes", type=int, nargs="+", help="default: the policy's preset, or flowrl-train's"
    )
    own.add_argument("--pipelines", type=int, nargs="+", default=[1, 2], help="groups of environments")
    own.add_argument("--eager", action="store_true", help="in turn with LeRobot's own operations (SmolVLA)")
    own.add_argument("--repeats", type=int, default=3)
    own.add_argument("--limit", type=float, default=3600.0, help="no repeat is begun after so many seconds")
    own.add_argument("--json", type=Path, help="write all numbers here")
    return own


def config_of(flags: Sequence[str]) -> TrainConfig:
    """Flags as `flowrl-train` reads them: over the policy's preset."""
    policy = parse_flags(TrainConfig, "flowrl-train", flags).policy
    preset = load_preset(policy)
    defaults = with_preset(dataclasses.replace(TrainConfig(), policy=policy), preset)
    return with_preset_env_kwargs(parse_flags(TrainConfig, "flowrl-train", flags, defaults), preset)


def show(results: dict[str, Any]) -> None:
    """A table of the fastest repeats for each number of environments and episodes."""
    columns = (
        *("wall_s", "prepare", "sample", "env", "reset", "rounds", "gpu_encode_s", "gpu_denoise_s", "cpu_s"),
        *("workers_cpu_s", "decisions", "decisions_per_s", "share_of_simulators"),
    )
    print(
        f"{results['policy']}, velocity {results['velocity']}, {results['device_name']}, {results['cores']} cores"
    )
    print(f"commit {results['commit']}")
    for setting in results["settings"]:
        print(f"\n{setting['envs']} environments, {setting['episodes']} episodes")
        print(f"{'':<28}" + "".join(f"{name.removesuffix('_of_simulators'):>16}" for name in columns))
        for name, result in setting["best"].items():
            cells = [f"{result[column]:>16.4g}" if column in result else f"{'':>16}" for column in columns]
            print(f"{name:<28}" + "".join(cells))
        found = ", ".join(f"{name} {seconds:.2f}" for name, seconds in setting["parts_s"].items())
        print(f"one iteration {setting['iteration_s']:.2f} s: {found}")
        if "ratio" in setting:
            eager_s, ratio = setting["eager_iteration_s"], setting["ratio"]
            print(f"in LeRobot's operations {eager_s:.2f} s, {ratio:.1f} times as long for each decision")
    if "left_out" in results:
        print(f"left out, no time: {results['left_out']}")


if __name__ == "__main__":
    main()
