"""Expert episodes as a LeRobotDataset v3 (``chess-demos``).

The scenes are cut into blocks. A worker records a block into a dataset of its own beside the target
(``<out>.parts/block-0007``), which appears under that name only when it is complete; at the end the blocks are
merged in order. A killed run is continued by the same command: complete blocks are kept, and since a scene and
the expert's motion are pure functions of (seed, index) the result does not depend on who recorded what when.
"""

import json
import os
import shutil
from concurrent.futures import as_completed
from dataclasses import asdict
from pathlib import Path

from tqdm import tqdm

from chess_apps.config import DemosConfig, RecordConfig
from chess_apps.demonstrations import VIDEO_BACKEND, EpisodeRecord
from chess_apps.recording import CAMERAS, FPS, JOINT_NAMES, Recorder, check_recording, worker_pool
from flowrl.errors import FlowRLError
from flowrl.record import writing

BLOCK_EPISODES = 25
"""Scenes in a block: what a killed run loses at most, for each worker."""


def record_dataset(config: DemosConfig) -> Path:
    """Record ``config.record.episodes`` scenes into the LeRobotDataset folder ``config.out``.

    Raises:
        FlowRLError: the folder exists already or cannot be written, an unfinished recording there was made with other
            settings, or a flag is outside what is allowed.
    """
    out = Path(config.out)
    if out.exists():
        raise FlowRLError(f"--out {out} exists already; choose another folder or remove it")
    check_recording(config.record)
    parts = out.with_name(out.name + ".parts")
    with writing(parts):
        _claim(parts, config)
    record = config.record
    blocks = [
        (first, min(BLOCK_EPISODES, record.first_index + record.episodes - first))
        for first in range(record.first_index, record.first_index + record.episodes, BLOCK_EPISODES)
    ]
    missing = [block for block in blocks if not _block_folder(parts, block[0]).exists()]
    done = sum(size for block, size in blocks) - sum(size for block, size in missing)
    with (
        writing(out),
        worker_pool(min(record.workers, max(len(missing), 1))) as pool,
        tqdm(total=record.episodes, initial=done, desc="recording", unit="scene", disable=None) as bar,
    ):
        for finished in as_completed([pool.submit(_record_block, config, parts, block) for block in missing]):
            bar.update(finished.result())
    folders = [_block_folder(parts, first) for first, _ in blocks]
    with writing(out):
        _merge([folder for folder in folders if (folder / "meta" / "info.json").is_file()], out)
    shutil.rmtree(parts)
    return out


def _claim(parts: Path, config: DemosConfig) -> None:
    settings = asdict(config.record) | {"video": config.video}
    settings.pop("workers")
    path = parts / "settings.json"
    if path.is_file() and json.loads(path.read_text()) != json.loads(json.dumps(settings)):
        raise FlowRLError(
            f"{parts} holds an unfinished recording with other settings; use the same flags or remove that folder"
        )
    for unfinished in parts.glob("unfinished-*"):  # of a killed run, or of one whose disk was full
        shutil.rmtree(unfinished)
    parts.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(settings, indent=1) + "\n")


def _block_folder(parts: Path, first: int) -> Path:
    return parts / f"block-{first:06d}"


def _record_block(config: DemosConfig, parts: Path, block: tuple[int, int]) -> int:
    """Runs in a worker: record one block, and give it its name when it is complete."""
    first, size = block
    folder, unfinished = _block_folder(parts, first), parts / f"unfinished-{first:06d}-{os.getpid()}"
    record: RecordConfig = config.record
    with Recorder(record, stride=1) as recorder:
        episodes = [recorder.record(index) for index in range(first, first + size)]
    kept = [episode for episode in episodes if episode is not None]
    if kept:
        _write(unfinished, kept, config)
    else:
        unfinished.mkdir()
    unfinished.rename(folder)
    return size


def _features(image_size: int, video: bool) -> dict[str, dict]:
    image = {
        "dtype": "video" if video else "image",
        "shape": (image_size, image_size, 3),
        "names": ["height", "width", "channels"],
    }
    joints = {"dtype": "float32", "shape": (len(JOINT_NAMES),), "names": list(JOINT_NAMES)}
    return {
        "observation.state": joints,
        "action": dict(joints),
        **{f"observation.images.{camera}": dict(image) for camera in CAMERAS},
    }


def _write(root: Path, episodes: list[EpisodeRecord], config: DemosConfig) -> None:
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    dataset = LeRobotDataset.create(
        repo_id=Path(config.out).name,
        fps=FPS,
        features=_features(config.record.image_size, config.video),
        root=root,
        robot_type="so101",
        use_videos=config.video,
        video_backend=VIDEO_BACKEND,
    )
    for episode in episodes:
        for frame in range(len(episode.targets)):
            dataset.add_frame(
                {
                    "observation.state": episode.state[frame],
                    "action": episode.targets[frame],
                    "task": episode.task,
                    **{
                        f"observation.images.{camera}": episode.images[frame, number]
                        for number, camera in enumerate(CAMERAS)
                    },
                }
            )
        dataset.save_episode()
    dataset.finalize()


def _merge(folders: list[Path], out: Path) -> None:
    if not folders:
        raise FlowRLError(
            "the expert solved none of the scenes, so there is nothing to write; record more episodes"
        )
    from lerobot.datasets.aggregate import aggregate_datasets

    unfinished = out.with_name(out.name + ".unfinished")
    if unfinished.exists():
        shutil.rmtree(unfinished)
    aggregate_datasets(
        repo_ids=[folder.name for folder in folders],
        aggr_repo_id=out.name,
        roots=folders,
        aggr_root=unfinished,
    )
    unfinished.rename(out)
