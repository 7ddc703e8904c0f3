"""Gymnasium's spaces of the environment: joint targets in, images or a state vector and joint positions out."""

from __future__ import annotations

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from chess_env import so101
from chess_env.config import EnvConfig
from chess_env.state import POSITION_LIMIT_M, state_names

CAMERAS = ("top", "wrist")
MEASURED_MARGIN = 5.0  # a servo gives way beyond its limit by a fraction of this [deg or gripper units]


def joint_bounds() -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Lowest and highest joint target, each of shape (6,): five joints [deg], gripper 0 to 100."""
    low, high = so101.unit_limits()
    return low.astype(np.float32), high.astype(np.float32)


def chunk_space(chunk_size: int) -> spaces.Box:
    """Chunks of joint targets, shape (chunk_size, 6)."""
    low, high = (np.tile(bound, (chunk_size, 1)) for bound in joint_bounds())
    return spaces.Box(low, high, low.shape, np.float32)


def target_space() -> spaces.Box:
    """Single joint targets, shape (6,)."""
    low, high = joint_bounds()
    return spaces.Box(low, high, low.shape, np.float32)


def observation_space(config: EnvConfig) -> spaces.Dict:
    """Images or the state vector, and the measured joint positions."""
    low, high = joint_bounds()
    agent_pos = spaces.Box(low - MEASURED_MARGIN, high + MEASURED_MARGIN, dtype=np.float32)
    if config.observation == "state":
        size = len(state_names(config.distractors[1], config.pieces))
        state = spaces.Box(-POSITION_LIMIT_M, POSITION_LIMIT_M, (size,), np.float32)
        return spaces.Dict({"environment_state": state, "agent_pos": agent_pos})
    images = {name: spaces.Box(0, 255, (*config.image_size, 3), np.uint8) for name in CAMERAS}
    return spaces.Dict({"pixels": spaces.Dict(images), "agent_pos": agent_pos})
