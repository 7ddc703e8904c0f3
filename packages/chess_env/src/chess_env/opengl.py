"""Which OpenGL is used, from the environment's variables; imports MuJoCo, which looks at them when it is imported."""

import os
import sys
from collections.abc import Mapping

from chess_env.errors import RenderingError

BACKENDS = ("egl", "osmesa", "glfw")


def choose_backend(environ: Mapping[str, str], platform: str) -> str:
    """The OpenGL backend: `MUJOCO_GL`, or egl on Linux and the platform's own elsewhere; "none" when it is turned off.

    Raises:
        RenderingError: `MUJOCO_GL` names something else.
    """
    value = environ.get("MUJOCO_GL", "").strip().lower()
    if value == "":
        return "egl" if platform == "linux" else "native"
    if value in BACKENDS:
        return value
    if platform != "linux" or value in ("enable", "enabled", "on", "true", "1", "glx"):
        return "native"
    if value in ("disable", "disabled", "off", "false", "0"):
        return "none"
    raise RenderingError(
        f"MUJOCO_GL={environ['MUJOCO_GL']!r}: allowed are {', '.join(BACKENDS)}; egl needs no display, osmesa no driver"
    )


def choose_egl_device(environ: Mapping[str, str], num_devices: int) -> str | None:
    """Device id for `MUJOCO_EGL_DEVICE_ID` in a process of a multi-GPU job, None to leave MuJoCo's choice.

    Each rank (`LOCAL_RANK`) renders on a device of its own, counted among the visible ones, as long as EGL has so many; an
    id that is already set stays.

    Args:
        environ: The process's variables.
        num_devices: How many devices EGL offers; without a GPU there is one, the software renderer.
    """
    rank = environ.get("LOCAL_RANK", "")
    if "MUJOCO_EGL_DEVICE_ID" in environ or not rank.isdigit() or num_devices < 1:
        return None
    visible = [part for part in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if part.strip()]
    return str(int(rank) % min(len(visible) or num_devices, num_devices))


def has_display() -> bool:
    """Whether a window can be shown here."""
    return sys.platform != "linux" or any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))


def _import_mujoco() -> None:
    """Import MuJoCo, with a readable error when its choice of OpenGL fails."""
    choose_backend(os.environ, sys.platform)
    try:
        import mujoco  # noqa: F401
    except Exception as error:
        value = os.environ.get("MUJOCO_GL", "")
        if not value:
            raise  # not OpenGL's fault
        raise RenderingError(
            f"MuJoCo cannot be imported with MUJOCO_GL={value!r} ({error}): install that OpenGL library, "
            "or set MUJOCO_GL=egl"
        ) from error


_import_mujoco()
