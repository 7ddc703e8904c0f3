"""Videos of evaluated episodes: which files, how many frames, what the last one shows, and that results stay as they are."""

import json
from dataclasses import replace

import av
import numpy as np
import pytest
from toy_rendering import FIRST_GREY, GREY_STEP, picture

from flowrl.config import EvalConfig
from flowrl.errors import FlowRLError
from flowrl.evaluate import evaluate
from flowrl.video import VideoWriter, find_encoder
from toy import load_toy

STEPS, FRAMES = "toy_rendering:ToyStepPicture-v0", "toy_rendering:ToyFramePictures-v0"
CONFIG = EvalConfig(policy="no-folder", env_id=FRAMES, episodes=5, workers=2, device="cpu")


def load(path, *, device, expert_dtype, rename):
    return load_toy(path, device)


def decode(path):
    """Frames of a video, uint8 (n, height, width, 3)."""
    with av.open(str(path)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def results(config):
    return json.loads((evaluate(config, load) / "eval_results.json").read_text())


def videos(out):
    return sorted((out / "videos").iterdir()) if (out / "videos").exists() else []


@pytest.mark.parametrize(("env_id", "fast"), [(FRAMES, False), (STEPS, False), (FRAMES, True)])
def test_a_video_holds_the_start_and_every_frame_and_ends_with_the_terminal_one(env_id, fast, tmp_path):
    config = replace(CONFIG, env_id=env_id, fast=fast, video_episodes=3, out=str(tmp_path))
    records = results(config)["episodes"]
    files = videos(tmp_path)
    assert len(files) == 3
    for path, record in zip(files, records):
        frames = decode(path)
        executed = [4] * (record["decisions"] - 1) + [2 if record["success"] else 4]
        number = sum(executed) if env_id == FRAMES else record["decisions"]
        assert len(frames) == 1 + number
        grey = frames.mean(axis=(1, 2, 3))
        assert np.abs(grey - FIRST_GREY - GREY_STEP * np.arange(1 + number)).max() < 2
        assert frames.shape[1:3] == (32, 46)  # an odd side is doubled by one row


def test_file_names_hold_seed_index_and_outcome(tmp_path):
    records = results(replace(CONFIG, video_episodes=5, out=str(tmp_path)))["episodes"]
    outcomes = ["success" if record["success"] else "failure" for record in records]
    assert len(set(outcomes)) == 2
    assert [path.name for path in videos(tmp_path)] == [
        f"seed9000003-index{index:04d}-{outcome}.mp4" for index, outcome in enumerate(outcomes)
    ]


@pytest.mark.parametrize("fast", [False, True])
def test_results_are_the_same_with_and_without_videos(fast, tmp_path):
    config = replace(CONFIG, fast=fast)
    without = results(replace(config, out=str(tmp_path / "without")))
    with_ = results(replace(config, video_episodes=2, out=str(tmp_path / "with")))
    assert without == with_
    assert not videos(tmp_path / "without")


def test_finished_results_get_the_missing_videos_alone(tmp_path):
    config = replace(CONFIG, out=str(tmp_path), fast=True)
    evaluate(config, load)
    written = (tmp_path / "eval_results.json").stat().st_mtime_ns

    def refuse(*_, **__):
        raise AssertionError("the policy is not needed for a video")

    evaluate(replace(config, video_episodes=1), refuse)
    (first,) = videos(tmp_path)
    stamp = first.stat().st_mtime_ns
    evaluate(replace(config, video_episodes=3), refuse)
    assert len(videos(tmp_path)) == 3 and first.stat().st_mtime_ns == stamp
    videos(tmp_path)[1].unlink()
    evaluate(replace(config, video_episodes=3), refuse)
    assert len(videos(tmp_path)) == 3 and first.stat().st_mtime_ns == stamp
    assert (tmp_path / "eval_results.json").stat().st_mtime_ns == written


def test_an_environment_without_pictures_is_refused_before_the_evaluation(tmp_path):
    config = replace(CONFIG, env_id="toy_env:ToyReach-v0", video_episodes=1, out=str(tmp_path))
    with pytest.raises(FlowRLError, match="renders nothing; rgb_array_list or rgb_array is needed"):
        evaluate(config, load)
    assert not (tmp_path / "eval_results.json").exists()


def test_an_episode_that_does_not_repeat_itself_gets_no_video_and_keeps_its_results(tmp_path):
    config = replace(CONFIG, env_id="toy_rendering:ToyForgetful-v0", video_episodes=1, out=str(tmp_path))
    with pytest.raises(FlowRLError, match="no function of seed and actions"):
        evaluate(config, load)
    assert (tmp_path / "eval_results.json").exists() and not videos(tmp_path)


def test_results_of_a_version_without_actions_say_what_to_do(tmp_path):
    config = replace(CONFIG, out=str(tmp_path))
    evaluate(config, load)
    (tmp_path / "actions.safetensors").unlink()
    with pytest.raises(FlowRLError, match="evaluate anew into another --out"):
        evaluate(replace(config, video_episodes=1), load)


def test_a_video_that_is_broken_off_leaves_no_file(tmp_path):
    path = tmp_path / "videos" / "a.mp4"
    with pytest.raises(RuntimeError, match="on the way"), VideoWriter(path, 30) as video:
        for number in range(10):
            video.add(picture(number))
        assert not path.exists()
        raise RuntimeError("on the way")
    assert list(path.parent.iterdir()) == []
    with VideoWriter(path, 30):
        pass
    assert list(path.parent.iterdir()) == []  # no frames, no file
    with VideoWriter(path, 30) as video:
        video.add(picture(0))
    assert [file.name for file in path.parent.iterdir()] == ["a.mp4"]


def test_colours_are_neither_swapped_nor_upside_down(tmp_path):
    image = np.zeros((64, 64, 3), np.uint8)
    image[:32, :32], image[32:, 32:] = (255, 0, 0), (0, 0, 255)
    with VideoWriter(tmp_path / "a.mp4", 30) as video:
        video.add(image)
    (frame,) = decode(tmp_path / "a.mp4")
    inner = [np.s_[8:24, 8:24], np.s_[40:56, 40:56], np.s_[8:24, 40:56]]
    red, blue, black = (frame[part].mean(axis=(0, 1)) for part in inner)
    assert np.abs(red - [255, 0, 0]).max() < 12
    assert np.abs(blue - [0, 0, 255]).max() < 12
    assert black.max() < 12


def test_missing_encoders_and_unwritable_places_are_one_line(tmp_path):
    with pytest.raises(FlowRLError, match=r"no encoder nonsense or libdav1d: .*leave videos out"):
        find_encoder(("nonsense", "libdav1d"))  # the latter decodes only
    (tmp_path / "file").write_text("")
    with pytest.raises(FlowRLError, match="cannot be written"), VideoWriter(tmp_path / "file" / "a.mp4", 30):
        pass
