"""Recording: pure functions of (seed, index), kept episodes are clean lifts, datasets are LeRobot's."""

import json
import resource
from dataclasses import replace

import numpy as np
import pytest

from chess_apps.config import DemosConfig, RecordConfig
from chess_apps.demonstrations import Demonstrations
from chess_apps.demos import record_dataset
from chess_apps.recording import Recorder, record_episodes
from chess_env import so101
from chess_env.errors import ChessEnvError
from flowrl.errors import FlowRLError

SMALL = RecordConfig(episodes=3, image_size=32, distractors=(0, 3), workers=2)


def assert_equal(a, b):
    assert (a.index, a.task) == (b.index, b.task)
    for name in ("targets", "frames", "images", "state"):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name))


@pytest.fixture(scope="module")
def episodes():
    with Recorder(SMALL, stride=6) as recorder:
        return [recorder.record(index) for index in range(3)]


def test_an_episode_depends_on_its_scene_alone(episodes):
    with Recorder(SMALL, stride=6) as recorder:
        again = [recorder.record(index) for index in (2, 0)]
    assert_equal(again[0], episodes[2])
    assert_equal(again[1], episodes[0])


def test_workers_record_the_same_episodes_in_order(episodes):
    pooled = list(record_episodes(SMALL, stride=6))
    kept = [episode for episode in episodes if episode is not None]
    assert len(pooled) == len(kept) > 0
    for a, b in zip(pooled, kept):
        assert_equal(a, b)


def test_observations_are_every_sixth_frame_and_the_first(episodes):
    for episode in episodes:
        assert episode.frames[0] == 0
        assert set(np.diff(episode.frames[1:])) == {6}
        assert len(episode.frames) == len(episode.images) == len(episode.state)


def test_targets_are_inside_the_action_space(episodes):
    low, high = so101.unit_limits()
    for episode in episodes:
        assert episode.targets.dtype == np.float32
        assert (episode.targets >= low - 1e-4).all() and (episode.targets <= high + 1e-4).all()


def test_recorded_targets_lift_the_piece_again_in_the_environment():
    """What was recorded, replayed as chunks of actions, solves the same scene."""
    from chess_env.env import ChessPickEnv

    config = RecordConfig(image_size=32, distractors=(0, 3), near_fraction=0.0)
    with Recorder(config, stride=6) as recorder:
        episode = recorder.record(1)
    env = ChessPickEnv(observation="state", distractors=(0, 3))
    env.reset(seed=config.seed, options={"index": 1})
    ended = False
    for first in range(0, 600, 50):
        rows = np.minimum(np.arange(first, first + 50), len(episode.targets) - 1)
        _, _, terminated, truncated, info = env.step(episode.targets[rows])
        ended = terminated or truncated
        if ended:
            break
    env.close()
    assert ended and info["episode_metrics"]["clean_lift"]


def test_a_sloppy_expert_aims_beside_the_piece_and_still_records_lifts():
    sloppy = RecordConfig(
        image_size=32, distractors=(0, 0), aim_error_mm=5.0, hesitation_frames=20, close_shift_frames=4
    )
    plain = RecordConfig(image_size=32, distractors=(0, 0))
    with Recorder(sloppy, stride=6) as a, Recorder(plain, stride=6) as b:
        pairs = [(a.record(index), b.record(index)) for index in range(4)]
    both = [(x, y) for x, y in pairs if x is not None and y is not None]
    assert both
    assert any(len(x.targets) > len(y.targets) for x, y in both)
    assert all(not np.array_equal(x.targets[: len(y.targets)], y.targets[: len(x.targets)]) for x, y in both)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    out = tmp_path_factory.mktemp("demos") / "picks"
    return record_dataset(DemosConfig(out=str(out), record=SMALL))


def test_a_dataset_is_read_by_lerobot_and_holds_exact_images(dataset):
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    with Recorder(SMALL, stride=1) as recorder:
        first = recorder.record(0)
    held = LeRobotDataset("picks", root=dataset, video_backend="pyav")
    assert held.num_episodes == 3 and held.fps == 30
    assert held.meta.robot_type == "so101"
    item = held[5]
    assert item["task"] == "Pick up the white chess piece."
    np.testing.assert_array_equal(item["action"].numpy(), first.targets[5])
    np.testing.assert_array_equal(item["observation.state"].numpy(), first.state[5])
    top = np.round(item["observation.images.top"].numpy().transpose(1, 2, 0) * 255).astype(np.uint8)
    np.testing.assert_array_equal(top, first.images[5, 0])


def test_cloning_reads_from_a_dataset_what_was_recorded(dataset):
    demos = Demonstrations.from_lerobot(dataset, chunk_size=50, stride=6)
    with Recorder(SMALL, stride=1) as recorder:
        first = recorder.record(0)
    count = -(-len(first.targets) // 6)
    np.testing.assert_array_equal(demos.images[:count], first.images[::6])
    np.testing.assert_array_equal(demos.state[:count], first.state[::6])
    np.testing.assert_array_equal(
        demos.actions[0], first.targets[np.minimum(np.arange(50), len(first.targets) - 1)]
    )
    assert demos.cameras == ("top", "wrist")


def test_a_used_folder_is_refused(dataset):
    with pytest.raises(FlowRLError, match="exists already"):
        record_dataset(DemosConfig(out=str(dataset), record=SMALL))


def test_an_interrupted_recording_is_continued_and_not_mixed(tmp_path, dataset):
    """A complete block of an earlier, killed run is kept; other settings are refused."""
    out = tmp_path / "picks"
    parts = tmp_path / "picks.parts"
    config = DemosConfig(out=str(out), record=SMALL)
    from chess_apps import demos

    demos._claim(parts, config)
    demos._record_block(config, parts, (0, 3))
    before = (parts / "block-000000" / "meta" / "info.json").stat().st_mtime_ns
    other = DemosConfig(out=str(out), record=RecordConfig(episodes=3, image_size=48, distractors=(0, 3)))
    with pytest.raises(FlowRLError, match="other settings"):
        record_dataset(other)
    assert (parts / "block-000000" / "meta" / "info.json").stat().st_mtime_ns == before
    record_dataset(config)
    assert not parts.exists()
    info = json.loads((out / "meta" / "info.json").read_text())
    assert (
        info["total_episodes"] == json.loads((dataset / "meta" / "info.json").read_text())["total_episodes"]
    )


def test_no_dataset_is_one_line(tmp_path):
    with pytest.raises(FlowRLError, match=r"info\.json is missing; make one with chess-demos"):
        Demonstrations.from_lerobot(tmp_path, chunk_size=50, stride=6)


def test_a_dataset_in_radians_is_refused(tmp_path):
    with Recorder(SMALL, stride=1) as recorder:  # a dataset has every frame
        episode = recorder.record(0)
    from chess_apps import demos

    demos._write(
        tmp_path / "radians",
        [replace(episode, targets=np.radians(episode.targets))],
        DemosConfig(out="x", record=SMALL),
    )
    with pytest.raises(FlowRLError, match="looks like radians: five joints in degrees"):
        Demonstrations.from_lerobot(tmp_path / "radians", chunk_size=50, stride=6)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"episodes": 0}, "--record.episodes 0: at least 1"),
        ({"workers": 0}, "--record.workers 0: at least 1"),
        ({"near_fraction": 1.5}, "--record.near-fraction 1.5: a share from 0 to 1"),
        ({"image_size": 5}, "image_size=5"),
        ({"distractors": (3, 99)}, r"distractors=\(3, 99\)"),
        ({"seed": -1}, "seed=-1"),
        ({"first_index": -1}, "first_index=-1"),
        ({"variety": -1.0}, "variety=-1.0"),
    ],
)
def test_a_wrong_flag_is_one_readable_line_and_leaves_nothing(flags, message, tmp_path):
    config = DemosConfig(out=str(tmp_path / "picks"), record=replace(SMALL, **flags))
    with pytest.raises((FlowRLError, ChessEnvError), match=message) as caught:
        record_dataset(config)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_place_where_nothing_can_be_written_is_one_readable_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FlowRLError, match=r"picks.parts: cannot be written \(Not a directory\)"):
        record_dataset(DemosConfig(out=str(tmp_path / "file" / "picks"), record=SMALL))


@pytest.mark.slow
def test_a_disk_that_fills_is_one_readable_line_and_the_same_command_continues(tmp_path, dataset):
    config = DemosConfig(out=str(tmp_path / "picks"), record=SMALL)
    parquet = max(path.stat().st_size for path in dataset.rglob("*.parquet"))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (parquet // 2, before[1]))
    try:
        with pytest.raises(FlowRLError, match=r"cannot be written .*; nothing written before is lost"):
            record_dataset(config)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not (tmp_path / "picks").exists() and not list((tmp_path / "picks.parts").glob("block-*"))
    record_dataset(config)
    assert [path.name for path in tmp_path.iterdir()] == ["picks"]
