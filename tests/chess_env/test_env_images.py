"""Images, copies, and what is left behind when environments come and go."""

import copy
import itertools
import pickle
import threading
from pathlib import Path

import gymnasium
import mujoco
import numpy as np
import pytest
from python_process import run_python

from chess_env.env import ChessPickEnv
from chess_env.errors import (
    ChessEnvError,
    EpisodeError,
    RenderingError,
)
from chess_env.so101 import to_units
from chess_env.view import draw_picture
from chess_episodes import SMALL, expert_chunks, full_state, hold

# -- images ------------------------------------------------------------------------------------------------------------


def test_piece_appears_where_the_camera_geometry_puts_it():
    """Projects the white piece by hand: images are neither mirrored nor upside down."""
    env = ChessPickEnv(image_size=(120, 200), distractors=0, randomization="none")
    for index in range(6):
        observation, _ = env.reset(seed=2, options={"index": index})
        model, data = env.simulation.scene.model, env.simulation.data
        camera = model.camera("top").id
        target = env.simulation.scene.pieces[env.simulation.target_slot]
        point = data.xpos[target.body_id] + np.array([0, 0, 0.025]) - data.cam_xpos[camera]
        x, y, z = data.cam_xmat[camera].reshape(3, 3).T @ point
        focal = 60 / np.tan(np.radians(model.cam_fovy[camera]) / 2)
        column, row = 100 + focal * x / -z, 60 - focal * y / -z
        image = observation["pixels"]["top"].astype(int)
        white = (image.min(axis=2) > 120) & (image.max(axis=2) - image.min(axis=2) < 25)
        rows, columns = np.nonzero(white)
        assert abs(columns.mean() - column) < 4 and abs(rows.mean() - row) < 4
    assert image.shape == (120, 200, 3)
    env.close()


def test_wrist_image_shows_the_piece_where_the_camera_geometry_puts_it():
    """The same by hand for the camera on the gripper, in scenes where the whole piece is in view."""
    env = ChessPickEnv(image_size=(200, 120), distractors=0, randomization="none", pieces="pawn")
    compared = 0
    for index in range(50):
        observation, _ = env.reset(seed=2, options={"index": index})
        model, data = env.simulation.scene.model, env.simulation.data
        camera = model.camera("wrist").id
        target = env.simulation.scene.pieces[env.simulation.target_slot]
        point = data.xpos[target.body_id] + np.array([0, 0, 0.025]) - data.cam_xpos[camera]
        x, y, z = data.cam_xmat[camera].reshape(3, 3).T @ point
        focal = 100 / np.tan(np.radians(model.cam_fovy[camera]) / 2)
        column, row = 60 + focal * x / -z, 100 - focal * y / -z
        if not (15 < column < 105 and 30 < row < 170 and abs(row - 100) > 15):
            continue
        image = observation["pixels"]["wrist"].astype(int)
        rows, columns = np.nonzero((image.min(axis=2) > 150) & (np.ptp(image, axis=2) < 25))
        assert abs(columns.mean() - column) < 6 and abs(rows.mean() - row) < 8, index
        compared += 1
    assert compared >= 5
    env.close()


def test_environments_of_one_process_do_not_mix_their_images():
    """Of different models and buffers, so that one drawn in another's OpenGL context shows it."""
    kinds = (
        {"image_size": 48},
        {"image_size": (80, 112), "pieces": "all", "task": "square"},
        {"image_size": 64, "offsamples": 4, "distractors": 2},
        {"image_size": 48, "render_mode": "rgb_array"},
    )
    envs = [ChessPickEnv(**kind) for kind in kinds]
    for index, env in enumerate(envs):
        env.reset(seed=5, options={"index": index})
    chunk = hold({"agent_pos": to_units(envs[0].simulation.data.qpos[:6]).astype(np.float32)})
    together = [env.step(chunk)[0]["pixels"] for env in envs]
    for index, kind in enumerate(kinds):
        alone = ChessPickEnv(**kind)
        alone.reset(seed=5, options={"index": index})
        for camera, image in alone.step(chunk)[0]["pixels"].items():
            assert np.array_equal(image, together[index][camera]), (kind, camera)
        alone.close()
    for env in envs:
        env.close()


def test_render_gives_the_top_camera_large(pixel_env):
    env = gymnasium.make("chess_env:ChessPick-v0", render_mode="rgb_array", **SMALL)
    with pytest.raises((EpisodeError, gymnasium.error.ResetNeeded)):
        env.render()
    observation, _ = env.reset(seed=0)
    frame = env.render()
    assert frame.shape == (480, 640, 3) and frame.dtype == np.uint8
    assert np.array_equal(frame, env.render())
    plain, _ = pixel_env.reset(seed=0)  # the larger buffer changes no pixel
    assert np.array_equal(observation["pixels"]["top"], plain["pixels"]["top"])
    env.close()


def test_picture_list_has_the_start_and_every_control_frame_and_ends_with_the_terminal_one():
    env = gymnasium.make("chess_env:ChessPick-v0", render_mode="rgb_array_list", observation="state")
    env.reset(seed=9_300_003, options={"index": 3})
    pictures, executed = env.render(), 0
    assert len(pictures) == 1 and env.render() == []
    for chunk in expert_chunks(env.unwrapped):
        *_, terminated, _, info = env.step(chunk)
        pictures += env.render()
        executed += info["num_executed_frames"]
        assert len(pictures) == 1 + executed
        if terminated:
            break
    assert terminated and info["is_success"]
    assert all(picture.shape == (480, 880, 3) and picture.dtype == np.uint8 for picture in pictures)
    moved = [not np.array_equal(a, b) for a, b in itertools.pairwise(pictures)]
    assert all(moved[1:])
    again = draw_picture(env.unwrapped._open_renderer(), env.unwrapped.simulation)
    assert np.array_equal(again, pictures[-1]), "the last picture is not the state at the end"
    env.reset(seed=9_300_003, options={"index": 4})
    assert len(env.render()) == 1, "pictures of an episode before are forgotten at a reset"
    env.close()


def test_pictures_for_people_change_nothing_that_a_policy_sees():
    """Target's mark and caption are drawn into the view of the scene alone."""
    bare = ChessPickEnv(n_action_steps=4, **SMALL)
    watched = ChessPickEnv(n_action_steps=4, render_mode="rgb_array_list", **SMALL)
    plain, shown = (env.reset(seed=4, options={"index": 1})[0] for env in (bare, watched))
    chunk = hold(plain)
    for _ in range(2):
        for camera in ("top", "wrist"):
            assert np.array_equal(plain["pixels"][camera], shown["pixels"][camera])
        assert np.array_equal(plain["agent_pos"], shown["agent_pos"])
        plain, shown = bare.step(chunk)[0], watched.step(chunk)[0]
    assert np.array_equal(full_state(bare), full_state(watched))
    picture, renderer = watched.render()[-1], watched._open_renderer()
    simulation = watched.simulation
    for row, camera in enumerate(("top", "wrist")):
        clean = renderer.render(simulation.data, camera, (240, 240))
        assert np.array_equal(picture[240 * row : 240 * row + 240, 640:], clean)
    scene = picture[:, :640].astype(int)
    assert (scene[..., 1] - scene[..., [0, 2]].max(axis=2) > 60).sum() > 30, "no green mark in the scene"
    watched.close()
    bare.close()


@pytest.mark.parametrize("mode", [None, "rgb_array"])
def test_other_render_modes_draw_no_picture_of_a_frame(mode):
    env = ChessPickEnv(render_mode=mode, observation="state")
    observation, _ = env.reset(seed=0)
    env.step(hold(observation))
    assert env._renderer is None
    env.close()


def test_another_thread_is_refused_clearly(pixel_env):
    pixel_env.reset(seed=0)
    caught = []

    def reset_there():
        try:
            pixel_env.reset(seed=0)
        except ChessEnvError as error:
            caught.append(error)

    thread = threading.Thread(target=reset_there)
    thread.start()
    thread.join()
    assert isinstance(caught[0], RenderingError) and "thread" in str(caught[0])
    pixel_env.reset(seed=0)


THREADS = """
import threading
from chess_env.env import ChessPickEnv
from chess_env.errors import RenderingError

def images(index, keep):
    env = ChessPickEnv(image_size=48, distractors=0)
    seen = []
    for _ in range(4):
        observation, _ = env.reset(seed=5, options={"index": index})
        seen += [image.tobytes() for image in observation["pixels"].values()]
    keep.append(env)
    return seen

alone, together, left_open = {}, {}, []
for index in (0, 1):
    alone[index] = images(index, left_open)
    left_open.pop().close()
def work(index):
    together[index] = images(index, left_open)
threads = [threading.Thread(target=work, args=(index,)) for index in (0, 1)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(together == alone)
try:
    left_open[0].close()
except RenderingError as error:
    print(error)
"""


def test_environments_of_two_threads_render_the_same_and_need_no_close():
    result = run_python(THREADS)
    assert result.returncode == 0 and result.stderr == ""
    assert result.stdout.splitlines() == [
        "True",
        "an environment is closed in the thread of its first image only",
    ]


@pytest.mark.parametrize("backend", ["glfw", "vulkan", "off"])
def test_missing_opengl_is_explained_in_one_line(backend):
    code = """
import gymnasium, chess_env
try:
    env = gymnasium.make("ChessPick-v0", image_size=32)
    env.reset(seed=0)
except chess_env.ChessEnvError as error:
    print(type(error).__name__, str(error))
"""
    result = run_python(code, MUJOCO_GL=backend, DISPLAY="", WAYLAND_DISPLAY="")
    assert result.returncode == 0, result.stderr
    (line,) = result.stdout.strip().splitlines()
    assert line.startswith("RenderingError") and f"MUJOCO_GL={backend!r}" in line and "egl" in line
    assert "Exception ignored" not in result.stderr


def test_viewer_without_a_display_is_refused():
    code = """
import gymnasium, chess_env
env = gymnasium.make("ChessPick-v0", image_size=32, render_mode="human")
try:
    env.reset(seed=0)
except chess_env.ChessEnvError as error:
    print(type(error).__name__, str(error))
"""
    result = run_python(code, DISPLAY="", WAYLAND_DISPLAY="")
    assert result.stdout.startswith("RenderingError") and "rgb_array" in result.stdout, result.stderr


@pytest.mark.parametrize("ending", ["", "import sys; sys.exit(0)", "raise SystemExit"])
def test_program_that_never_closes_ends_without_a_word(ending):
    code = f"""
import gymnasium, chess_env
envs = [gymnasium.make("ChessPick-v0", image_size=32) for _ in range(2)]
for env in envs:
    env.reset(seed=0)
envs[0].step(envs[0].action_space.sample())
{ending}
"""
    result = run_python(code)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize(("randomization", "brightest"), [("none", 175), ("default", 205), ("wide", 250)])
def test_no_pixel_of_the_board_clips(randomization, brightest):
    env = ChessPickEnv(image_size=64, distractors=0, randomization=randomization)
    env.reset(seed=77)
    model = env.simulation.scene.model
    squares = [model.geom(name).id for name in ("light_squares", "dark_squares", "board")]
    peak = 0
    with mujoco.Renderer(model, 64, 64) as segmenter:
        segmenter.enable_segmentation_rendering()
        for _ in range(25):
            observation, _ = env.reset()
            for camera in ("top", "wrist"):
                segmenter.update_scene(env.simulation.data, camera)
                board = np.isin(segmenter.render()[..., 0], squares)
                assert board.mean() > 0.2
                peak = max(peak, int(observation["pixels"][camera][board].max()))
    assert 120 < peak < brightest
    env.close()


# -- copies and memory -------------------------------------------------------------------------------------------------


def test_pickled_copy_is_a_new_environment_with_the_same_scenes(pixel_env):
    before, _ = pixel_env.reset(seed=3)
    for clone in (pickle.loads(pickle.dumps(pixel_env)), copy.deepcopy(pixel_env)):
        with pytest.raises(EpisodeError):
            clone.step(hold(before))
        after, _ = clone.reset(seed=3)
        assert np.array_equal(before["pixels"]["top"], after["pixels"]["top"])
        clone.close()


def resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 2**20


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_memory_and_files_stay_when_environments_come_and_go():
    def cycle():
        env = ChessPickEnv(**SMALL)
        for _ in range(3):
            env.reset(seed=0)
        env.close()

    for _ in range(4):
        cycle()
    memory, files = resident_mb(), len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(12):
        cycle()
    assert resident_mb() - memory < 40
    assert len(list(Path("/proc/self/fd").iterdir())) - files <= 2


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_memory_stays_over_many_resets_and_images(pixel_env):
    for _ in range(20):
        pixel_env.reset()
    memory = resident_mb()
    for _ in range(100):
        pixel_env.reset()
    assert resident_mb() - memory < 20
