"""What the three baselines share: ChessPick-v0 as a learner of vectors sees it, and an evaluation on held-out scenes.

The environment is used as it is registered; what a learner wants otherwise is a wrapper here: actions in [-1, 1] that move
the targets a little, one flat vector of about unit size, and scenes dealt out to several environments.
"""

import json
import math
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

TRAIN_SCENES, TEST_SCENES = 7_700_003, 9_300_003
FRAMES = 6  # of 1/30 s for each decision
LARGEST_MOVE = 6.0  # of a target in one decision [deg; gripper units]: 30 a second
GAMMA = 0.98

Vector = NDArray[np.float32]


@dataclass(frozen=True)
class TaskConfig:
    """The scenes and the reward."""

    distractors: int = 0
    """Black pieces on the board."""
    seconds: float = 8.0
    """Time limit of an episode [s]."""
    reach: float = 1.0
    """Weight of the decrease of the distance to the piece."""
    lift: float = 4.0
    """Weight of the height of the held piece."""
    success: float = 4.0
    """Weight of success."""


class IncrementalPick(gymnasium.Wrapper):
    """ChessPick-v0 with vectors: an action in [-1, 1]^6 moves the six targets by at most `LARGEST_MOVE`, evenly over
    `FRAMES` frames; the observation is the privileged state, the joints and the targets, float32, of about unit size.

    Every reset takes the next scene of `scene_seed`: `first`, `first + stride`, ...; a seed given to it is not used.
    """

    def __init__(self, env: gymnasium.Env, scene_seed: int, first: int = 0, stride: int = 1) -> None:
        super().__init__(env)
        box = env.action_space
        assert isinstance(box, gymnasium.spaces.Box)
        self.low, self.high = box.low[0], box.high[0]
        self.action_space = gymnasium.spaces.Box(-1.0, 1.0, (6,), np.float32)
        size = len(env.get_wrapper_attr("metadata")["environment_state_names"]) + 12
        self.observation_space = gymnasium.spaces.Box(-10.0, 10.0, (size,), np.float32)
        self._scene_seed, self._next, self._stride = scene_seed, first, stride
        self._target = self.low

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Vector, dict[str, Any]]:
        """The next scene."""
        observation, info = self.env.reset(seed=self._scene_seed, options={"index": self._next})
        self._next += self._stride
        self._target = np.clip(observation["agent_pos"], self.low, self.high)
        return self._vector(observation), info

    def step(self, action: Vector) -> tuple[Vector, float, bool, bool, dict[str, Any]]:
        """Move the targets by `LARGEST_MOVE * action`; what lies outside [-1, 1] is clipped."""
        start = self._target
        move = LARGEST_MOVE * np.clip(np.asarray(action, np.float32), -1.0, 1.0)
        self._target = np.clip(start + move, self.low, self.high)
        part = np.arange(1, FRAMES + 1, dtype=np.float32)[:, None] / FRAMES
        chunk = start + part * (self._target - start)
        observation, reward, terminated, truncated, info = self.env.step(chunk)
        return self._vector(observation), float(reward), terminated, truncated, info

    def _vector(self, observation: dict[str, Any]) -> Vector:
        middle, half = (self.high + self.low) / 2, (self.high - self.low) / 2
        joints = (np.stack([observation["agent_pos"], self._target]) - middle) / half
        return np.concatenate([observation["environment_state"], joints.ravel()]).astype(np.float32)


def make_task(
    config: TaskConfig, scene_seed: int = TRAIN_SCENES, first: int = 0, stride: int = 1
) -> IncrementalPick:
    """One environment."""
    env = gymnasium.make(
        "chess_env:ChessPick-v0",
        observation="state",
        chunk_size=FRAMES,
        n_action_steps=FRAMES,
        distractors=config.distractors,
        seconds=config.seconds,
        randomization="none",
        reward={
            "reach": config.reach,
            "lift": config.lift,
            "success": config.success,
            "discount": GAMMA,
        },
    )
    return IncrementalPick(env, scene_seed, first, stride)


def evaluate(act: Callable[[Vector], Vector], config: TaskConfig, episodes: int) -> dict[str, Any]:
    """Success and closest approach of a policy, `act(observation) -> action`, on scenes that no training sees."""
    env = make_task(config, TEST_SCENES)
    records = []
    for _ in range(episodes):
        observation, _ = env.reset()
        terminated = truncated = False
        while not (terminated or truncated):
            observation, _, terminated, truncated, info = env.step(act(observation))
        records.append(info["episode_metrics"])
    env.close()
    successes = sum(record["success"] for record in records)
    low, high = wilson_interval(successes, episodes)
    return {
        "episodes": episodes,
        "successes": successes,
        "success_interval_95": [low, high],
        "mean_return": float(np.mean([record["return"] for record in records])),
        "closest_mm_median": float(np.median([record["closest_mm"] for record in records])),
        "lift_mm_max": float(max(record["lift_mm"] for record in records)),
        "toppled": sum(record["toppled"] for record in records),
    }


def wilson_interval(successes: int, n: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's 95 % interval of a rate.

    Source: Wilson, "Probable inference, the law of succession, and statistical inference" (1927).
    """
    rate = successes / n
    centre = (rate + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(rate * (1 - rate) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return max(centre - half, 0.0), min(centre + half, 1.0)


def random_agent(seed: int) -> Callable[[Vector], Vector]:
    """Uniform actions: what chance reaches."""
    rng = np.random.default_rng(seed)
    return lambda observation: rng.uniform(-1, 1, 6).astype(np.float32)


def write_results(
    out: Path,
    program: str,
    flags: Any,
    task: TaskConfig,
    *,
    steps: int,
    began: float,
    act: Callable[[Vector], Vector],
    episodes: int,
    versions: dict[str, str],
) -> None:
    """Evaluate a trained policy and a random one on the same scenes, and write everything to `out` as JSON.

    Args:
        began: `time.monotonic()` at the start of training [s].
    """
    training_s = time.monotonic() - began
    results = {
        "program": program,
        "flags": {
            name: str(value) if isinstance(value, Path) else value for name, value in vars(flags).items()
        },
        "task": asdict(task),
        "decisions": steps,
        "training_s": round(training_s, 1),
        "evaluation": evaluate(act, task, episodes),
        "random": evaluate(random_agent(0), task, episodes),
        "versions": {**versions, "python": platform.python_version()},
        "machine": platform.processor() or platform.machine(),
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(results, indent=2) + "\n")
    print(json.dumps({name: results[name] for name in ("decisions", "training_s", "evaluation", "random")}))
