"""Episodes of an agent: watched in a window or as a video, or only measured (``chess-play``)."""

import json
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from numpy.typing import NDArray

from chess_apps.agents import Act, PolicyAgent, scripted_agent
from chess_apps.config import PlayConfig
from chess_env.opengl import has_display
from flowrl.config import EvalConfig, check_config, parse_env_kwargs
from flowrl.episode import Episode
from flowrl.errors import FlowRLError
from flowrl.metrics import wilson_interval
from flowrl.plain import play_episode
from flowrl.preset import load_preset, with_preset, with_preset_env_kwargs
from flowrl.record import describe_machine, write_json, writing
from flowrl.scenes import Scene
from flowrl.vector_env import environment_errors, find_spec
from flowrl.video import VideoWriter, rendered_frames

ENV_ID = "chess_env:ChessPick-v0"
DEFAULT_POLICY = "models/chess-tiny"
END_SHOWN_FRAMES = 30
"""The last picture of an episode, which shows its end, stays for a second."""


class ResetOptions(gymnasium.Wrapper):
    """Adds options to every reset."""

    def __init__(self, env: gymnasium.Env, options: dict[str, Any]) -> None:
        super().__init__(env)
        self.options = options

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        return self.env.reset(seed=seed, options={**(options or {}), **self.options})


class WindowClosedError(Exception):
    """The user has closed the window."""


def run(config: PlayConfig) -> None:
    """Play the episodes, print their outcomes, and write what is asked for.

    Raises:
        FlowRLError: bad input, an output file that exists, or no display for a window.
    """
    _check(config)
    for flag_, path in (("--video", config.video), ("--json", config.json)):
        if path:
            _claim(flag_, Path(path), config.overwrite)
    policy = PolicyAgent(_evaluation(config)) if config.agent == "policy" else None
    arguments = policy.arguments if policy else {"observation": "state", **_arguments(config)}
    env = _make_env(config, arguments)
    scenes = [Scene(config.seed, config.first_index + number) for number in range(config.episodes)]
    try:
        act = policy.in_environment(env) if policy else scripted_agent(config.agent, env)
        episodes = _play(config, env, act, scenes)
    finally:
        env.close()
    records = [episode.record() for episode in episodes]
    _summarize(records, len(scenes))
    if config.json:
        device = policy.device if policy else torch.device("cpu")
        _write_records(config, arguments, records, device)


def _play(config: PlayConfig, env: gymnasium.Env, act: Act, scenes: Sequence[Scene]) -> list[Episode]:
    """The episodes that were played to their end, each told in a line; fewer when the window was closed."""
    episodes: list[Episode] = []
    with ExitStack() as stack:
        video = None
        if config.video:
            video = stack.enter_context(VideoWriter(Path(config.video), env.metadata["render_fps"]))
        for number, scene in enumerate(scenes):
            shown: list[NDArray[np.uint8]] = []

            def show(_: Episode, shown: list[NDArray[np.uint8]] = shown) -> None:
                if env.unwrapped.view.window_closed:
                    raise WindowClosedError
                if video is not None:
                    frames = rendered_frames(env)
                    shown[:] = frames[-1:]
                    for frame in frames:
                        video.add(frame)

            try:
                episode = play_episode(act, env, number, scene, on_step=show)
            except WindowClosedError:
                print(f"the window was closed in scene {scene.seed}:{scene.index}")
                break
            if video is not None:
                for _ in range(END_SHOWN_FRAMES):
                    video.add(shown[0])
            episodes.append(episode)
            _tell(episode)
    if config.video:
        print(f"wrote {config.video}")
    return episodes


def _tell(episode: Episode) -> None:
    about, measures = episode.reset_info, episode.metrics
    spoilt = ", ".join(name for name in ("disturbed", "toppled") if measures[name])
    print(
        f"scene {episode.scene.seed}:{episode.scene.index}  {about['piece']} on {about['square']}  "
        f"{measures['end']} after {measures['frames']} frames{f'  ({spoilt})' if spoilt else ''}",
        flush=True,
    )


def _summarize(records: Sequence[dict[str, Any]], num_scenes: int) -> None:
    if not records:
        return
    successes, clean = (sum(record[name] for record in records) for name in ("success", "clean_lift"))
    low, high = wilson_interval(successes, len(records))
    print(
        f"success {successes}/{len(records)} = {successes / len(records):.1%} ({low:.1%} to {high:.1%}), "
        f"clean lifts {clean}"
        + (f"; {num_scenes - len(records)} scenes not played" * (len(records) < num_scenes))
    )


def _write_records(
    config: PlayConfig, arguments: dict[str, Any], records: Sequence[dict[str, Any]], device: torch.device
) -> None:
    spec = find_spec(ENV_ID)
    content = {
        "agent": config.agent,
        "policy": (config.policy or DEFAULT_POLICY) if config.agent == "policy" else None,
        "seed": config.seed,
        "first_index": config.first_index,
        "fen": config.fen or None,
        "environment": {"id": ENV_ID, "kwargs": {**spec.kwargs, **arguments}},
        **describe_machine(device),
        "episodes": records,
    }
    write_json(Path(config.json), content)
    print(f"wrote {config.json}")


def _check(config: PlayConfig) -> None:
    """Bad combinations, before anything is loaded."""
    for name, least in (("episodes", 1), ("seed", 0), ("first_index", 0)):
        value = getattr(config, name)
        if value < least:
            raise FlowRLError(f"--{name.replace('_', '-')} {value}: at least {least} is needed")
    if config.policy and config.agent != "policy":
        raise FlowRLError(f"--policy {config.policy} with --agent {config.agent}: add --agent policy")
    if config.video and Path(config.video).suffix != ".mp4":
        raise FlowRLError(f"--video {config.video}: an .mp4 file is needed")
    if config.window == "on" and config.video:
        raise FlowRLError("--window on with --video: an environment renders one of them; leave one out")
    if config.window == "on" and not has_display():
        raise FlowRLError("--window on: there is no display (DISPLAY is not set); use --video FILE.mp4")


def _claim(flag_: str, path: Path, overwrite: bool) -> None:
    """Refuse a file that exists, and a place where none can be written, before the first episode."""
    if path.is_dir():
        raise FlowRLError(f"{flag_} {path}: is a folder; name a file in it")
    if path.exists() and not overwrite:
        raise FlowRLError(f"{flag_} {path}: exists; choose another name, or replace it with --overwrite")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        probe = path.with_name(f".{path.name}.tmp")
        probe.touch()
        probe.unlink()


def _arguments(config: PlayConfig) -> dict[str, Any]:
    """The environment's arguments that flags give."""
    given = parse_env_kwargs(config.env_kwargs)
    for name in ("distractors", "image_size", "seconds"):
        if getattr(config, name) is not None:
            given[name] = getattr(config, name)
    if config.fen:
        given.setdefault("pieces", "all")
    return given


def _evaluation(config: PlayConfig) -> EvalConfig:
    """The evaluation that these flags mean, with the policy's preset as `flowrl-eval` applies it."""
    path = config.policy or DEFAULT_POLICY
    preset = load_preset(path)
    given = EvalConfig(
        policy=path,
        env_id=ENV_ID,
        env_kwargs=json.dumps(_arguments(config)),
        device=config.device,
        torch_threads=config.torch_threads,
    )
    settled = with_preset_env_kwargs(with_preset(given, preset), preset)
    check_config(settled)
    return settled


def _make_env(config: PlayConfig, arguments: dict[str, Any]) -> gymnasium.Env:
    """The environment with the render mode for what is asked for."""
    find_spec(ENV_ID)
    window = config.window == "on" or (
        config.window == "auto" and has_display() and not config.video and not config.json
    )
    render_mode = "rgb_array_list" if config.video else "human" if window else None
    with environment_errors("making the environment"):
        env = gymnasium.make(ENV_ID, render_mode=render_mode, **arguments)
    position = {name: getattr(config, name) for name in ("fen", "square") if getattr(config, name)}
    return ResetOptions(env, position) if position else env
