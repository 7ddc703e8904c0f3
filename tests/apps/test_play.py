"""chess-play: what it measures, what it shows, that it renders only for those who look, and how it refuses."""

import functools
import json
import sys
from dataclasses import replace
from pathlib import Path

import av
import gymnasium
import numpy as np
import pytest

import chess_apps.cli
from chess_apps.agents import scripted_agent
from chess_apps.config import PlayConfig
from chess_apps.play import END_SHOWN_FRAMES, run
from chess_env.rendering import OffscreenRenderer
from flowrl.config import EvalConfig
from flowrl.errors import FlowRLError
from flowrl.evaluate import evaluate
from flowrl.plain import play_episode
from flowrl.policy.loading import load_policy
from flowrl.scenes import Scene

CHESS_TINY = Path(__file__).parents[2] / "models" / "chess-tiny"
MEASURES = {
    *("success", "end", "clean_lift", "disturbed", "toppled", "frames", "closest_mm", "close_lateral_mm"),
    *("lift_mm", "return", "piece", "seed", "index", "square", "task"),
}
SHORT = PlayConfig(agent="zero", episodes=2, seconds=0.5, seed=9_300_003)


@pytest.fixture
def no_images(monkeypatch):
    """No OpenGL context can be opened."""

    def refuse(*_):
        raise AssertionError("an image was rendered")

    monkeypatch.setattr(OffscreenRenderer, "__init__", refuse)


@pytest.fixture
def play(tmp_path):
    """Plays with `--json` and returns the file's content."""

    def written(config):
        path = tmp_path / "play.json"
        run(replace(config, json=str(path), overwrite=True))
        return json.loads(path.read_text())

    return written


def decode(path):
    with av.open(str(path)) as container:
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]


def test_expert_is_measured_without_an_image(play, no_images):
    content = play(PlayConfig(agent="expert", episodes=3, first_index=4, distractors=(0, 3)))
    assert [episode["index"] for episode in content["episodes"]] == [4, 5, 6]
    assert content["environment"]["kwargs"]["distractors"] == [0, 3]
    for episode in content["episodes"]:
        assert set(episode) >= MEASURES
        assert episode["clean_lift"] and episode["end"] == "success" and 60 < episode["frames"] < 150
        assert episode["lift_mm"] > 40 and episode["close_lateral_mm"] < 10


def test_success_is_printed_with_its_counts_and_interval(no_images, capsys):
    run(replace(SHORT, episodes=4))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines[:4]] == [f"scene 9300003:{index}" for index in range(4)]
    assert all("timeout after 15 frames" in line for line in lines[:4])
    # Wilson, z = 1.96: 3.84 / (4 + 3.84) = 49.0 %
    assert lines[4] == "success 0/4 = 0.0% (0.0% to 49.0%), clean lifts 0"


@pytest.mark.parametrize("agent", ["random", "zero"])
def test_other_scripted_agents_are_repeatable_and_need_no_image(agent, play, no_images):
    content = play(replace(SHORT, agent=agent))
    assert content == play(replace(SHORT, agent=agent))
    assert all(e["end"] == "timeout" and not e["success"] and e["frames"] == 15 for e in content["episodes"])


def test_zero_agent_leaves_the_arm_where_it_is(no_images):
    env = gymnasium.make("chess_env:ChessPick-v0", observation="state", seconds=4.0)
    seen = []
    play_episode(
        scripted_agent("zero", env),
        env,
        0,
        Scene(3, 0),
        on_step=lambda _: seen.append(env.unwrapped.observe()["agent_pos"]),
    )
    assert len(seen) == 4 and np.abs(np.array(seen) - seen[0]).max() < 0.5  # [deg] and [0..100]
    env.close()


def test_policy_gives_what_flowrl_eval_measures(play, tmp_path, monkeypatch):
    once = functools.cache(lambda path: load_policy(path))  # on the CPU, in the dtype it has

    def load(path, *, device, expert_dtype, rename):
        assert (device.type, expert_dtype, rename) == ("cpu", "loaded", {})
        return once(path)

    monkeypatch.setattr("flowrl.policy.loading.load_policy", load)
    content = play(
        PlayConfig(
            agent="policy",
            policy=str(CHESS_TINY),
            episodes=2,
            seed=9_000_003,
            seconds=2,
            device="cpu",
            torch_threads=1,
        )
    )
    out = tmp_path / "eval"
    kwargs = {"image_size": 128, "distractors": [0, 8]}
    evaluate(
        EvalConfig(
            policy=str(CHESS_TINY),
            episodes=2,
            seconds=2,
            device="cpu",
            torch_threads=1,
            out=str(out),
            env_kwargs=json.dumps(kwargs),
        ),
        load,
    )
    evaluated = json.loads((out / "eval_results.json").read_text())
    assert content["episodes"] == evaluated["episodes"]
    assert {name: content["environment"]["kwargs"][name] for name in kwargs} == kwargs  # from preset.json


def test_video_shows_every_frame_and_holds_the_end(tmp_path):
    path = tmp_path / "new" / "play.mp4"
    run(replace(SHORT, video=str(path)))
    frames = decode(path)
    length = 1 + 15 + END_SHOWN_FRAMES
    assert len(frames) == 2 * length and frames[0].shape == (480, 880, 3)
    first, end = frames[15].astype(int), frames[length - 1].astype(int)
    assert np.abs(first - end).mean() < 1  # the end is held; only the encoder's noise differs
    caption = np.s_[75:95, 60:150]
    assert frames[14][caption].max() < 130 < frames[15][caption].max(), "the end appears at the last frame"
    assert np.abs(frames[length].astype(int) - end).mean() > 1, "another scene follows"
    assert [file.name for file in path.parent.iterdir()] == ["play.mp4"]


def test_a_position_and_a_square_choose_the_piece(play, no_images):
    position = "8/8/8/8/4K3/2q5/8/8"  # a white king on e4, a black queen on c3
    seen = play(replace(SHORT, fen=position, square="c3"))["episodes"]
    assert [(episode["piece"], episode["square"]) for episode in seen] == [("queen", "c3")] * 2
    assert "queen on c3" in seen[0]["task"]


def test_a_square_without_a_piece_is_one_line():
    with pytest.raises(FlowRLError, match="d5"):
        run(replace(SHORT, fen="8/8/8/8/4K3/2q5/8/8", square="d5"))


def test_an_interrupted_run_leaves_no_half_file(tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("chess_apps.play.scripted_agent", lambda *_: interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(replace(SHORT, video=str(tmp_path / "a.mp4"), json=str(tmp_path / "a.json")))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("flag", ["video", "json"])
def test_an_existing_file_is_kept_until_it_may_be_replaced(flag, tmp_path):
    path = tmp_path / ("a.mp4" if flag == "video" else "a.json")
    path.write_text("mine")
    config = replace(SHORT, episodes=1, **{flag: str(path)})
    with pytest.raises(FlowRLError, match=f"--{flag} .*exists; choose another name, or .*--overwrite"):
        run(config)
    assert path.read_text() == "mine"
    run(replace(config, overwrite=True))
    assert path.stat().st_size > 100


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--agent", "wizard"], ["wizard", "expert", "policy"]),
        (["--agent", "policy", "--policy", "no/folder"], ["no/folder", "neither a folder"]),
        (["--policy", "models/chess-tiny"], ["--agent expert", "--agent policy"]),
        (["--episodes", "0"], ["--episodes 0", "at least 1"]),
        (["--seed", "-1"], ["--seed -1"]),
        (["--video", "a.avi"], ["a.avi", ".mp4"]),
        (["--video", "FILE/a.mp4"], ["a.mp4", "cannot be written"]),
        (["--json", "FILE/a.json"], ["a.json", "cannot be written"]),
        (["--json", "."], ["is a folder"]),
        (["--window", "on"], ["--window on", "no display", "--video"]),
        (["--env-kwargs", "{"], ["--env-kwargs", "JSON"]),
        (["--env-kwargs", '{"castles": 2}'], ["castles", "distractors"]),
        (["--distractors", "3", "99"], ["distractors", "99"]),
        (["--speed", "3"], ["--speed"]),
    ],
)
def test_bad_input_is_one_line(flags, words, tmp_path, monkeypatch, capsys):
    (tmp_path / "FILE").write_text("")
    monkeypatch.chdir(tmp_path)
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "argv", ["chess-play", *flags])
    with pytest.raises(SystemExit) as ended:
        chess_apps.cli.play()
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert ended.value.code == 2
    assert line.startswith("chess-play: ") and all(word in line for word in words), line
    assert [file.name for file in tmp_path.iterdir()] == ["FILE"]
