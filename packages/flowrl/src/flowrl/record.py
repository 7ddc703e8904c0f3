"""What a run writes beside its checkpoints: args.json, log.jsonl, TensorBoard events."""

import dataclasses
import importlib.metadata
import json
import math
import os
import platform
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils.tensorboard import SummaryWriter

from flowrl.errors import FlowRLError
from flowrl.gain import GAIN_FIELDS, describe_gain
from flowrl.metrics import LogMetrics

PACKAGES = ("flowrl", "torch", "lerobot", "transformers", "gymnasium", "numpy", "safetensors")
UPDATE_FIELDS = (
    *(
        "kl",
        "kl_decision",
        "clip_fraction",
        "pg_loss",
        "v_loss",
        "explained_variance",
        "grad_norm",
        "grad_cosine",
        "grad_signal",
        "episodes_needed",
    ),
    *("ratio_max_dev", "ratio_std", "by_step", "by_position", "by_joint"),
    *("sigma_mean", "entropy", "epochs_done", "kl_stop", "lr", "skipped"),
    *(
        f"{name}_{statistic}"
        for name in ("advantage", "return")
        for statistic in ("mean", "std", "min", "max")
    ),
)
LOCK = ".lock"
TIME_FIELDS = ("rollout_s", "rollout_parts", "update_s", "val_seconds")


def empty_line(iteration: int, log_metrics: LogMetrics) -> dict[str, Any]:
    """A line of log.jsonl with every field in its order, null where nothing is known yet."""
    names = ("success", "return", *(name for name in log_metrics if name not in ("success", "return")))
    fields = ["decisions", "train_episodes", *(f"train_{name}" for name in names)]
    fields += ["val_episodes", *(f"val_{name}" for name in names), *GAIN_FIELDS, *UPDATE_FIELDS, *TIME_FIELDS]
    return {"iteration": iteration, **dict.fromkeys(fields)}


def describe_line(line: Mapping[str, Any]) -> str:
    """A log line as a readable one."""
    parts = [f"iteration {line['iteration']}:"]
    for kind in ("train", "val"):
        if line[f"{kind}_success"] is not None:
            parts.append(f"{kind} success {line[f'{kind}_success']:.1%} of {line[f'{kind}_episodes']},")
        elif line[f"{kind}_return"] is not None:
            parts.append(f"{kind} return {line[f'{kind}_return']:.3g},")
    if described := describe_gain(line):
        parts.append(f"{described},")
    if line["kl"] is not None:
        parts.append(f"kl {line['kl']:.2g}, clipped {line['clip_fraction']:.1%}, lr {line['lr']:.2g},")
    if line["grad_signal"] is not None:
        needed = line["episodes_needed"]
        enough = "hidden by its noise so far" if needed is None else f"about {needed:.0f} episodes needed"
        parts.append(f"gradient {line['grad_signal']:.0%} signal, {enough},")
    times = {"rollout": line["rollout_s"], "update": line["update_s"], "validation": line["val_seconds"]}
    parts += [f"{name} {seconds:.1f} s" for name, seconds in times.items() if seconds is not None]
    return " ".join(parts)


def check_unused(out: Path) -> None:
    """Raises FlowRLError when the out folder exists and is not empty."""
    if out.exists() and (not out.is_dir() or any(path.name != LOCK for path in out.iterdir())):
        raise FlowRLError(f"--out {out}: already used; choose another, or continue that run with --resume")


def read_log(out: Path, num_lines: int) -> list[str]:
    """The first lines of a run's log.jsonl, those of iterations 0 to num_lines - 1; later ones are left out.

    Raises:
        FlowRLError: one of them is missing or damaged.
    """
    path = out / "log.jsonl"
    lines = (
        path.read_text(encoding="utf-8", errors="replace").splitlines()[:num_lines] if path.is_file() else []
    )
    for iteration in range(num_lines):
        try:
            found = json.loads(lines[iteration])["iteration"]
        except (IndexError, ValueError, KeyError, TypeError):
            found = None
        if found != iteration:
            raise FlowRLError(
                f"{path}: line {iteration + 1} is not that of iteration {iteration}, which has a checkpoint; put the line "
                f"back, or start a new run from the checkpoint with --policy {out}/last"
            )
    return lines


class Record:
    """The files of one run, in its out folder.

    Args:
        out: The folder; created.
        args: Everything that is needed to repeat the run, for args.json.
        log: Lines of log.jsonl with which a resumed run goes on, in the place of those in the file; None: a new run.

    Raises:
        FlowRLError: the folder of a new run was used before, or cannot be written.
    """

    def __init__(self, out: Path, args: Mapping[str, Any], log: Sequence[str] | None = None) -> None:
        if log is None:
            check_unused(out)
        with writing(out):
            out.mkdir(parents=True, exist_ok=True)
            write_json(out / "args.json", args)
            if log is not None:
                write_whole(out / "log.jsonl", "".join(f"{line}\n" for line in log))
            self._log = (out / "log.jsonl").open("a", encoding="utf-8")
            self._board = SummaryWriter(str(out), purge_step=None if log is None else len(log))
        self.out = out
        self.args = dict(args)

    def amend(self, name: str, value: Any) -> None:
        """Adds an entry to args.json."""
        self.args[name] = value
        write_json(self.out / "args.json", self.args)

    def log(self, line: Mapping[str, Any]) -> None:
        """Appends one line; it is on the disk when this returns, before any checkpoint of its iteration.

        Raises:
            FlowRLError: a value is not finite (then nothing is written), or the disk is full.
        """
        wrong = [f"{k} {v}" for k, v in line.items() if isinstance(v, float) and not math.isfinite(v)]
        if wrong:
            raise FlowRLError(
                f"{self.out / 'log.jsonl'}: {', '.join(wrong)} of iteration {line['iteration']} is not finite; look at the "
                "environment's metrics. What was written before is complete"
            )
        with writing(self.out / "log.jsonl"):
            self._log.write(json.dumps(line, allow_nan=False) + "\n")
            self._log.flush()
            os.fsync(self._log.fileno())
            for name, value in scalars(line):
                self._board.add_scalar(name, value, line["iteration"])
            self._board.flush()

    def close(self) -> None:
        self._log.close()
        self._board.close()


def scalars(line: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """A log line's numbers as TensorBoard names them: `update/kl`, and one for each value of an array: `by_step_kl/03`."""
    for name, value in line.items():
        if isinstance(value, int | float) and name != "iteration":
            group = name.partition("_")[0] if name.startswith(("train_", "val_")) else "update"
            yield f"{group}/{name}", value
        elif name.startswith("by_") and value is not None:
            for measure, numbers in value.items():
                for position, number in enumerate(numbers):
                    if number is not None:
                        yield f"{name}_{measure}/{position:02d}", number


def describe_machine(device: torch.device, env_id: str = "") -> dict[str, Any]:
    """Versions, git commit of the working directory and the machine, for a record.

    Args:
        device: Where the policy runs.
        env_id: The environment, `module:id`: the versions of the distribution that brings its module, and of what that
            requires (a simulator, for example), are named too.
    """
    versions: dict[str, str | None] = {}
    for name in [*PACKAGES, *_environment_packages(env_id)]:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return {
        "versions": {"python": platform.python_version(), **versions},
        "commit": git_commit(),
        "device": str(device),
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else _processor(),
        "machine": platform.platform(),
        "cpus": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "cuda": torch.version.cuda if device.type == "cuda" else None,
    }


def _environment_packages(env_id: str) -> list[str]:
    """The distribution of an environment's module, and what it requires without extras."""
    module = env_id.partition(":")[0].partition(".")[0] if ":" in env_id else ""
    if not module:
        return []
    try:
        owners = [
            importlib.metadata.metadata(module)["Name"]
        ]  # the usual case, and the one of an editable install
    except importlib.metadata.PackageNotFoundError:
        owners = sorted(set(importlib.metadata.packages_distributions().get(module, ())))
    required = [
        text
        for owner in owners
        for text in importlib.metadata.requires(owner) or ()
        if "extra ==" not in text
    ]
    names = [*owners, *(re.split(r"[^\w.-]", text, maxsplit=1)[0] for text in required)]
    return [name for name in dict.fromkeys(names) if name not in PACKAGES]


def _processor() -> str:
    """The processor's name, where Linux tells it."""
    try:
        found = re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        found = None
    return found[1] if found else platform.processor()


def git_commit() -> str | None:
    """Commit of the working directory, with "+changes" when files differ from it; None outside a repository."""
    try:
        commit = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True, timeout=10
        )
        status = subprocess.run(
            ["git", "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True, timeout=30
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return commit.stdout.strip() + ("+changes" if status.stdout.strip() else "")


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Writes a JSON file whole or not at all. Dataclasses become objects, other strangers their text."""
    write_whole(path, json.dumps(content, indent=2, default=_plain) + "\n")


def write_whole(path: Path, text: str) -> None:
    """Writes a text file whole or not at all."""
    temporary = path.with_name(f".{path.name}.tmp")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Tells a failing write (no space, no permission) in one line."""
    try:
        yield
    except OSError as error:
        raise FlowRLError(
            f"{path}: cannot be written ({error.strerror or error}); nothing written before is lost"
        ) from error


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return value.item() if hasattr(value, "item") else str(value)
