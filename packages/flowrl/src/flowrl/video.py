"""Videos of evaluated episodes, by Gymnasium's render modes alone.

An evaluation keeps the chunks that the policy gave. A video is made by giving them again to one environment that renders,
so it shows what was evaluated, whatever path, device or batch the policy ran in, and changes no result.

Frames: the start, then as many as the environment adds in a step: one for each control frame of a chunk where it offers
"rgb_array_list" itself, and one for each of its own steps where it offers "rgb_array" (Gymnasium's RenderCollection). The
last frame is the end of the episode: nothing is reset before it is taken.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import gymnasium
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from flowrl.episode import Episode
from flowrl.errors import FlowRLError
from flowrl.plain import play_episode
from flowrl.progress import Progress
from flowrl.record import writing
from flowrl.scenes import Scene
from flowrl.vector_env import environment_errors

ACTIONS, VIDEOS = "actions.safetensors", "videos"
RENDER_MODE = "rgb_array_list"
SUFFICIENT_MODES = (RENDER_MODE, "rgb_array")
ENCODERS = ("libx264", "libopenh264", "mpeg4")
"""Tried in this order: H.264 plays everywhere, MPEG-4 nearly so."""


class VideoWriter:
    """Writes an MP4 file frame by frame; the file has its name only once it is complete.

    A context manager: when it is left by an error, nothing remains.

    Args:
        path: The file; its folder is made.
        fps: Frames a second.
        encoders: Names of FFmpeg's encoders, of which the first that is there is taken.

    Raises:
        FlowRLError: no PyAV, none of the encoders, or the file cannot be written.
    """

    def __init__(self, path: Path, fps: float, encoders: Sequence[str] = ENCODERS) -> None:
        self.path = path
        self.num_frames = 0
        self._fps = Fraction(fps).limit_denominator(1000)
        self._encoder = find_encoder(encoders)
        self._temporary = path.with_name(f".{path.name}.tmp")
        self._stream: Any = None

    def __enter__(self) -> Self:
        import av

        with writing(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._temporary.open("wb")
        self._container = av.open(self._file, "w", format="mp4")
        return self

    def add(self, frame: np.ndarray) -> None:
        """Appends one frame, uint8 (height, width, 3), all of one size; an odd last row or column is doubled."""
        import av

        frame = np.pad(frame, [(0, frame.shape[0] % 2), (0, frame.shape[1] % 2), (0, 0)], mode="edge")
        if self._stream is None:
            self._stream = self._container.add_stream(self._encoder, rate=self._fps)
            self._stream.height, self._stream.width = frame.shape[:2]
            self._stream.pix_fmt = "yuv420p"
            self._stream.thread_count = 1  # the simulators need the other cores
        picture = av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")
        with writing(self.path):
            self._container.mux(self._stream.encode(picture))
        self.num_frames += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        complete = False
        try:
            with writing(self.path):
                if kind is None and self._stream is not None:
                    self._container.mux(self._stream.encode())
                    self._container.close()
                    complete = True
        finally:
            self._file.close()
            if complete:
                with writing(self.path):
                    self._temporary.replace(self.path)
            else:
                self._temporary.unlink(missing_ok=True)


def find_encoder(encoders: Sequence[str] = ENCODERS) -> str:
    """The first of the encoders that FFmpeg has here.

    Raises:
        FlowRLError: no PyAV, or none of them.
    """
    try:
        import av
    except ImportError:
        raise FlowRLError(
            "videos need PyAV, which is not installed: pip install av, or leave videos out"
        ) from None
    for name in encoders:
        if name in av.codecs_available:
            try:
                return av.codec.Codec(name, "w").name
            except ValueError:  # a decoder only
                continue
    raise FlowRLError(
        f"PyAV {av.__version__} has no encoder {' or '.join(encoders)}: pip install av (its wheels have them), "
        "or leave videos out"
    )


def check_can_render(env: gymnasium.Env) -> None:
    """Raises FlowRLError unless the environment renders images."""
    offered = env.metadata.get("render_modes", [])
    if not set(SUFFICIENT_MODES) & set(offered):
        raise FlowRLError(
            f"--video-episodes: the environment renders {', '.join(offered) or 'nothing'}; "
            "rgb_array_list or rgb_array is needed"
        )


def rendered_frames(env: gymnasium.Env) -> list[np.ndarray]:
    """What an environment in render mode "rgb_array_list" has to show since the last call, each uint8 (height, width, 3)."""
    with environment_errors("rendering the environment"):
        return [np.asarray(frame, dtype=np.uint8) for frame in env.render()]


def save_actions(path: Path, episodes: Sequence[Episode]) -> None:
    """Writes every episode's chunks, float32 (decisions, T, A), whole or not at all."""
    tensors = {_key(episode.scene): np.stack(episode.actions) for episode in episodes}
    temporary = path.with_name(f".{path.name}.tmp")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(save(tensors))
        temporary.replace(path)


def record_videos(
    out: Path,
    make_env: Callable[[str], gymnasium.Env],
    scenes: Sequence[Scene],
    records: Sequence[Mapping[str, Any]],
    default_task: str = "",
) -> list[Path]:
    """Videos of evaluated episodes in `out`/videos; those that exist are kept.

    Args:
        out: Folder of the results, which holds the chunks of `save_actions`.
        make_env: Makes the environment of the evaluation with a render mode.
        scenes: What to record.
        records: The evaluation's record of each.
        default_task: Instruction where the environment gives none.

    Returns:
        One file for each scene: seed, index and outcome are in its name.

    Raises:
        FlowRLError: no render mode, no encoder, no chunks, or an episode that does not repeat itself.
    """
    paths = [out / VIDEOS / video_name(scene, record) for scene, record in zip(scenes, records)]
    missing = [item for item in zip(paths, scenes, records) if not item[0].is_file()]
    if not missing:
        return paths
    find_encoder()
    actions = _load_actions(out / ACTIONS)
    env = make_env(RENDER_MODE)
    try:
        check_can_render(env)
        with Progress("videos", len(missing), "episode") as progress:
            for path, scene, record in missing:
                if _key(scene) not in actions:
                    raise FlowRLError(
                        f"{out / ACTIONS}: no actions of scene {_key(scene)}; evaluate anew into another --out"
                    )
                _record_video(path, env, scene, record, actions[_key(scene)], default_task)
                progress.advance()
    finally:
        env.close()
    return paths


def video_name(scene: Scene, record: Mapping[str, Any]) -> str:
    """seed9000003-index0004-success.mp4: the episode's `end`, or whether it succeeded where it reports no end."""
    outcome = record.get("end") or ("success" if record.get("success") else "failure")
    return f"seed{scene.seed}-index{scene.index:04d}-{re.sub(r'[^A-Za-z0-9]+', '_', str(outcome))}.mp4"


def _record_video(
    path: Path,
    env: gymnasium.Env,
    scene: Scene,
    record: Mapping[str, Any],
    actions: np.ndarray,
    default_task: str,
) -> None:
    chunks = iter(actions)
    with VideoWriter(path, env.metadata.get("render_fps", 30)) as video:

        def add_frames(_: Episode) -> None:
            for frame in rendered_frames(env):
                video.add(frame)

        episode = play_episode(
            lambda *_: _next_chunk(chunks, scene), env, 0, scene, default_task, on_step=add_frames
        )
        repeated = json.loads(json.dumps(episode.record()))
        if repeated != json.loads(json.dumps(record)):
            differing = sorted(name for name in record if record[name] != repeated.get(name))
            raise FlowRLError(
                f"scene {_key(scene)} with the same actions gave another {', '.join(differing)}: the environment is no "
                "function of seed and actions, or has changed; there is no video of what was evaluated"
            )


def _next_chunk(chunks: Iterator[np.ndarray], scene: Scene) -> np.ndarray:
    for chunk in chunks:
        return chunk
    raise FlowRLError(
        f"scene {_key(scene)} goes on after its evaluated end: the environment is no function of seed and actions"
    )


def _key(scene: Scene) -> str:
    return f"{scene.seed}:{scene.index}"


def _load_actions(path: Path) -> dict[str, np.ndarray]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise FlowRLError(
            f"{path}: no readable actions ({error}); evaluate anew into another --out to get videos"
        ) from error
