"""Results of `gain.py` or `larger_policy.py`, read from its OUT folder or from the compact form that is committed; and that form, written.

Compact: runs/NAME.jsonl (the log's fields that are shown), runs/NAME.json (flags, machine), TEST/NAME.json (an evaluation's episodes in columns),
fits/NAME.json (steps and demonstrations of the controls), usage.json (seconds on the machine).
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

LOG_FIELDS = (
    "iteration", "train_episodes", "train_success", "train_toppled", "train_disturbed", "val_episodes", "val_success", "val_gain",
    "val_gain_low", "val_gain_high", "kl", "kl_decision", "clip_fraction", "explained_variance", "ratio_max_dev", "lr", "rollout_s", "update_s", "val_seconds",
)  # fmt: skip
ARGS = ("flags", "preset", "versions", "commit", "device_name", "machine", "cpus")
COLUMNS = (
    "piece",
    "distractors",
    "success",
    "clean_lift",
    "disturbed",
    "toppled",
    "close_lateral_mm",
    "frames",
)
EVALUATION_FACTS = ("device_name", "commit", "control_rate", "weights")
TESTS = ("test", "test-cpu", "validation")
"""Folders of evaluations: test scenes on the GPU's and on a CPU's renderer, validation scenes of the ablations."""
START = "start"


@dataclass(frozen=True)
class Run:
    """A run's log, a dict for each iteration, and what it was started with."""

    lines: list[dict[str, Any]]
    args: Mapping[str, Any]

    @property
    def iterations(self) -> int:
        """The last iteration in the log."""
        return self.lines[-1]["iteration"] if self.lines else 0

    @property
    def episodes(self) -> int:
        """Training episodes."""
        return sum(line.get("train_episodes") or 0 for line in self.lines)

    def at(self, iteration: int, name: str) -> float | None:
        """A field of the log at an iteration; None where it has none."""
        return next((line.get(name) for line in self.lines if line["iteration"] == iteration), None)

    def curve(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Episodes trained on so far, and the field's values, where it has one."""
        episodes = np.cumsum([line.get("train_episodes") or 0 for line in self.lines])
        chosen = [number for number, line in enumerate(self.lines) if line.get(name) is not None]
        return episodes[chosen], np.array([float(self.lines[number][name]) for number in chosen])


@dataclass(frozen=True)
class Evaluation:
    """Episodes of one policy on scenes 0, 1, 2, ... of a seed, as columns of equal length."""

    seed: int
    columns: Mapping[str, list[Any]]
    facts: Mapping[str, Any]

    @property
    def success(self) -> np.ndarray:
        """Bool, one for each scene."""
        return np.array(self.columns["success"], dtype=bool)


@dataclass(frozen=True)
class Results:
    """Everything that `gain.py` left; parts that are missing are empty."""

    runs: Mapping[str, Run] = field(default_factory=dict)
    tests: Mapping[str, Mapping[str, Evaluation]] = field(default_factory=dict)
    fits: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    usage: Sequence[Mapping[str, Any]] = ()
    unchanged: Mapping[str, int] = field(default_factory=dict)
    commit: str | None = None

    def rl_names(self, test: str = "test") -> list[str]:
        """The RL runs that were evaluated there, in the order of their seeds."""
        return sorted(name for name in self.tests.get(test, {}) if name.startswith("rl-seed"))


def read_results(folder: Path, start: Path, commit: str | None = None) -> Results:
    """From OUT of `gain.py` or `larger_policy.py`, or from the compact form.

    Args:
        folder: Either.
        start: The start's policy folder, to count the tensors that the critic-only run has changed.
        commit: Of the code that ran, where the machine had no git; the compact form remembers it.
    """
    if list(folder.glob("runs/*/log.jsonl")) or list(folder.glob("*/*/eval_results.json")):
        return _read_out(folder, start, commit)
    runs = {
        path.stem: Run(_lines(path), json.loads(path.with_suffix(".json").read_text()))
        for path in sorted(folder.glob("runs/*.jsonl"))
    }
    tests = {
        test: {
            path.stem: Evaluation(**json.loads(path.read_text()))
            for path in sorted(folder.glob(f"{test}/*.json"))
        }
        for test in TESTS
    }
    fits = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("fits/*.json"))}
    usage_file = folder / "usage.json"
    usage = (
        json.loads(usage_file.read_text()) if usage_file.is_file() else {"stages": [], "changed_tensors": {}}
    )
    commit = commit or usage.get("commit")
    return Results(runs, tests, fits, usage["stages"], usage["changed_tensors"], commit)


def merged(parts: Sequence[Results]) -> Results:
    """Results of several machines as one; a part that two of them have is the later one's, stages that both name are one."""
    usage: list[Mapping[str, Any]] = []
    for part in parts:
        usage += [stage for stage in part.usage if stage not in usage]
    names = sorted({test for part in parts for test in part.tests})
    commits = [part.commit for part in parts if part.commit]
    return Results(
        runs={name: run for part in parts for name, run in part.runs.items()},
        tests={name: {k: v for part in parts for k, v in part.tests.get(name, {}).items()} for name in names},
        fits={name: fit for part in parts for name, fit in part.fits.items()},
        usage=usage,
        unchanged={name: count for part in parts for name, count in part.unchanged.items()},
        commit="; ".join(dict.fromkeys(commits)) or None,
    )


def write_results(results: Results, folder: Path) -> None:
    """The compact form; what was in the folder before is replaced."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name, run in results.runs.items():
        lines = [
            {key: _short(line[key]) for key in LOG_FIELDS if line.get(key) is not None} for line in run.lines
        ]
        _write(folder / "runs" / f"{name}.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
        args = dict(run.args)
        if "flags" in args:
            args["flags"] = _without_folders(args["flags"])
        _write(folder / "runs" / f"{name}.json", json.dumps(args) + "\n")
    for test, evaluations in results.tests.items():
        for name, evaluation in evaluations.items():
            _write(folder / test / f"{name}.json", json.dumps(vars(evaluation), separators=(",", ":")) + "\n")
    for name, fit in results.fits.items():
        if "config" in fit:
            fit = {**fit, "config": _without_folders(fit["config"])}
        _write(folder / "fits" / f"{name}.json", json.dumps(fit) + "\n")
    usage = {
        "stages": results.usage,
        "changed_tensors": results.unchanged,
        "commit": results.commit,
    }
    _write(folder / "usage.json", json.dumps(usage) + "\n")


def _read_out(out: Path, start: Path, commit: str | None) -> Results:
    from parcel import WEIGHTS, different

    runs = {}
    for log in sorted(out.glob("runs/*/log.jsonl")):
        args = json.loads((log.parent / "args.json").read_text())
        runs[log.parent.name] = Run(_lines(log), {key: args.get(key) for key in ARGS})
    tests = {
        test: {
            path.parent.name: _evaluation(json.loads(path.read_text()))
            for path in sorted(out.glob(f"{test}/*/eval_results.json"))
        }
        for test in TESTS
    }
    fits = {}
    for path in sorted(out.glob("final/*/filtered_cloning.json")):
        record = json.loads(path.read_text())
        fits[path.parent.name] = {key: record[key] for key in ("flags", "successes", "decisions", "loss")}
    for path in sorted((*out.glob("final/*/clone.json"), *out.glob("*/clone.json"))):
        record = json.loads(path.read_text())
        if not path.parent.name.startswith("filtered"):
            fits[path.parent.name] = {
                key: record[key] for key in ("config", "episodes_kept", "observations", "loss")
            }
    changed = {
        path.name: len(different(start, path))
        for path in sorted(out.glob("final/*"))
        if path.name == "critic-only" and (path / WEIGHTS).is_file()
    }
    usage = _lines(out / "stages.jsonl") if (out / "stages.jsonl").is_file() else []
    commits = {run.args["commit"] for run in runs.values() if run.args.get("commit")}
    return Results(runs, tests, fits, usage, changed, commit or ", ".join(sorted(commits)) or None)


def _without_folders(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Paths of a machine as the names of their files alone."""
    return {
        key: Path(value).name if isinstance(value, str) and value.startswith("/") else value
        for key, value in flags.items()
    }


def _evaluation(results: Mapping[str, Any]) -> Evaluation:
    episodes, seed = results["episodes"], results["settings"]["seed"]
    low, high = results["environment"]["kwargs"]["distractors"]
    columns: dict[str, list[Any]] = {
        name: [_short(episode[name]) for episode in episodes] for name in COLUMNS if name != "distractors"
    }
    columns["distractors"] = [
        num_distractors(seed, e["index"], (low, high), e["piece"], e["square"]) for e in episodes
    ]
    return Evaluation(seed, columns, {key: results.get(key) for key in EVALUATION_FACTS})


def num_distractors(seed: int, index: int, distractors: tuple[int, int], piece: str, square: str) -> int:
    """Black pieces of a scene, drawn again from its seed; the redraw is taken whose white piece is the recorded one.

    Raises:
        ValueError: no redraw has it, so the record is of another version of the scenes.
    """
    from chess_env.layout import draw_layout

    for attempt in range(100):
        layout = draw_layout(seed, index, distractors, attempt)
        if (layout.target.kind, layout.target.square) == (piece, square):
            return len(layout.distractors)
    raise ValueError(f"scene {index} of seed {seed} has no {piece} on {square}: recorded with other scenes")


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _short(value: Any) -> Any:
    if isinstance(value, bool) or value is None:
        return int(value) if value is not None else None
    return float(f"{value:.4g}") if isinstance(value, float) else value


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
