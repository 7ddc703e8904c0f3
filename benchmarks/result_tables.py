"""The tables of docs/results.md. Each takes `Results` and returns Markdown, or says what is missing."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from result_data import START, Evaluation, Results
from result_statistics import Estimate, between_runs, pooled_difference

from flowrl.metrics import paired_difference, wilson_interval

NOT_RUN = "Not yet run."
EXPECTED_RUNS = ("rl-seed1", "rl-seed2", "rl-seed3")
CONTROLS = ("filtered", "filtered-more", "longer", "longer-twice", "critic-only")
ABLATIONS = {
    "base": "the preset",
    "no-critic": "no critic: returns normalized over the iteration",
    "ratio-step": "`--ratio step`",
    "ratio-chunk": "`--ratio chunk`",
    "learn-sigma": "`--learn-sigma`",
    "no-average": "`--average-decay 0`",
}
NOT_PLANNED = ("base", "no-average")
"""Ablations that `gain.py` can run and that the proof does without: its own runs are the preset."""
ABLATION_HEAD = [
    "variant", "512 scenes, each seed", "mean", "256 scenes, each run", "mean", "with noise, last fifth"
]  # fmt: skip
MEASURES = {"clean lift": "clean_lift", "a neighbour disturbed": "disturbed", "piece toppled": "toppled"}
PARTS = {"episodes": "rollout_s", "updates": "update_s", "validations": "val_seconds"}
DISTRACTORS = ((0, 2), (3, 5), (6, 8))


def final_table(results: Results, test: str = "test") -> str:
    """Start and RL runs on the test scenes: Wilson intervals, paired differences, McNemar's p; pooled."""
    evaluations = results.tests.get(test, {})
    start, names = evaluations.get(START), results.rl_names(test)
    if start is None and not names:
        return NOT_RUN
    rows = [["policy", "success", "difference to the start [points]", "McNemar's p", "only RL / only start"]]
    if start is not None:
        rows.append(["start", rate(start.success), "", "", ""])
    rows += [[name, *compared(evaluations[name], start)] for name in names]
    text = markdown(rows)
    if missing := [name for name in (START, *EXPECTED_RUNS) if name not in evaluations]:
        text += f"\nMissing: {', '.join(missing)}.\n"
    if start is not None and names:
        text += "\n" + pooled_text([evaluations[name] for name in names], start)
    return f"{text}\n{provenance(results, test)}\n"


def pooled_text(runs: Sequence[Evaluation], start: Evaluation) -> str:
    """The runs together, in sentences."""
    own, before = [run.success for run in runs], start.success
    over_scenes = pooled_difference(own, [before])
    over_runs = between_runs([float(np.mean(success) - np.mean(before)) for success in own])
    text = f"**Pooled over {len(runs)} runs: {over_scenes.points()} points** (bootstrap over the {len(before)} scenes, which the runs share)"
    if over_runs.low is not None:
        text += f"; Student's t interval over the runs, for further seeds: {over_runs.points()}"
    return text + ".\n"


def claim_table(results: Results) -> str:
    """The four conditions of the protocol, each with the number that decides it."""
    evaluations, names = results.tests.get("test", {}), results.rl_names()
    start = evaluations.get(START)
    if start is None or not names:
        return NOT_RUN
    own = [evaluations[name].success for name in names]
    gain = pooled_difference(own, [start.success])
    values = [paired_difference(start.success.tolist(), success.tolist()).mcnemar_p for success in own]
    rows = [["condition of the protocol", "found", "met"]]
    rows.append(["pooled gain at least 20 points", gain.points(), yes(gain.mean >= 0.20)])
    rows.append(
        ["its interval above 15 points", gain.points(), yes(gain.low is not None and gain.low > 0.15)]
    )
    significant = len(names) == len(EXPECTED_RUNS) and max(values) < 0.05
    rows.append(["each of three runs significant", ", ".join(f"p {p:.2g}" for p in values), yes(significant)])
    for name in [name for name in CONTROLS if name.startswith("filtered")]:
        if name in evaluations:
            better = pooled_difference(own, [evaluations[name].success])
            met = better.low is not None and better.low > 0
            rows.append([f"better than filtered cloning ({name})", better.points(), yes(met)])
        else:
            rows.append([f"better than filtered cloning ({name})", "not yet run", "open"])
    return markdown(rows)


def groups_table(results: Results, test: str = "test") -> str:
    """Success by piece and by number of black pieces: the start, the mean of the RL runs, their difference."""
    evaluations, names = results.tests.get(test, {}), results.rl_names(test)
    start = evaluations.get(START)
    if start is None or not names:
        return NOT_RUN
    pieces, numbers = np.array(start.columns["piece"]), np.array(start.columns["distractors"])
    groups = {kind: pieces == kind for kind in sorted(set(pieces.tolist()))}
    groups |= {
        f"{low} to {high} black pieces": (numbers >= low) & (numbers <= high) for low, high in DISTRACTORS
    }
    rows = [["scenes", "start", "after RL, mean of the runs", "difference [points]"]]
    for name, chosen in groups.items():
        if chosen.any():
            own = [evaluations[run].success[chosen] for run in names]
            rows.append(
                [
                    name,
                    rate(start.success[chosen]),
                    f"{np.mean(own):.1%}",
                    pooled_difference(own, [start.success[chosen]]).points(),
                ]
            )
    return markdown(rows)


def measures_table(results: Results, test: str = "test") -> str:
    """What else the episodes tell: clean lifts, damage, closing error, time."""
    evaluations = results.tests.get(test, {})
    chosen = [name for name in (START, *results.rl_names(test)) if name in evaluations]
    if not chosen:
        return NOT_RUN
    rows = [["", *chosen]]
    for label, column in MEASURES.items():
        rows.append([label, *(f"{np.mean(evaluations[name].columns[column]):.1%}" for name in chosen)])
    errors, frames = [], []
    for name in chosen:
        evaluation = evaluations[name]
        errors.append(
            median([value for value in evaluation.columns["close_lateral_mm"] if value is not None])
        )
        frames.append(
            median([count for count, ok in zip(evaluation.columns["frames"], evaluation.success) if ok])
        )
    rows.append(["sideways miss when the jaws begin to close, median [mm]", *errors])
    rows.append(["control frames to success (30 a second), median", *frames])
    return markdown(rows)


def controls_table(results: Results, test: str = "test") -> str:
    """What the same episodes or more demonstrations give without RL."""
    evaluations = results.tests.get(test, {})
    start, runs = evaluations.get(START), [evaluations[name].success for name in results.rl_names(test)]
    present = [name for name in CONTROLS if name in evaluations]
    if not present:
        return NOT_RUN
    rows = [
        ["control", "learned from", "success", "difference to the start", "p", "RL runs minus it [points]"]
    ]
    for name in present:
        numbers = compared(evaluations[name], start)
        better = pooled_difference(runs, [evaluations[name].success]).points() if runs else ""
        rows.append([name, control_source(results, name), *numbers[:3], better])
    text = markdown(rows)
    if missing := [name for name in CONTROLS if name not in evaluations]:
        text += f"\nMissing: {', '.join(missing)}.\n"
    if "critic-only" in results.unchanged:
        changed = results.unchanged["critic-only"]
        told = "none: it is the start, bit for bit" if changed == 0 else f"{changed}, WHICH IT MUST NOT"
        text += f"\nTensors that the critic-only run has changed in the policy: {told}.\n"
    return text


def control_source(results: Results, name: str) -> str:
    """Episodes and optimizer steps of a control."""
    fit = results.fits.get(name)
    if name == "critic-only" and name in results.runs:
        return f"{results.runs[name].episodes:,} episodes, the critic alone"
    if fit is None:
        return "not recorded"
    if "successes" in fit:
        flags = fit["flags"]
        return (
            f"{fit['successes']:,} successes of {flags['episodes']:,} episodes, {fit['decisions']:,} decisions; "
            f"{flags['steps']:,} steps of {flags['batch']} at {flags['lr']:g}"
        )
    config = fit["config"]
    return (
        f"{fit['episodes_kept']:,} of {config['record']['episodes']:,} demonstrations, {fit['observations']:,} observations; "
        f"{fit['loss'][-1][0]:,} steps of {config['batch']} at {config['lr']:g}"
    )


def ablations_table(results: Results) -> str:
    """Variants of the preset on validation scenes, with both seeds; the preset itself: the proof's runs when they were as long."""
    evaluations = results.tests.get("validation", {})
    present = {name: seeds for name in ABLATIONS if (seeds := runs_of(evaluations, name))}
    if not present:
        return NOT_RUN
    length = max(
        (results.runs[s].iterations for seeds in present.values() for s in seeds if s in results.runs),
        default=0,
    )
    preset = [name for name in EXPECTED_RUNS if name in results.runs]
    rows = [ABLATION_HEAD]
    if "base" not in present and preset:
        rows.append(
            [
                f"the preset: the proof's runs at iteration {length}",
                "",
                "",
                *validations(results, preset, length),
            ]
        )
    for name, seeds in present.items():
        own = [evaluations[seed].success for seed in seeds]
        runs = [seed for seed in seeds if seed in results.runs]
        cells = ["; ".join(rate(success) for success in own), f"{np.mean(own):.1%}"]
        rows.append([ABLATIONS[name], *cells, *validations(results, runs, length)])
    text = markdown(rows)
    told = {name: [f"{name}-s{seed}" for seed in (1, 2)] for name in ABLATIONS if name not in NOT_PLANNED}
    if missing := [seed for seeds in told.values() for seed in seeds if seed not in evaluations]:
        text += f"\nMissing: {', '.join(missing)}.\n"
    return text


def validations(results: Results, runs: Sequence[str], iteration: int) -> list[str]:
    """Cells of runs at an iteration: the validations in the run's own log, their mean, and success with noise in the last fifth."""
    values = [value for run in runs if (value := results.runs[run].at(iteration, "val_success")) is not None]
    noisy = [f"{last_fifth(results, run, iteration):.1%}" for run in runs]
    mean = f"{np.mean(values):.1%}" if values else ""
    return ["; ".join(f"{value:.1%}" for value in values), mean, ", ".join(noisy)]


def larger_table(results: Results) -> str:
    """The larger policy: how it was cloned, and its success in the RL run's validations, paired with the run's start."""
    run = results.runs.get("rl")
    if run is None:
        return NOT_RUN
    rows = [["iteration", "episodes", "success, no noise", "difference to the start, same scenes [points]"]]
    episodes = 0
    for line in run.lines:
        episodes += line.get("train_episodes") or 0
        if line.get("val_success") is None:
            continue
        successes = np.arange(count := line["val_episodes"]) < round(line["val_success"] * count)
        gain = [line.get(name) for name in ("val_gain", "val_gain_low", "val_gain_high")]
        told = Estimate(*gain).points() if gain[0] is not None else ""  # type: ignore[arg-type]
        rows.append([str(line["iteration"]), f"{episodes:,}", rate(successes), told])
    text = markdown(rows)
    for name, fit in results.fits.items():
        text += (
            f"\n{name}: cloned from {control_source(results, name)}, last loss {fit['loss'][-1][1]:.3f}.\n"
        )
    for folder, evaluations in results.tests.items():
        for name, evaluation in evaluations.items():
            scenes = f"scenes 0-{len(evaluation.success) - 1} of seed {evaluation.seed:,}"
            text += f"\n{name}, {folder}, {scenes}: {rate(evaluation.success)}.\n"
    largest = max(line.get("ratio_max_dev") or 0.0 for line in run.lines)
    spent = ", ".join(f"{part} {total(run.lines, key) / 60:.1f}" for part, key in PARTS.items())
    return f"{text}\nMinutes: {spent}. Largest |ratio - 1| as sampled: {largest:.1g}. {run.args['device_name']}, commit {str(results.commit)[:7]}.\n"


def provenance(results: Results, test: str) -> str:
    """Where and with what code the evaluations of a folder were made."""
    machines = sorted({str(e.facts.get("device_name")) for e in results.tests.get(test, {}).values()})
    return f"Evaluated on {', '.join(machines)}; commit {results.commit or 'not recorded'}."


def usage_table(results: Results) -> str:
    """What each stage has cost."""
    if not results.usage:
        return NOT_RUN
    rows = [["stage", "calls", "wall clock [min]", "GPU minutes", "CPU core hours"]]
    for stage in dict.fromkeys(call["stage"] for call in results.usage):
        calls = [call for call in results.usage if call["stage"] == stage]
        minutes = sum(call["seconds"] for call in calls) / 60
        gpu = sum(call["seconds"] * call["gpus"] for call in calls) / 60
        cpu = sum(call["seconds"] * call["cores"] for call in calls) / 3600
        rows.append([stage, str(len(calls)), f"{minutes:.1f}", f"{gpu:.1f}", f"{cpu:.2f}"])
    text = markdown(rows)
    for name in [name for name in EXPECTED_RUNS if name in results.runs]:
        run = results.runs[name]
        spent = ", ".join(f"{part} {total(run.lines, key) / 60:.1f}" for part, key in PARTS.items())
        text += (
            f"\n{name}: {run.iterations} iterations, {run.episodes:,} episodes; minutes: {spent}; largest |ratio - 1| as sampled "
            f"{max((line.get('ratio_max_dev') or 0.0 for line in run.lines), default=0.0):.1g}.\n"
        )
    return text


def total(lines: Sequence[dict[str, Any]], name: str) -> float:
    return sum(line.get(name) or 0.0 for line in lines)


def last_fifth(results: Results, name: str, iteration: int) -> float:
    """Mean training success, with noise, of the last fifth of a run up to an iteration."""
    values = results.runs[name].curve("train_success")[1][:iteration]
    return float(np.mean(values[-max(1, len(values) // 5) :]))


def runs_of(evaluations: Any, variant: str) -> list[str]:
    return [name for name in (f"{variant}-s1", f"{variant}-s2") if name in evaluations]


def compared(evaluation: Evaluation, start: Evaluation | None) -> list[str]:
    """Cells: success, difference to the start, p, and the pairs that differ."""
    if start is None:
        return [rate(evaluation.success), "", "", ""]
    pair = paired_difference(start.success.tolist(), evaluation.success.tolist())
    difference = Estimate(pair.paired_difference, *pair.ci95).points()
    return [
        rate(evaluation.success),
        difference,
        f"{pair.mcnemar_p:.2g}",
        f"{pair.only_second} / {pair.only_first}",
    ]


def rate(success: np.ndarray) -> str:
    """Count, percentage and Wilson interval."""
    successes, count = int(success.sum()), len(success)
    low, high = wilson_interval(successes, count)
    return f"{successes}/{count} = {successes / count:.1%} ({100 * low:.1f} to {100 * high:.1f})"


def median(values: Sequence[float]) -> str:
    return f"{np.median(values):.1f}" if values else "none"


def yes(met: bool) -> str:
    return "yes" if met else "**no**"


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the first row is its head."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]]) + "\n"
