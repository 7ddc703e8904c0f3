"""Which scene an episode gets: training scenes that are never used twice, and fixed ones for validation."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from flowrl.config import TEST_SEED, TrainConfig
from flowrl.errors import FlowRLError

DERIVED_SEED_BITS = 31
NUM_TEST_SCENES = 1000
"""Test scenes that training and validation are kept apart from, where an environment knows no index."""
DERIVED_SEED_STEP = (
    0x3C6EF372 | 1
)  # odd, so that index -> seed is one to one; from the golden ratio, so that ranges rarely meet


@dataclass(frozen=True)
class Scene:
    """One scene: a pure function of (seed, index), in environments that know indices."""

    seed: int
    index: int

    @property
    def derived_seed(self) -> int:
        """Seed of the episode where the environment knows no index: distinct for every index of one seed, 31 bits."""
        return (self.seed + self.index * DERIVED_SEED_STEP) % 2**DERIVED_SEED_BITS

    @property
    def torch_seed(self) -> int:
        """Seed of the policy's noise where the environment gives none in `info["torch_seed"]`, 63 bits."""
        words = np.random.SeedSequence([self.seed, self.index]).generate_state(2, np.uint32)
        return (int(words[0]) << 31) ^ int(words[1])


def fixed_scenes(seed: int, num_scenes: int) -> list[Scene]:
    """The scenes with index 0, 1, ..., the same on every call."""
    return [Scene(seed, index) for index in range(num_scenes)]


def training_scenes(seed: int, next_index: int, num_scenes: int) -> list[Scene]:
    """The scenes from `next_index` on; the caller goes on behind them and so uses none twice."""
    return [Scene(seed, index) for index in range(next_index, next_index + num_scenes)]


def overlap(scenes: Sequence[Scene], others: Sequence[Scene]) -> set[int]:
    """Derived seeds that two lists of scenes share, for environments that know no index."""
    return {scene.derived_seed for scene in scenes} & {scene.derived_seed for scene in others}


def check_disjoint(config: TrainConfig) -> None:
    """Where scenes are told apart by seeds alone, those of training, validation and test must not share one.

    Raises:
        FlowRLError: two of them do.
    """
    training = training_scenes(config.train_seed, 0, config.iterations * config.episodes)
    validation = fixed_scenes(config.val_seed, config.val_episodes)
    test = fixed_scenes(TEST_SEED, NUM_TEST_SCENES)
    for name, seed, scenes, others, what in (
        ("val-seed", config.val_seed, validation, training, "training"),
        ("val-seed", config.val_seed, validation, test, "test"),
        ("train-seed", config.train_seed, training, test, "test"),
    ):
        if shared := overlap(scenes, others):
            raise FlowRLError(f"--{name} {seed}: {len(shared)} of its seeds are {what} seeds; choose another")
