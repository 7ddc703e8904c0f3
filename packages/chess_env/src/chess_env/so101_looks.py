"""What the SO-101 looks like: boxes, cylinders and a few convex meshes in place of the printed parts and servos.

Outlines [mm] are those of the printed parts (The Robot Studio, SO-ARM100, Apache-2.0), measured as
bounding boxes in each link's frame. About 60 primitives of 12 triangles: a software renderer
spends its time on triangles, and the published meshes have 400,000.
"""

from __future__ import annotations

from dataclasses import dataclass

import mujoco
import numpy as np

VISUAL_GROUP = 2
PLASTIC_RGBA = (1.0, 0.82, 0.12, 1.0)
SERVO_RGBA = (0.10, 0.10, 0.10, 1.0)
CAMERA_RGBA = (0.05, 0.12, 0.08, 1.0)
PLASTIC_PREFIX = "plastic"
"""Geoms whose name starts so are printed parts, whose colour a scene may vary."""

_MM = 1e-3
Corner = tuple[float, float, float]


@dataclass(frozen=True)
class Box:
    """An axis-aligned box in its link's frame by two corners [mm]."""

    link: str
    low: Corner
    high: Corner
    rgba: tuple[float, float, float, float] = PLASTIC_RGBA


@dataclass(frozen=True)
class Disc:
    """A cylinder along the link's z by centre, radius and half length [mm]: joint bosses and horns."""

    link: str
    center: Corner
    radius: float
    half_length: float
    rgba: tuple[float, float, float, float] = PLASTIC_RGBA


@dataclass(frozen=True)
class Taper:
    """A convex solid between two rectangles [mm], each by two opposite corners (equal along one axis)."""

    link: str
    low_a: Corner
    high_a: Corner
    low_b: Corner
    high_b: Corner
    rgba: tuple[float, float, float, float] = PLASTIC_RGBA


BOXES = (
    # base: foot, column, motor holder, driver board plate, servo of the pan joint
    Box("base", (-22, -48, -2), (64, 48, 10)),
    Box("base", (-22, -25, 10), (14, 25, 36)),
    Box("base", (-27, -22, 36), (19, 24, 67)),
    Box("base", (-31, -25, 26), (-24, 25, 68)),
    Box("base", (3.6, -12.4, 24.3), (49, 12.4, 63.9), SERVO_RGBA),
    # shoulder: servo of the lift joint, its holder, the bracket around the pan servo
    Box("shoulder", (-42.8, -19.8, -64.4), (-18, 19.8, -19), SERVO_RGBA),
    Box("shoulder", (-50.6, -26.4, -38), (-12.5, 28.7, -10)),
    Box("shoulder", (-47.6, -23, -10), (-33, 23, 46)),
    Box("shoulder", (-40, -16, -10), (12, 16, -3)),
    Box("shoulder", (-40, -16, 39), (12, 16, 46)),
    # upper arm: two side plates from the joint, a web, the elbow's servo holder and servo
    Box("upper_arm", (-72, -12, -13.5), (0, 12, -3)),
    Box("upper_arm", (-72, -12, 39.5), (0, 12, 50)),
    Box("upper_arm", (-72, 2, -3), (-40, 12, 39.5)),
    Box("upper_arm", (-130, -12.5, -6.8), (-70, 12, -1.6)),
    Box("upper_arm", (-130, -12.5, 38.2), (-70, 12, 43.2)),
    Box("upper_arm", (-130, 7.2, -6.8), (-70, 12, 43.2)),
    Box("upper_arm", (-125, -38.2, -1.5), (-100.2, 7.2, 38.1), SERVO_RGBA),
    # lower arm
    Box("lower_arm", (-60, -12, -12), (0, 12, -3)),
    Box("lower_arm", (-60, -12, 40), (0, 12, 49)),
    Box("lower_arm", (-60, -12, -3), (-36, 12, 40)),
    Box("lower_arm", (-92, -12, 5.2), (-60, 12, 31)),
    Box("lower_arm", (-118.7, -15, -8.2), (-90.7, 21.9, 48.2)),
    Box("lower_arm", (-145.1, -7.2, -1.5), (-118.7, 17.6, 38.1), SERVO_RGBA),
    # wrist: fork, shell and the roll servo inside it
    Box("wrist", (-12, -24, -9), (12, 0, -2)),
    Box("wrist", (-12, -24, 39), (12, 0, 46)),
    Box("wrist", (-20, -30, -9), (15.7, -20, 48)),
    Box("wrist", (-18, -65.8, -6), (15, -30, 7.9)),
    Box("wrist", (-18, -65.8, 7.9), (-12.4, -30, 42)),
    Box("wrist", (12.4, -65.8, 7.9), (15.5, -30, 42)),
    Box("wrist", (-12.4, -62.6, 7.9), (12.4, -23, 53.3), SERVO_RGBA),
    # gripper: top plate, the fixed jaw's root, the jaw servo
    Box("gripper", (-35.2, -28, -12), (30, 24, 0)),
    Box("gripper", (-35.2, -22, -48), (-13.3, 22, -12)),
    Box("gripper", (-15, -19.3, -35.8), (30.4, 20.3, -12), SERVO_RGBA),
    # camera mount and camera
    Box("camera_mount", (-17, 15, -33), (12, 45, -27)),
    # moving jaw: fork around the servo, root
    Box("moving_jaw_so101_v1", (-9, -19, -5), (9, 2, 1)),
    Box("moving_jaw_so101_v1", (-9, -19, 37), (9, 2, 43)),
    Box("moving_jaw_so101_v1", (-9.5, -27, -3), (8.5, -17, 41)),
)
DISCS = (
    Disc("shoulder", (0, 0, -6.5), 12, 4),
    Disc("shoulder", (0, 0, 42.5), 12, 4),
    Disc("upper_arm", (0, 0, -8.3), 12, 5.3),
    Disc("upper_arm", (0, 0, 44.8), 12, 5.3),
    Disc("upper_arm", (0, 0, 18.2), 10, 20, SERVO_RGBA),
    Disc("lower_arm", (0, 0, -7.5), 12, 4.5),
    Disc("lower_arm", (0, 0, 44.5), 12, 4.5),
    Disc("wrist", (0, 0, -5.5), 12, 3.5),
    Disc("wrist", (0, 0, 42.5), 12, 3.5),
    Disc("gripper", (0, 0, 0.5), 11, 4, SERVO_RGBA),
    Disc("moving_jaw_so101_v1", (0, 0, -2), 10, 3),
    Disc("moving_jaw_so101_v1", (0, 0, 40), 10, 3),
)
TAPERS = (
    Taper("gripper", (-33.4, -11, -48), (-13.3, 11, -48), (-20.1, -7, -88), (-11.0, 7, -88)),
    Taper("gripper", (-20.1, -7, -88), (-11.0, 7, -88), (-13.0, -3.3, -104.4), (-7.9, 3.3, -104.4)),
    Taper("moving_jaw_so101_v1", (-8.3, -25, 8), (7.6, -25, 30), (-8.3, -62, 11.6), (2.5, -62, 26.2)),
    Taper("moving_jaw_so101_v1", (-8.3, -62, 11.6), (2.5, -62, 26.2), (-12.3, -82, 15.2), (-6.5, -82, 22.6)),
)
_CAMERA_TILT_QUAT = (0.9624252, -0.2715469, 0.0, 0.0)  # -0.55 rad about x, as the published mount


def add_visuals(spec: mujoco.MjSpec) -> None:
    """Add the drawn shapes to the links of ``spec``; they collide with nothing and weigh nothing."""
    drawn = {"group": VISUAL_GROUP, "contype": 0, "conaffinity": 0, "mass": 0.0}
    count = 0

    def name(rgba: tuple[float, float, float, float]) -> str:
        nonlocal count
        count += 1
        return f"{PLASTIC_PREFIX if rgba == PLASTIC_RGBA else 'part'}_{count}"

    for box in BOXES:
        low, high = np.array(box.low) * _MM, np.array(box.high) * _MM
        spec.body(box.link).add_geom(
            name=name(box.rgba), type=mujoco.mjtGeom.mjGEOM_BOX, pos=(low + high) / 2, size=(high - low) / 2,
            rgba=box.rgba, **drawn,
        )  # fmt: skip
    for disc in DISCS:
        spec.body(disc.link).add_geom(
            name=name(disc.rgba), type=mujoco.mjtGeom.mjGEOM_CYLINDER, pos=np.array(disc.center) * _MM,
            size=[disc.radius * _MM, disc.half_length * _MM, 0], rgba=disc.rgba, **drawn,
        )  # fmt: skip
    for index, taper in enumerate(TAPERS):
        mesh = spec.add_mesh(name=f"taper_{index}")
        vertices = np.concatenate(
            [_rectangle(taper.low_a, taper.high_a), _rectangle(taper.low_b, taper.high_b)]
        )
        mesh.uservert = (vertices * _MM).ravel()
        spec.body(taper.link).add_geom(
            name=name(taper.rgba),
            type=mujoco.mjtGeom.mjGEOM_MESH,
            meshname=mesh.name,
            rgba=taper.rgba,
            **drawn,
        )
    mount = spec.body("camera_mount")
    mount.add_geom(
        name=name(PLASTIC_RGBA), type=mujoco.mjtGeom.mjGEOM_BOX, pos=[-0.001, 0.06, -0.04],
        quat=_CAMERA_TILT_QUAT, size=[0.021, 0.021, 0.002], rgba=PLASTIC_RGBA, **drawn,
    )  # fmt: skip
    mount.add_geom(
        name=name(CAMERA_RGBA), type=mujoco.mjtGeom.mjGEOM_BOX, pos=[-0.001, 0.0572, -0.0362],
        quat=_CAMERA_TILT_QUAT, size=[0.016, 0.016, 0.003], rgba=CAMERA_RGBA, **drawn,
    )  # fmt: skip


def _rectangle(low: Corner, high: Corner) -> np.ndarray:
    """The four corners of an axis-aligned rectangle, shape (4, 3), from two opposite ones."""
    flat = next(axis for axis in range(3) if low[axis] == high[axis])
    u, v = (axis for axis in range(3) if axis != flat)
    corners = np.array([low] * 4, dtype=np.float64)
    corners[1, u] = corners[2, u] = high[u]
    corners[2, v] = corners[3, v] = high[v]
    return corners
