"""The global random generators of torch, numpy and Python.

flowrl's own draws are functions of scene, decision and iteration and need none of them; a policy or an environment of
another library may. They are seeded at a run's start, stored in its checkpoints and restored when it is resumed.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class RandomState:
    """State of all generators: `tensors` (on the CPU) and plain `values`, both for a checkpoint."""

    tensors: dict[str, Tensor]
    values: dict[str, Any]


def seed_all(seed: int) -> None:
    """Seeds the generators of torch (all devices), numpy and Python."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
    random.seed(seed)


def random_state(device: torch.device) -> RandomState:
    """The generators' state now; of the GPUs' generators, the one of `device`."""
    of_numpy = np.random.get_state(legacy=False)  # noqa: NPY002
    version, words, next_gauss = random.getstate()
    tensors = {
        "torch": torch.get_rng_state(),
        "numpy": torch.tensor(of_numpy["state"]["key"].astype(np.int64)),
        "python": torch.tensor(words, dtype=torch.int64),
    }
    if device.type == "cuda":
        tensors["cuda"] = torch.cuda.get_rng_state(device)
    values = {
        "numpy": [of_numpy["state"]["pos"], of_numpy["has_gauss"], of_numpy["gauss"]],
        "python": [version, next_gauss],
    }
    return RandomState(tensors, values)


def restore_random_state(
    tensors: Mapping[str, Tensor], values: Mapping[str, Any], device: torch.device
) -> None:
    """Sets the generators to a stored state. A GPU's stays as it is when the stored run had none."""
    torch.set_rng_state(tensors["torch"])
    keys = tensors["numpy"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", keys, *values["numpy"]))  # noqa: NPY002
    version, next_gauss = values["python"]
    random.setstate((version, tuple(tensors["python"].tolist()), next_gauss))
    if device.type == "cuda" and "cuda" in tensors:
        torch.cuda.set_rng_state(tensors["cuda"], device)
