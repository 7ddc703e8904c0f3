"""What is said beside results: what an environment tells of itself, and which weights and control rate a checkpoint stands for."""

from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import VectorEnv

from flowrl.checkpoint import RECORD, read_meta, resolve_checkpoint
from flowrl.metrics import LogMetrics
from flowrl.validate import log_metrics_of


@dataclass(frozen=True)
class EnvironmentFacts:
    """What an evaluation reads of an environment besides its episodes.

    Attributes:
        log_metrics: What it wants reported, see `log_metrics_of`.
        low, high: Limits of a target, (A,), in its units; infinite where it has none.
        control_rate: Targets a second [Hz], its metadata's `render_fps`; None where it does not say.
    """

    log_metrics: LogMetrics
    low: np.ndarray
    high: np.ndarray
    control_rate: float | None

    @classmethod
    def of(cls, env: VectorEnv | gymnasium.Env) -> "EnvironmentFacts":
        """Of an environment that executes chunks, Box of shape (T, A)."""
        space = env.single_action_space if isinstance(env, VectorEnv) else env.action_space
        assert isinstance(space, gymnasium.spaces.Box)  # `check_spaces` has seen to it
        return cls(log_metrics_of(env), space.low[0], space.high[0], control_rate(env))


def control_rate(env: VectorEnv | gymnasium.Env) -> float | None:
    """Targets a second [Hz], where the environment's metadata says it."""
    rate = env.metadata.get("render_fps")
    return None if rate is None else float(rate)


def describe_weights(path: str) -> str:
    """Which weights a policy folder's are: "average, decay 0.95" for one written with --average-decay, else "as trained"."""
    decay = _meta(path).get("flags", {}).get("average_decay", 0.0)
    return f"average, decay {decay:g}" if decay else "as trained"


def other_rate(path: str, rate: float | None) -> str:
    """One line when a checkpoint was trained at another control rate than `rate`; empty when not, or not known."""
    trained = _meta(path).get("control_rate")
    if rate is None or trained is None or trained == rate:
        return ""
    return (
        f"warning: {path} was trained at {trained:g} targets a second, this environment has {rate:g}: the same chunk is "
        "another movement; evaluate at the rate of the training"
    )


def seen_scenes(path: str, seed: int) -> str:
    """One line when a checkpoint was trained on, or chosen by, the scenes of this seed; otherwise empty."""
    flags = _meta(path).get("flags", {})
    for name, what in (("train_seed", "trained on"), ("val_seed", "validated, and so chosen, on")):
        if flags.get(name) == seed:
            return f"--seed {seed}: {path} was {what} scenes of this seed; its success here says little of new ones"
    return ""


def _meta(path: str) -> Any:
    folder = resolve_checkpoint(path)
    return (read_meta(folder) or {}) if (folder / RECORD).is_file() else {}
