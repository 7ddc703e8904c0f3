"""Learning curves of the RL runs: validation, training with noise, and size of the step, against training episodes."""

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from result_data import Results, Run
from result_statistics import curve_band
from result_tables import EXPECTED_RUNS, START

SMOOTH = 5  # iterations that a training point averages
COLOUR = "tab:blue"


def learning_curves(results: Results, path: Path) -> bool:
    """Writes the picture (PNG); False, and nothing written, without a run."""
    runs = [results.runs[name] for name in EXPECTED_RUNS if name in results.runs]
    if not runs:
        return False
    figure, axes = plt.subplots(1, 3, figsize=(12, 3.6), layout="constrained")
    draw(axes[0], runs, "val_success", 1, 100.0)
    draw(axes[1], runs, "train_success", SMOOTH, 100.0)
    draw(axes[2], runs, "kl", SMOOTH, 1.0)
    axes[0].set_ylabel("validation success, no noise [%]")
    axes[1].set_ylabel(f"training success, noise, mean of {SMOOTH} [%]")
    axes[2].set_ylabel("KL of an update, per element")
    axes[2].set_ylim(bottom=0.0)
    start = results.tests.get("test", {}).get(START)
    for axis in axes:
        axis.set_xlabel("training episodes [thousands]")
        axis.grid(alpha=0.3)
    figure.suptitle(
        f"{len(runs)} runs (thin), their mean, and its 95 % interval (Student's t over the runs)"
        + (f"; the start on the test scenes: {np.mean(start.success):.1%}" if start else "")
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    plt.close(figure)
    return True


def draw(axis: Axes, runs: list[Run], name: str, smooth: int, factor: float) -> None:
    """One field of each run's log, and mean and band as far as all runs have it."""
    curves = []
    for run in runs:
        episodes, values = run.curve(name)
        episodes = episodes / 1000
        width = min(smooth, len(values))
        if width == 0:
            continue
        values = factor * np.convolve(values, np.ones(width) / width, mode="valid")
        curves.append((episodes[width - 1 :], values))
        axis.plot(*curves[-1], color=COLOUR, alpha=0.35, linewidth=0.9)
    length = min((len(values) for _, values in curves), default=0)
    if length:
        mean, low, high = curve_band([values[:length] for _, values in curves])
        episodes = curves[0][0][:length]
        axis.plot(episodes, mean, color=COLOUR, linewidth=2)
        axis.fill_between(episodes, low, high, color=COLOUR, alpha=0.15, linewidth=0)
