"""Images that other people's programs rely on: sizes, repeatability, backends, and errors that name their cause."""

import os
import subprocess
import sys

import numpy as np
import pytest
from python_process import run_python

from chess_env.env import ChessPickEnv
from chess_env.errors import RenderingError
from chess_env.rendering import OffscreenRenderer


def test_image_sizes_are_exact_for_any_shape():
    for size in ((540, 960), (64, 64), (17, 200)):
        env = ChessPickEnv(image_size=size, distractors=0)
        observation, _ = env.reset(seed=0)
        for image in observation["pixels"].values():
            assert image.shape == (*size, 3)
        env.close()


def test_same_state_gives_the_same_image(pixel_env):
    pixel_env.reset(seed=6)
    one, two = pixel_env.observe(), pixel_env.observe()
    assert all(np.array_equal(one["pixels"][name], two["pixels"][name]) for name in one["pixels"])


def test_wrong_camera_and_size_are_named_first(pixel_env):
    pixel_env.reset(seed=0)
    simulation = pixel_env.simulation
    renderer = OffscreenRenderer(simulation.scene.model, (64, 64))
    with pytest.raises(RenderingError, match="camera 'side' does not exist"):
        renderer.render(simulation.data, "side", (64, 64))
    with pytest.raises(RenderingError, match=r"\(4000, 64\) does not fit"):
        renderer.render(simulation.data, "top", (4000, 64))
    renderer.close()
    renderer.close()
    with pytest.raises(RenderingError, match="closed"):
        renderer.render(simulation.data, "top", (64, 64))


def test_egl_device_that_does_not_exist_is_explained_and_leaves_no_noise():
    code = """
import gymnasium, chess_env
env = gymnasium.make("chess_env:ChessPick-v0", image_size=32)
try:
    env.reset(seed=0)
except chess_env.ChessEnvError as error:
    print(type(error).__name__, str(error))
"""
    result = run_python(code, MUJOCO_GL="egl", MUJOCO_EGL_DEVICE_ID="77")
    (line,) = result.stdout.strip().splitlines()
    assert line.startswith("RenderingError") and "77" in line and "MUJOCO_EGL_DEVICE_ID" in line
    assert "Exception ignored" not in result.stderr


IMAGE = """
import sys, gymnasium, numpy as np
env = gymnasium.make("chess_env:ChessPick-v0", image_size=64)
np.save(sys.argv[1] if len(sys.argv) > 1 else "/dev/stdout", env.reset(seed=5)[0]["pixels"]["top"])
"""


def test_backends_agree_to_two_grey_levels(tmp_path):
    images = {}
    for backend in ("egl", "osmesa"):
        path = tmp_path / f"{backend}.npy"
        result = subprocess.run(
            [sys.executable, "-c", IMAGE, str(path)],
            capture_output=True,
            text=True,
            env={**os.environ, "MUJOCO_GL": backend},
            timeout=120,
        )
        if result.returncode != 0:
            assert "RenderingError" in result.stderr
            pytest.skip(f"no {backend} on this machine")
        images[backend] = np.load(path).astype(float)
    assert np.abs(images["egl"] - images["osmesa"]).mean() < 2.0
