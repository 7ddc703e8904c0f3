"""Offscreen images: an OpenGL context of its own for each environment, opened at the first image.

Nothing here touches OpenGL at import or construction, so a process that only makes environments for workers never
opens a context. MuJoCo's backend follows `MUJOCO_GL` (egl, osmesa, glfw); unset, it is egl on Linux, which needs no
display and works with software rendering too.
"""

import atexit
import os
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mujoco
import numpy as np
from numpy.typing import NDArray

from chess_env.errors import RenderingError
from chess_env.opengl import choose_backend, choose_egl_device

MAX_GEOMS = 2000

_open: "weakref.WeakSet[OffscreenRenderer]" = weakref.WeakSet()
_registered = False
_warned = False


def _context_class(backend: str) -> Any:
    """MuJoCo's context class of a backend, imported when it is needed."""
    if backend == "none":
        raise RenderingError("OpenGL is turned off")
    if backend == "egl":
        from mujoco.egl import GLContext, egl_ext

        device = choose_egl_device(os.environ, len(egl_ext.eglQueryDevicesEXT()))
        if device is not None:
            os.environ["MUJOCO_EGL_DEVICE_ID"] = device
    elif backend == "osmesa":
        from mujoco.osmesa import GLContext
    elif backend == "glfw":
        from mujoco.glfw import GLContext
    else:
        from mujoco.gl_context import GLContext
    if not hasattr(
        GLContext, "_context"
    ):  # MuJoCo 3.8: one that failed to open complains when it is collected
        GLContext._context = None
    return GLContext


class OffscreenRenderer:
    """Renders one model's cameras into uint8 RGB arrays.

    Args:
        model: The compiled model; its offscreen buffer is enlarged to `max_size` when it is smaller.
        max_size: Largest image, (height, width) [px].

    Raises:
        RenderingError: OpenGL cannot be opened; the message says what to set.
    """

    def __init__(self, model: mujoco.MjModel, max_size: tuple[int, int]) -> None:
        self._context: mujoco.MjrContext | None = None
        self._gl: Any = None
        self._model = model
        self._thread = threading.current_thread()
        self._pid = os.getpid()
        buffer = model.vis.global_
        buffer.offheight = max(buffer.offheight, max_size[0])
        buffer.offwidth = max(buffer.offwidth, max_size[1])
        self._max_size = (int(buffer.offheight), int(buffer.offwidth))
        backend = choose_backend(os.environ, sys.platform)
        try:
            self._gl = _context_class(backend)(self._max_size[1], self._max_size[0])
            self._gl.make_current()
            self._context = mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_100.value)
        except Exception as error:  # any library in the way of OpenGL raises its own kind
            self.close()
            reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
            raise RenderingError(
                f"no OpenGL context for images (MUJOCO_GL={os.environ.get('MUJOCO_GL', '')!r}, backend {backend}): {reason}. "
                "Set MUJOCO_GL=egl (GPU or Mesa), MUJOCO_GL=osmesa (software only), or use observation='state'"
            ) from error
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN.value, self._context)
        self._scene = mujoco.MjvScene(model, MAX_GEOMS)
        self._scene.flags[mujoco.mjtRndFlag.mjRND_SHADOW] = 0
        self._scene.flags[mujoco.mjtRndFlag.mjRND_REFLECTION] = 0
        self._option = mujoco.MjvOption()
        self._camera = mujoco.MjvCamera()
        self._camera.type = mujoco.mjtCamera.mjCAMERA_FIXED
        _open.add(self)
        _close_at_exit()
        _warn_of_software_rendering()

    def render(
        self,
        data: mujoco.MjData,
        camera: str | mujoco.MjvCamera,
        size: tuple[int, int],
        *,
        decorate: Callable[[mujoco.MjvScene], None] | None = None,
        caption: Mapping[str, str] | None = None,
    ) -> NDArray[np.uint8]:
        """A camera's image, uint8, shape (height, width, 3), top row first.

        Args:
            data: The state to draw.
            camera: Name of a camera of the model, or a free camera.
            size: (height, width) [px].
            decorate: Adds shapes to what is drawn, for people.
            caption: Lines of text in the upper left corner, name and value, for people.

        Raises:
            RenderingError: Closed, called from another thread, an unknown camera or a size that does not fit.
        """
        if self._context is None:
            raise RenderingError("the renderer is closed: make a new environment")
        if not self._is_of_this_thread() or os.getpid() != self._pid:
            raise RenderingError("an environment renders in the thread and process of its first image only")
        if size[0] > self._max_size[0] or size[1] > self._max_size[1]:
            raise RenderingError(
                f"an image of {size} does not fit the offscreen buffer of {self._max_size} pixels"
            )
        if isinstance(camera, str):
            self._camera.fixedcamid = mujoco.mj_name2id(self._model, mujoco.mjtObj.mjOBJ_CAMERA, camera)
            if self._camera.fixedcamid < 0:
                raise RenderingError(f"camera {camera!r} does not exist in the model")
        self._gl.make_current()
        viewport = mujoco.MjrRect(0, 0, size[1], size[0])
        mujoco.mjv_updateScene(
            self._model,
            data,
            self._option,
            None,
            self._camera if isinstance(camera, str) else camera,
            mujoco.mjtCatBit.mjCAT_ALL.value,
            self._scene,
        )
        if decorate is not None:
            decorate(self._scene)
        mujoco.mjr_render(viewport, self._scene, self._context)
        if caption:
            mujoco.mjr_overlay(
                mujoco.mjtFont.mjFONT_NORMAL,
                mujoco.mjtGridPos.mjGRID_TOPLEFT,
                viewport,
                "\n".join(caption),
                "\n".join(caption.values()),
                self._context,
            )
        pixels = np.empty((*size, 3), np.uint8)
        mujoco.mjr_readPixels(pixels, None, viewport, self._context)
        return np.ascontiguousarray(pixels[::-1])  # OpenGL's first row is the bottom

    def _is_of_this_thread(self) -> bool:
        """An OpenGL context stays with the thread that opened it, also when that has ended."""
        return threading.current_thread() is self._thread

    def close(self) -> None:
        """Free the context; may be called more than once. A forked copy frees nothing, it owns nothing.

        Raises:
            RenderingError: Called from another thread.
        """
        if self._pid != os.getpid():
            self._context, self._gl = None, None
            return
        if self._context is not None and not self._is_of_this_thread():
            raise RenderingError("an environment is closed in the thread of its first image only")
        context, self._context = self._context, None
        gl, self._gl = self._gl, None
        if context is not None:
            gl.make_current()
            context.free()
        if gl is not None:
            gl.free()
        _open.discard(self)

    def end(self) -> None:
        """At the end of the process: close it, or end the context of another thread, whose objects go with it."""
        if self._is_of_this_thread():
            self.close()
        elif self._gl is not None:
            self._gl.free()

    def __reduce__(self) -> Any:
        raise TypeError(
            "a renderer holds an OpenGL context and cannot be pickled: pickle the environment instead"
        )


def _close_all() -> None:
    """Free what is still open at exit, before MuJoCo ends the display."""
    for renderer in list(_open):
        renderer.end()


def _close_at_exit() -> None:
    """Register `_close_all` once, after a context was made: exit handlers run last to first, and MuJoCo registers the
    end of the display when it makes its first context."""
    global _registered
    if not _registered:
        atexit.register(_close_all)
        _registered = True


def _warn_of_software_rendering() -> None:
    """Say once that a machine with an NVIDIA GPU renders on its CPU."""
    global _warned
    if _warned or not Path("/dev/nvidia0").exists():
        return
    _warned = True
    from OpenGL import GL

    name = GL.glGetString(GL.GL_RENDERER).decode()
    if "llvmpipe" in name or "softpipe" in name:
        warnings.warn(
            f"images are rendered in software ({name}) on a machine with a GPU: set MUJOCO_GL=egl and install the "
            "driver's EGL library",
            stacklevel=2,
        )
