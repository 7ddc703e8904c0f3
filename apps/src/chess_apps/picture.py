"""A picture of the scene: an overview from the side beside what the two cameras see (``chess-picture``)."""

from pathlib import Path

import imageio.v3 as iio
import mujoco
import numpy as np

from chess_apps.config import PictureConfig
from chess_env import board
from chess_env.env import CAMERAS, ChessPickEnv
from chess_env.expert import Expert
from flowrl.errors import FlowRLError

OVERVIEW_DISTANCE, OVERVIEW_AZIMUTH, OVERVIEW_ELEVATION = 0.70, 120.0, -38.0  # [m], [deg], [deg]
OVERVIEW_SAMPLES = 4


def run(config: PictureConfig) -> None:
    """Let the expert pick for some frames and write the PNG."""
    env = ChessPickEnv(
        image_size=config.size, distractors=config.distractors, offsamples=OVERVIEW_SAMPLES, measure=False
    )
    env.reset(seed=config.seed, options={"index": config.index})
    rng = np.random.default_rng([config.seed, config.index])
    plan = Expert(env.simulation.scene).plan(env.simulation.data, env.simulation.target_slot, rng)
    if plan is None:
        raise FlowRLError(f"the expert has no plan for scene {config.index}; choose another --index")
    for target in plan[: config.frame]:
        env.simulation.run_frame(target)
    pixels = env.observe()["pixels"]
    half = config.size // 2
    cameras = np.concatenate([_halved(pixels[name], half) for name in CAMERAS])
    picture = np.concatenate([_overview(env, config.size), cameras], axis=1)
    env.close()
    out = Path(config.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    iio.imwrite(out, picture)
    print(f"wrote {out}")


def _overview(env: ChessPickEnv, height: int) -> np.ndarray:
    scene = env.simulation.scene
    camera = mujoco.MjvCamera()
    camera.lookat[:] = (board.CENTER_XY[0] - 0.08, board.CENTER_XY[1], 0.06)
    camera.distance, camera.azimuth, camera.elevation = (
        OVERVIEW_DISTANCE,
        OVERVIEW_AZIMUTH,
        OVERVIEW_ELEVATION,
    )
    width = height * 4 // 3
    scene.model.vis.global_.offwidth = max(scene.model.vis.global_.offwidth, width)
    with mujoco.Renderer(scene.model, height, width) as renderer:
        renderer.update_scene(env.simulation.data, camera)
        return renderer.render()


def _halved(image: np.ndarray, side: int) -> np.ndarray:
    """Mean of 2x2 pixels, (2 * side, 2 * side, 3) -> (side, side, 3) uint8."""
    blocks = image[: 2 * side, : 2 * side].reshape(side, 2, side, 2, 3)
    return np.round(blocks.mean(axis=(1, 3))).astype(np.uint8)
