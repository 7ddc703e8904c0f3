"""Widths and statistics of a very small SmolVLA for tests."""

import numpy as np

from flowrl.policy.tiny import SmolVLASize

SMALL = SmolVLASize(64, 2, 2, 1, 32, 128, 64, 2, 2, 128, image_size=64)


def statistics(seed: int = 0) -> dict:
    """Normalization statistics of joints in degrees."""
    rng = np.random.default_rng(seed)
    return {
        name: {"mean": rng.normal(size=6) * 30, "std": rng.uniform(5, 30, size=6)}
        for name in ("observation.state", "action")
    }
