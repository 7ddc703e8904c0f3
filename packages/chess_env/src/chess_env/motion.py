"""Joint targets [rad] at 30 Hz, grown segment by segment."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from chess_env.config import CONTROL_HZ
from chess_env.kinematics import NUM_ARM_JOINTS

CLOSE_ANGLE = -0.1  # gripper command of a grasp [rad]; 0 and above lose pawns


class Path:
    """A path that begins at ``start`` [rad], shape (6,), and keeps near ``speed`` [rad/s]."""

    def __init__(self, start: ArrayLike, speed: float) -> None:
        self.last = np.array(start, dtype=np.float64)
        self._speed = speed
        self._targets: list[NDArray[np.float64]] = []

    def __len__(self) -> int:
        return len(self._targets)

    def targets(self) -> NDArray[np.float64]:
        return np.array(self._targets)

    def hold(self, num_frames: int) -> None:
        self._targets += [self.last.copy() for _ in range(num_frames)]

    def ease(self, to: NDArray[np.float64], least_frames: int) -> None:
        """Smoothly to ``to``; a peak of 1.3 times the mean speed stays near the limit."""
        furthest = float(np.abs(to[:NUM_ARM_JOINTS] - self.last[:NUM_ARM_JOINTS]).max())
        num_frames = max(math.ceil(1.3 * furthest / self._speed * CONTROL_HZ), least_frames)
        u = (np.arange(1, num_frames + 1) / num_frames)[:, None]
        self._extend(self.last + (to - self.last) * (u * u * (3 - 2 * u)))

    def follow(self, nodes: NDArray[np.float64], gripper: float, num_frames: int) -> None:
        """At even speed through arm poses, shape (n, 5); the first is where the arm is."""
        at = np.arange(1, num_frames + 1) / num_frames * (len(nodes) - 1)
        arm = np.column_stack([np.interp(at, np.arange(len(nodes)), column) for column in nodes.T])
        self._extend(np.column_stack([arm, np.full(num_frames, gripper)]))

    def close(self, num_frames: int, shift: int = 0) -> None:
        """Close the gripper; ``shift`` frames late, or early, while the arm still moves."""
        self.hold(max(shift, 0))
        first = self.last[5]
        ramp = first + (CLOSE_ANGLE - first) * np.arange(1, num_frames + 1) / num_frames
        for angle in ramp:
            self._extend(np.append(self.last[:5], angle)[None])
        early = min(max(-shift, 0), len(self._targets) - num_frames)
        if early:  # the closing begins that many frames before the arm has stopped
            for index in range(len(self._targets) - num_frames - early, len(self._targets)):
                done = index - (len(self._targets) - num_frames - early)
                self._targets[index][5] = ramp[min(done, num_frames - 1)]

    def _extend(self, targets: NDArray[np.float64]) -> None:
        self._targets += list(targets)
        self.last = targets[-1].copy()
