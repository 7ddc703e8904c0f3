"""Episodes of an agent: watched in a window or as a video, or only measured (``chess-play``)."""

import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

from chess_apps.config import PlayConfig
from chess_env.env import ChessPickEnv
from chess_env.expert import Expert, ExpertAgent
from chess_env.opengl import has_display
from flowrl.config import EvalConfig, check_config, parse_env_kwargs, parse_rename
from flowrl.errors import FlowRLError
from flowrl.metrics import wilson_interval
from flowrl.plain import play_episode, predict_chunk
from flowrl.preset import load_preset, with_preset, with_preset_env_kwargs
from flowrl.record import describe_machine, write_json, writing
from flowrl.rollout import Episode
from flowrl.scenes import Scene
from flowrl.train import prepare_torch
from flowrl.vector_env import check_spaces, environment_errors, find_spec, resolve_env_kwargs
from flowrl.video import VideoWriter, rendered_frames

ENV_ID = "chess_env:ChessPick-v0"
DEFAULT_POLICY = "models/chess-tiny"
END_SHOWN_FRAMES = 30
"""The last picture of an episode, which shows its end, stays for a second."""

Act = Callable[[Any, Episode], NDArray[np.float32]]


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
    agent = _Policy(config) if config.agent == "policy" else None
    arguments = agent.arguments if agent else {"observation": "state", **_arguments(config)}
    env = _make_env(config, arguments)
    scenes = [Scene(config.seed, config.first_index + number) for number in range(config.episodes)]
    try:
        if agent:
            check_spaces(env, agent.policy.spec)
        act = agent.act if agent else scripted_agent(config.agent, env)
        episodes = _play(config, env, act, scenes)
    finally:
        env.close()
    records = [episode.record() for episode in episodes]
    _summarize(records, len(scenes))
    if config.json:
        _write_records(config, arguments, records)


def scripted_agent(name: str, env: gymnasium.Env) -> Act:
    """The agent "expert", "random" or "zero"; what it does in a scene is a function of the scene alone."""
    agents: dict[str, Callable[[gymnasium.Env], Act]] = {"expert": _Expert, "random": _Random, "zero": _Zero}
    return agents[name](env)


class _Expert:
    """The scripted pick, which reads the simulation and no observation."""

    def __init__(self, env: gymnasium.Env) -> None:
        base = env.unwrapped
        assert isinstance(base, ChessPickEnv)
        self._env = base
        self._expert: Expert | None = None

    def __call__(self, observation: Any, episode: Episode) -> NDArray[np.float32]:
        simulation, config = self._env.simulation, self._env.config
        if not episode.rewards:
            if self._expert is None or self._expert.scene is not simulation.scene:
                self._expert = Expert(simulation.scene)
            self._agent = ExpertAgent(self._expert, config.chunk_size, config.n_action_steps)
            self._rng = _generator(episode)
        return self._agent.act(simulation.data, simulation.target_slot, self._rng)


class _Zero:
    """No motion: every target is where the arm stood at the start."""

    def __init__(self, env: gymnasium.Env) -> None:
        self._space = _box(env)

    def __call__(self, observation: Any, episode: Episode) -> NDArray[np.float32]:
        if not episode.rewards:
            self._start = np.asarray(observation["agent_pos"], np.float32)
        return np.clip(self._start, self._space.low, self._space.high)


class _Random:
    """Joint targets drawn evenly between the limits, each on its own."""

    def __init__(self, env: gymnasium.Env) -> None:
        self._space = _box(env)

    def __call__(self, observation: Any, episode: Episode) -> NDArray[np.float32]:
        if not episode.rewards:
            self._rng = _generator(episode)
        return self._rng.uniform(self._space.low, self._space.high).astype(np.float32)


class _Policy:
    """A policy through flowrl's own loading and sampler, with the environment arguments that it brings."""

    def __init__(self, config: PlayConfig) -> None:
        path = config.policy or DEFAULT_POLICY
        preset = load_preset(path)
        given = EvalConfig(
            policy=path,
            env_id=ENV_ID,
            env_kwargs=json.dumps(_arguments(config)),
            episodes=config.episodes,
            seed=config.seed,
            device=config.device,
            torch_threads=config.torch_threads,
        )
        settled = with_preset_env_kwargs(with_preset(given, preset), preset)
        check_config(settled)
        from flowrl.policy.loading import load_policy

        device = prepare_torch(config.device, config.torch_threads)
        self.policy = load_policy(
            path, device=device, expert_dtype="loaded", rename=parse_rename(settled.rename)
        )
        self.arguments = resolve_env_kwargs(
            find_spec(ENV_ID), parse_env_kwargs(settled.env_kwargs), settled.seconds, self.policy.spec
        )
        self.act: Act = partial(predict_chunk, self.policy)


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


def _write_records(config: PlayConfig, arguments: dict[str, Any], records: Sequence[dict[str, Any]]) -> None:
    spec = find_spec(ENV_ID)
    content = {
        "agent": config.agent,
        "policy": (config.policy or DEFAULT_POLICY) if config.agent == "policy" else None,
        "seed": config.seed,
        "first_index": config.first_index,
        "environment": {"id": ENV_ID, "kwargs": {**spec.kwargs, **arguments}},
        **describe_machine(prepare_torch(config.device, config.torch_threads)),
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
    return given


def _make_env(config: PlayConfig, arguments: dict[str, Any]) -> gymnasium.Env:
    """The environment with the render mode for what is asked for."""
    find_spec(ENV_ID)
    window = config.window == "on" or (
        config.window == "auto" and has_display() and not config.video and not config.json
    )
    render_mode = "rgb_array_list" if config.video else "human" if window else None
    with environment_errors("making the environment"):
        return gymnasium.make(ENV_ID, render_mode=render_mode, **arguments)


def _generator(episode: Episode) -> np.random.Generator:
    return np.random.default_rng([episode.scene.seed, episode.scene.index])


def _box(env: gymnasium.Env) -> gymnasium.spaces.Box:
    assert isinstance(env.action_space, gymnasium.spaces.Box)
    return env.action_space
