"""Entry points of the programs: parse flags, apply the policy's preset, tell errors in one line.

Exit codes: 0 done (also after an orderly stop), 1 a check of flowrl-check failed, 2 bad input, 130 aborted by Ctrl-C. torch and lerobot are imported after
the flags are understood.
"""

import contextlib
import dataclasses
import importlib.metadata
import io
import os
import re
import sys
from collections.abc import Callable, Sequence

import tyro

from flowrl.config import CheckConfig, EvalConfig, RelocateConfig, TrainConfig, check_config
from flowrl.errors import FlowRLError
from flowrl.preset import describe_preset, load_preset, with_preset, with_preset_env_kwargs
from flowrl.resume import recorded_config, settled_config

CHECK_FAILED, BAD_INPUT, ABORTED = 1, 2, 130


def train() -> None:
    """flowrl-train"""
    sys.exit(run_program(_train, sys.argv[1:]))


def evaluate() -> None:
    """flowrl-eval"""
    sys.exit(run_program(_evaluate, sys.argv[1:]))


def check() -> None:
    """flowrl-check"""
    sys.exit(run_program(_check, sys.argv[1:]))


def relocate() -> None:
    """flowrl-relocate"""
    sys.exit(run_program(_relocate, sys.argv[1:]))


def run_program(program: Callable[[Sequence[str]], int | None], args: Sequence[str]) -> int:
    """Runs a program and returns its exit code; FlowRLError becomes one line on stderr."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # idle BLAS threads spin and starve the simulators
    if list(args) == ["--version"]:
        print(f"flowrl {importlib.metadata.version('flowrl')}")
        return 0
    try:
        return program(args) or 0
    except FlowRLError as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        print("aborted; checkpoints written before are complete", file=sys.stderr)
        return ABORTED


def _train(args: Sequence[str]) -> None:
    given = parse_flags(TrainConfig, "flowrl-train", args)
    if given.resume:
        _resume(given.out, args)
        return
    policy = given.policy
    preset = load_preset(policy)
    defaults = with_preset(dataclasses.replace(TrainConfig(), policy=policy), preset)
    config = with_preset_env_kwargs(parse_flags(TrainConfig, "flowrl-train", args, defaults), preset)
    check_config(config)
    if line := describe_preset(policy, preset):
        print(line, file=sys.stderr)
    _quiet_libraries()
    from flowrl.train import train as run

    run(config, preset=preset)


def _resume(out: str, args: Sequence[str]) -> None:
    """Goes on with a run: its own flags are the defaults, and no preset is read."""
    if not out:
        raise FlowRLError("--resume: give the run's folder with --out")
    config = settled_config(parse_flags(TrainConfig, "flowrl-train", args, recorded_config(out)))
    check_config(config)
    _quiet_libraries()
    from flowrl.train import train as run

    run(config)


def _evaluate(args: Sequence[str]) -> None:
    policy = parse_flags(EvalConfig, "flowrl-eval", args).policy
    preset = load_preset(policy)
    defaults = with_preset(dataclasses.replace(EvalConfig(), policy=policy), preset)
    config = with_preset_env_kwargs(parse_flags(EvalConfig, "flowrl-eval", args, defaults), preset)
    check_config(config)
    if preset["env_kwargs"]:
        print(f"environment arguments with {policy}'s own: {config.env_kwargs}", file=sys.stderr)
    _quiet_libraries()
    from flowrl.evaluate import evaluate as run

    run(config)


def _check(args: Sequence[str]) -> int:
    policy = parse_flags(CheckConfig, "flowrl-check", args).policy
    preset = load_preset(policy)
    defaults = with_preset(dataclasses.replace(CheckConfig(), policy=policy), preset)
    config = with_preset_env_kwargs(parse_flags(CheckConfig, "flowrl-check", args, defaults), preset)
    check_config(config)
    train_config = with_preset(dataclasses.replace(TrainConfig(), policy=policy), preset)
    if line := describe_preset(policy, preset):
        print(line, file=sys.stderr)
    _quiet_libraries()
    from flowrl.check import check as run

    return 0 if all(result.passed for result in run(config, train_config)) else CHECK_FAILED


def _relocate(args: Sequence[str]) -> None:
    config = parse_flags(RelocateConfig, "flowrl-relocate", args)
    from flowrl.checkpoint import relocate as run

    print(run(config.folder, config.vlm_path or None))


def parse_flags[Config](
    config_class: type[Config], prog: str, args: Sequence[str], defaults: Config | None = None
) -> Config:
    """Flags as a config; `--help` prints and exits.

    Raises:
        FlowRLError: an unknown flag or a value that its flag does not take, in one line.
    """
    told = io.StringIO()
    try:
        with contextlib.redirect_stderr(told):
            if defaults is None:
                return tyro.cli(config_class, prog=prog, args=args)
            return tyro.cli(config_class, prog=prog, args=args, default=defaults)
    except SystemExit as exit_:
        if exit_.code in (0, None):
            raise
        raise FlowRLError(f"{one_line(told.getvalue())} (see {prog} --help)") from None


def one_line(panel: str) -> str:
    """What tyro says in a box, up to the first rule inside it, as one line without escape codes."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", panel)
    words: list[str] = []
    for row in text.splitlines():
        if re.fullmatch(r"[│\s]*─{5,}[│\s]*", row) and words:
            break
        if not row.lstrip().startswith(("╭", "╰")):
            words += row.replace("│", " ").split()
    return " ".join(words)


def _quiet_libraries() -> None:
    """A failing worker's stack is not printed by Gymnasium: the error is told in one line by ours."""
    import gymnasium

    gymnasium.logger.min_level = gymnasium.logger.ERROR + 1
