"""Demonstrations as tensors: what the recorder makes, what a LeRobotDataset holds, what cloning reads."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from flowrl.errors import FlowRLError

VIDEO_BACKEND = "pyav"
"""Comes with LeRobot as a wheel; its other decoder needs the system's FFmpeg libraries."""


@dataclass(frozen=True)
class EpisodeRecord:
    """One expert episode.

    ``targets`` are the joint targets of every 30 Hz control frame [deg; gripper 0..100], shape (F, 6), float32.
    Observations were taken before the control frames ``frames``, shape (n,), int32: ``images`` (n, cameras, H, W, 3)
    uint8 and ``state`` (n, 6) float32 in the units of ``targets``.
    """

    index: int
    task: str
    targets: npt.NDArray[np.float32]
    frames: npt.NDArray[np.int32]
    images: npt.NDArray[np.uint8]
    state: npt.NDArray[np.float32]

    def chunks(self, chunk_size: int) -> npt.NDArray[np.float32]:
        """The ``chunk_size`` targets that follow each observation, shape (n, chunk_size, 6).

        Past the end of the episode the last target is held, as the arm itself would hold it.
        """
        last = len(self.targets) - 1
        steps = np.minimum(self.frames[:, None] + np.arange(chunk_size)[None], last)
        return self.targets[steps]


@dataclass(frozen=True)
class Demonstrations:
    """Observation-chunk pairs of many episodes: ``images`` (N, cameras, H, W, 3) uint8, ``state`` (N, 6) float32,
    ``actions`` (N, chunk_size, 6) float32, ``task_index`` (N,) int64 into ``tasks``."""

    cameras: tuple[str, ...]
    images: npt.NDArray[np.uint8]
    state: npt.NDArray[np.float32]
    actions: npt.NDArray[np.float32]
    task_index: npt.NDArray[np.int64]
    tasks: tuple[str, ...]
    num_episodes: int

    def __len__(self) -> int:
        return len(self.state)

    def statistics(self) -> dict[str, dict[str, npt.NDArray[np.float32]]]:
        """Mean and standard deviation per dimension under LeRobot's feature names, float32.

        Images keep LeRobot's identity normalization, so only the state and the action are here.
        """
        actions = self.actions.reshape(-1, self.actions.shape[-1])
        return {
            "observation.state": _moments(self.state),
            "action": _moments(actions),
        }

    @classmethod
    def from_episodes(
        cls, episodes: Iterable[EpisodeRecord], *, cameras: tuple[str, ...], chunk_size: int
    ) -> "Demonstrations":
        images, state, actions, task_index = [], [], [], []
        tasks: dict[str, int] = {}
        count = 0
        for episode in episodes:
            images.append(episode.images)
            state.append(episode.state)
            actions.append(episode.chunks(chunk_size))
            number = tasks.setdefault(episode.task, len(tasks))
            task_index.append(np.full(len(episode.state), number, np.int64))
            count += 1
        if not count:
            raise FlowRLError(
                "no demonstration was recorded: the expert solved none of the scenes; record more episodes"
            )
        return cls(
            cameras=cameras,
            images=np.concatenate(images),
            state=np.concatenate(state),
            actions=np.concatenate(actions),
            task_index=np.concatenate(task_index),
            tasks=tuple(tasks),
            num_episodes=count,
        )

    @classmethod
    def from_lerobot(cls, root: Path, *, chunk_size: int, stride: int) -> "Demonstrations":
        """Every ``stride``-th frame of a LeRobotDataset v3 folder, images decoded once."""
        if not (root / "meta" / "info.json").is_file():
            raise FlowRLError(
                f"{root} is not a LeRobotDataset: meta/info.json is missing; make one with chess-demos"
            )
        from lerobot.datasets.lerobot_dataset import LeRobotDataset

        dataset = LeRobotDataset(repo_id=root.name, root=root, video_backend=VIDEO_BACKEND)
        cameras = tuple(key.removeprefix("observation.images.") for key in dataset.meta.camera_keys)
        columns = dataset.hf_dataset.with_format("numpy", columns=["action", "episode_index", "frame_index"])[
            :
        ]
        episode_of = np.asarray(columns["episode_index"])
        actions = np.stack(columns["action"]).astype(np.float32)
        check_degrees(actions, root)
        return cls.from_episodes(
            (
                _read_episode(dataset, np.flatnonzero(episode_of == number), actions, cameras, stride)
                for number in np.unique(episode_of)
            ),
            cameras=cameras,
            chunk_size=chunk_size,
        )


def check_degrees(actions: npt.NDArray[np.float32], source: Path) -> None:
    """Refuse joint targets, shape (F, 6), that are radians: the five arm joints of a pick pass 3.2 degrees at once.

    Raises:
        FlowRLError: No arm joint's target is beyond half a turn in radians.
    """
    largest = float(np.abs(actions[:, :5]).max())
    if largest <= np.pi:
        raise FlowRLError(
            f"{source}: no arm joint's target exceeds {largest:.2f}, which looks like radians: five joints in degrees and the "
            "gripper in 0 to 100 are needed, as LeRobot records an SO-101 with use_degrees"
        )


def _read_episode(
    dataset,
    rows: npt.NDArray[np.int64],
    actions: npt.NDArray[np.float32],
    cameras: tuple[str, ...],
    stride: int,
) -> EpisodeRecord:
    frames = np.arange(0, len(rows), stride, dtype=np.int32)
    items = [dataset[int(rows[frame])] for frame in frames]
    images = np.stack(
        [
            np.stack([_to_uint8(item[f"observation.images.{camera}"].numpy()) for camera in cameras])
            for item in items
        ]
    )
    state = np.stack([item["observation.state"].numpy() for item in items]).astype(np.float32)
    return EpisodeRecord(
        index=int(items[0]["episode_index"]),
        task=items[0]["task"],
        targets=actions[rows],
        frames=frames,
        images=images,
        state=state,
    )


def _to_uint8(image: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    """(3, H, W) float in [0, 1] to (H, W, 3) uint8."""
    return np.round(image.transpose(1, 2, 0) * 255).astype(np.uint8)


def _moments(values: npt.NDArray[np.float32]) -> dict[str, npt.NDArray[np.float32]]:
    wide = values.astype(np.float64)
    return {
        "mean": wide.mean(0).astype(np.float32),
        "std": wide.std(0).astype(np.float32),
        "min": wide.min(0).astype(np.float32),
        "max": wide.max(0).astype(np.float32),
    }
