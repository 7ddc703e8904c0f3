"""What people see of an episode: MuJoCo's window, or a picture of every control frame; never what a policy sees."""

import threading
import time
from collections.abc import Callable, Mapping
from functools import partial

import mujoco
import numpy as np
from numpy.typing import NDArray

from chess_env.config import CONTROL_HZ
from chess_env.errors import RenderingError
from chess_env.opengl import has_display
from chess_env.rendering import OffscreenRenderer
from chess_env.scene import CAMERA_NAMES
from chess_env.simulation import Simulation

SCENE_SIZE = (480, 640)
CAMERA_SIZE = (240, 240)
"""Parts of a picture, (height, width) [px]: the scene on the left, the cameras above each other on its right."""
_LOOKAT_W = (0.20, 0.0, 0.06)  # [m]
_DISTANCE, _AZIMUTH, _ELEVATION = 0.72, 120.0, -36.0  # [m], [deg], [deg]
_MARKER_RGBA = np.array([0.1, 0.85, 0.25, 1.0], np.float32)
_RING_RADIUS, _RING_HALF_HEIGHT = 0.019, 0.0008  # [m]
_CLOSE_TIMEOUT_S = 2.0
_ARROW_CLEARANCE, _ARROW_LENGTH, _ARROW_WIDTH = 0.075, 0.05, 0.004  # [m]


class EpisodeView:
    """Shows every control frame in a window ("human"), or collects it as a picture ("rgb_array_list").

    Other render modes show nothing and cost nothing.

    Args:
        mode: The environment's render mode.
        simulation: What is shown.
    """

    def __init__(self, mode: str | None, simulation: Simulation) -> None:
        self.mode = mode
        self._simulation = simulation
        self._window: Window | None = None
        self._pictures: list[NDArray[np.uint8]] = []

    def begin(self, open_renderer: Callable[[], OffscreenRenderer]) -> None:
        """Forget the pictures of the episode before, and show the start of this one."""
        self._pictures = []
        self.show(open_renderer)

    def show(self, open_renderer: Callable[[], OffscreenRenderer]) -> None:
        """Show the present frame; the renderer is asked for only when a picture is drawn.

        Raises:
            RenderingError: No display for a window, or no OpenGL for a picture.
        """
        simulation = self._simulation
        if self.mode == "human":
            if self._window is None:
                self._window = Window(simulation.scene.model, simulation.data)
            self._window.show(_target_w(simulation))
        elif self.mode == "rgb_array_list":
            self._pictures.append(draw_picture(open_renderer(), simulation))

    @property
    def window_closed(self) -> bool:
        """Whether the user has closed the window."""
        return self._window is not None and not self._window.is_open

    def take_pictures(self) -> list[NDArray[np.uint8]]:
        """The pictures since the last call or the episode's begin, each uint8 (480, 880, 3)."""
        pictures, self._pictures = self._pictures, []
        return pictures

    def close(self) -> None:
        """Close the window."""
        if self._window is not None:
            self._window.close()
            self._window = None


def draw_picture(renderer: OffscreenRenderer, simulation: Simulation) -> NDArray[np.uint8]:
    """The whole scene, and beside it what each camera sees: uint8 (480, 880, 3).

    The target's mark and the caption are in the view of the scene alone.
    """
    view = renderer.render(
        simulation.data,
        scene_camera(),
        SCENE_SIZE,
        decorate=partial(_mark_target, target_w=_target_w(simulation)),
        caption=describe_frame(simulation),
    )
    seen = [renderer.render(simulation.data, name, CAMERA_SIZE) for name in CAMERA_NAMES]
    return np.concatenate([view, np.concatenate(seen)], axis=1)


def describe_frame(simulation: Simulation) -> Mapping[str, str]:
    """Scene, target, frame and, once the episode has ended, its end."""
    layout, frames = simulation.layout, simulation.episode.frames
    return {
        "scene": f"{layout.seed}:{layout.index}",
        "target": f"{layout.target.kind} on {layout.target.square}",
        "frame": f"{frames} ({frames / CONTROL_HZ:.1f} s)",
        "end": simulation.episode.end or "",
    }


def scene_camera() -> mujoco.MjvCamera:
    """A free camera that sees the board and the arm from the side."""
    camera = mujoco.MjvCamera()
    camera.lookat[:] = _LOOKAT_W
    camera.distance, camera.azimuth, camera.elevation = _DISTANCE, _AZIMUTH, _ELEVATION
    return camera


def _target_w(simulation: Simulation) -> NDArray[np.float64]:
    """The target's foot [m], world frame, shape (3,)."""
    return simulation.data.xpos[simulation.scene.pieces[simulation.target_slot].body_id]


def _mark_target(scene: mujoco.MjvScene, target_w: NDArray[np.float64]) -> None:
    """Draw a flat ring around the piece whose foot is at `target_w` [m], shape (3,), and an arrow down to it."""
    ring, arrow = scene.geoms[scene.ngeom], scene.geoms[scene.ngeom + 1]
    upright = np.eye(3).ravel()
    size = np.array([_RING_RADIUS, _RING_HALF_HEIGHT, 0.0])
    mujoco.mjv_initGeom(ring, mujoco.mjtGeom.mjGEOM_CYLINDER, size, target_w, upright, _MARKER_RGBA)
    kind = mujoco.mjtGeom.mjGEOM_ARROW
    mujoco.mjv_initGeom(arrow, kind, np.zeros(3), np.zeros(3), upright, _MARKER_RGBA)
    tip = target_w + np.array([0.0, 0.0, _ARROW_CLEARANCE])
    mujoco.mjv_connector(arrow, kind, _ARROW_WIDTH, tip + np.array([0.0, 0.0, _ARROW_LENGTH]), tip)
    scene.ngeom += 2


class Window:
    """MuJoCo's interactive viewer, paced to real time.

    Raises:
        RenderingError: There is no display.
    """

    def __init__(self, model: mujoco.MjModel, data: mujoco.MjData) -> None:
        if not has_display():
            raise RenderingError(
                "render_mode='human' needs a display (DISPLAY is not set): use render_mode='rgb_array'"
            )
        import mujoco.viewer

        others = set(threading.enumerate())
        self._handle = mujoco.viewer.launch_passive(model, data)
        self._threads = [thread for thread in threading.enumerate() if thread not in others]
        self._next_s = time.monotonic()

    @property
    def is_open(self) -> bool:
        """Whether the user has left it open."""
        return self._handle.is_running()

    def show(self, target_w: NDArray[np.float64]) -> None:
        """Show the current state for one control frame, with the piece marked whose foot is at `target_w` [m]."""
        if self.is_open:
            with self._handle.lock():
                self._handle.user_scn.ngeom = 0
                _mark_target(self._handle.user_scn, target_w)
            self._handle.sync()
            self._next_s = max(self._next_s + 1.0 / CONTROL_HZ, time.monotonic())
            time.sleep(max(self._next_s - time.monotonic(), 0.0))

    def close(self) -> None:
        """Close the window, and wait for its threads: a process that ends while they draw gets an error of the display."""
        self._handle.close()
        for thread in self._threads:
            thread.join(_CLOSE_TIMEOUT_S)
