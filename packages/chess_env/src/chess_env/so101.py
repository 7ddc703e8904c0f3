"""The SO-101 arm: joints, limits, units, link frames, inertias, servos and finger collision shapes.

All lengths [m], angles [rad], masses [kg], quaternions (w, x, y, z), each link in its parent's frame.

Source: The Robot Studio's SO-101 as published in MuJoCo Menagerie, ``robotstudio_so101/so101.xml``
(Apache-2.0): link frames, joint ranges, inertias, servo gains and the fingers' inner faces are its numbers.
The model itself is built here, from primitives, so that the package ships no meshes. The shapes that
are only looked at are in ``so101_looks``.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mujoco
import numpy as np
from numpy.typing import ArrayLike, NDArray

from chess_env import so101_looks
from chess_env.errors import ConfigError

JOINT_NAMES = ("shoulder_pan", "shoulder_lift", "elbow_flex", "wrist_flex", "wrist_roll", "gripper")
NUM_JOINTS = len(JOINT_NAMES)
GRIPPER_BODY = "gripper"
MOVING_JAW_BODY = "moving_jaw_so101_v1"
COLLISION_GROUP = 3
"""Geom group of shapes that collide and are not drawn (MuJoCo draws groups 0 to 2 by default)."""

# Joint limits [rad]: the published ranges.
JOINT_LOW = np.array([-1.91986, -1.7453293, -1.69, -1.658063, -2.7438473, -0.174533])
JOINT_HIGH = np.array([1.91986, 1.7453293, 1.69, 1.658063, 2.7438473, 1.7453292])
JOINT_LOW.setflags(write=False)
JOINT_HIGH.setflags(write=False)

PAN_AXIS_XY = np.array([0.0388353, 0.0])
"""Where the vertical shoulder_pan axis meets the table [m], world frame."""
PAN_AXIS_XY.setflags(write=False)

# Fingers, gripper frame [m]. Source: the collision shapes below (the fixed jaw's inner face and the tips).
FIXED_JAW_X = -0.0079
TIP_Z = -0.1035
MOVING_TIP = (-0.012, -0.078, 0.0192)
"""Tip of the moving jaw [m], in its own frame."""
SAME_PLACE_M = 0.003
"""A robot file whose finger tips are within this of ours has our joint conventions."""
GRASP_POINT = np.array([FIXED_JAW_X + 0.0145, 0.0, TIP_Z])
"""Between the finger tips of a gripper that is open for a piece [m], gripper frame."""
GRASP_POINT.setflags(write=False)
# Inner distance between the finger tips [m] at gripper angles [rad]. Source: forward kinematics of this model.
_OPENING_ANGLE = np.array([-0.17, 0.0, 0.2, 0.4, 0.6, 0.8, 1.0, 1.2, 1.4, 1.6, 1.7453292])
_OPENING_X = [-0.0048, 0.0082, 0.0239, 0.0395, 0.0543, 0.0678, 0.0794, 0.0886, 0.0950, 0.0985, 0.0991]
_OPENING_WIDTH = np.array(_OPENING_X) - FIXED_JAW_X

HOME_QPOS = np.array([-0.0374, -0.8807, 0.2215, 1.4443, -1.5750, 0.25])
"""Start pose [rad], shape (6,): finger tips at (0.22, 0, 0.18) m, camera turned outwards over the board. Low
poses knock over the pieces of the near ranks."""
HOME_QPOS.setflags(write=False)

WRIST_CAMERA_POS = (0.0, 0.055, -0.045)
WRIST_CAMERA_QUAT = (0.9596628, -0.2811573, 0.0, 0.0)  # -0.57 rad about x
WRIST_CAMERA_FOVY_DEG = 62.0
"""Vertical field of view [deg]. The published camera (1920x1080, 77 degrees wide, 48 high) is cut square."""


@dataclass(frozen=True)
class Servo:
    """A Feetech STS3215 as a MuJoCo position actuator. Source: Menagerie, class ``sts3215``."""

    kp: float = 998.22
    kv: float = 2.731
    force_limit: float = 2.94
    damping: float = 0.60
    frictionloss: float = 0.052
    armature: float = 0.028


SERVO = Servo()


@dataclass(frozen=True)
class Link:
    """One body: its frame in the parent, its inertia, and the joint (about its own z) that moves it."""

    name: str
    parent: str | None
    pos: tuple[float, float, float]
    quat: tuple[float, float, float, float]
    mass: float
    com: tuple[float, float, float]
    inertia: tuple[float, float, float, float, float, float]
    """xx, yy, zz, xy, xz, yz about the centre of mass [kg m^2]."""
    joint: str | None = None


LINKS = (
    Link("base", None, (0, 0, 0), (1, 0, 0, 0), 0.147, (0.0137179, -5.19711e-05, 0.0334843),
         (1.14686e-4, 1.36117e-4, 1.30364e-4, -4.59787e-7, 4.97151e-6, 9.75275e-8)),
    Link("shoulder", "base", (0.0388353, 0, 0.0624), (0, 0, -1, 0), 0.100006, (-0.0307604, -1.7e-05, -0.0252713),
         (8.3759e-5, 8.10403e-5, 2.39783e-5, 7.55525e-8, -1.16342e-6, 1.54663e-7), "shoulder_pan"),
    Link("upper_arm", "shoulder", (-0.0303992, -0.0182778, -0.0542), (1, -1, -1, -1), 0.103,
         (-0.089847, -0.008382, 0.018409),
         (4.08002e-5, 1.47318e-4, 1.42487e-4, -1.97819e-5, -4.03016e-8, 8.97326e-9), "shoulder_lift"),
    Link("lower_arm", "upper_arm", (-0.11257, -0.028, 0), (1, 0, 0, 1), 0.104, (-0.098070, 0.0032438, 0.018283),
         (2.87438e-5, 1.59844e-4, 1.45290e-4, 7.41152e-6, 1.26409e-6, -4.90188e-8), "elbow_flex"),
    Link("wrist", "lower_arm", (-0.1349, 0.0052, 0), (1, 0, 0, -1), 0.079, (-1.03312e-4, -0.0386143, 0.0281156),
         (3.68263e-5, 2.5391e-5, 2.1e-5, 1.7893e-8, -5.28128e-8, 3.6412e-6), "wrist_flex"),
    Link("gripper", "wrist", (0, -0.0611, 0.0181), (0.0172091, -0.0172091, 0.706897, 0.706897), 0.087,
         (2.14e-4, 2.45e-4, -0.025187),
         (2.75087e-5, 4.33657e-5, 3.45059e-5, -3.35241e-7, -5.7352e-6, -5.17847e-8), "wrist_roll"),
    # The published mount has no inertia of its own (12 g of mesh): that of a 42 x 60 x 12 mm box.
    Link("camera_mount", "gripper", (0, 0, 0), (1, 0, 0, 0), 0.012, (0, 0.045, -0.035),
         (3.7e-6, 1.9e-6, 5.4e-6, 0, 0, 0)),
    Link("moving_jaw_so101_v1", "gripper", (0.0202, 0.0188, -0.0234), (1, 1, 0, 0), 0.012,
         (-0.001575, -0.0300244, 0.0192755),
         (6.61427e-6, 1.89032e-6, 5.28738e-6, -3.19807e-7, -5.90717e-9, -1.09945e-7), "gripper"),
)  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """A collision primitive in its body's frame: half sizes of a box, radius of a sphere, radius and half length."""

    body: str
    kind: str
    size: tuple[float, ...]
    pos: tuple[float, float, float]
    quat: tuple[float, float, float, float] = (1, 0, 0, 0)


_HALF_TURN_X = (0.7071068, 0.7071068, 0.0, 0.0)  # a quarter turn about x, half angle 45 degrees

# Links: the published boxes, enough to feel the table and the pieces.
LINK_SHAPES = (
    Shape("shoulder", "box", (0.023, 0.015, 0.010), (-0.030399, 0.000422, -0.0387), (1, 1, 1, -1)),
    Shape("shoulder", "box", (0.038, 0.025, 0.020), (-0.025, 0, 0), (1, 1, -1, 1)),
    Shape("upper_arm", "box", (0.010, 0.070, 0.030), (-0.06, 0, 0.02), (0, -1, 1, 0)),
    Shape("upper_arm", "box", (0.010, 0.020, 0.015), (-0.12, -0.014, 0.0182), (0, 1, 0, 0)),
    Shape("lower_arm", "box", (0.070, 0.010, 0.030), (-0.05, 0, 0.0182), (0, 1, 0, 0)),
    Shape("lower_arm", "box", (0.023, 0.013, 0.018), (-0.125, 0.005, 0.018), (0, -1, 0, 0)),
    Shape("wrist", "box", (0.029, 0.015, 0.018), (0, -0.0424, 0.0256), (1, 1, 1, -1)),
    Shape("wrist", "box", (0.027, 0.010, 0.030), (0, -0.02, 0.0191), (1, -1, -1, -1)),
    Shape("gripper", "box", (0.010, 0.010, 0.018), (0, -0.000218, 0.00095), (0, 1, 0, 0)),
)

# Fingers: thin plates follow the inner faces, with small spheres at the tips. Hulls of the jaw meshes let
# pieces slip. The "back" boxes fill the jaws behind the plates (from the printed parts' outlines), so that a
# neighbour cannot pass through a finger.
FINGER_SHAPES = (
    Shape("gripper", "box", (0.0325, 0.015, 0.015), (-0.0025, 0, -0.022)),
    Shape("gripper", "box", (0.010, 0.015, 0.005), (-0.024, 0, -0.04)),
    Shape("gripper", "sphere", (0.00075,), (-0.0081, 0, -0.101)),
    Shape("gripper", "sphere", (0.00075,), (-0.0081, 0.0035, -0.0975)),
    Shape("gripper", "sphere", (0.00075,), (-0.0081, -0.0035, -0.0975)),
    Shape("gripper", "capsule", (0.0011, 0.002), (-0.009, 0, -0.103), _HALF_TURN_X),
    Shape("gripper", "box", (0.001, 0.004, 0.004), (-0.009, 0, -0.0982)),
    Shape("gripper", "box", (0.001, 0.005, 0.006), (-0.0108, 0, -0.0905)),
    Shape("gripper", "box", (0.001, 0.009, 0.008), (-0.0125, 0, -0.0727)),
    Shape("gripper", "box", (0.001, 0.010, 0.008), (-0.0143, 0, -0.053)),
    Shape("gripper", "box", (0.0019, 0.0035, 0.0035), (-0.0119, 0, -0.0985)),  # back
    Shape("gripper", "box", (0.0029, 0.0055, 0.0060), (-0.0147, 0, -0.0905)),  # back
    Shape("gripper", "box", (0.0052, 0.0075, 0.0100), (-0.0187, 0, -0.0750)),  # back
    Shape("gripper", "box", (0.0075, 0.0090, 0.0100), (-0.0228, 0, -0.0560)),  # back
    Shape("camera_mount", "box", (0.015, 0.015, 0.003), (-0.0025, 0.03, -0.03)),
    Shape("camera_mount", "box", (0.021, 0.021, 0.003), (-0.001, 0.06, -0.04), (0.9624252, -0.2715469, 0, 0)),
    Shape(MOVING_JAW_BODY, "box", (0.010, 0.010, 0.015), (0, -0.013, 0.019)),
    Shape(MOVING_JAW_BODY, "sphere", (0.00075,), MOVING_TIP),
    Shape(MOVING_JAW_BODY, "sphere", (0.00075,), (-0.012, -0.0745, 0.0225)),
    Shape(MOVING_JAW_BODY, "sphere", (0.00075,), (-0.012, -0.0745, 0.0155)),
    Shape(MOVING_JAW_BODY, "box", (0.001, 0.004, 0.004), (-0.0113, -0.076, 0.01875)),
    Shape(MOVING_JAW_BODY, "box", (0.001, 0.005, 0.006), (-0.0093, -0.067, 0.01875)),
    Shape(MOVING_JAW_BODY, "box", (0.0033, 0.0040, 0.0035), (-0.0073, -0.0765, 0.01875)),  # back
    Shape(MOVING_JAW_BODY, "box", (0.0045, 0.0055, 0.0055), (-0.0045, -0.0665, 0.01875)),  # back
    Shape(MOVING_JAW_BODY, "box", (0.0066, 0.0190, 0.0085), (-0.0017, -0.0420, 0.01875)),  # back
)
_GEOM_TYPES = {
    "box": mujoco.mjtGeom.mjGEOM_BOX,
    "sphere": mujoco.mjtGeom.mjGEOM_SPHERE,
    "capsule": mujoco.mjtGeom.mjGEOM_CAPSULE,
}


def to_units(qpos: ArrayLike) -> NDArray[np.float64]:
    """Joint angles [rad], shape (..., 6), to LeRobot's units: five joints [deg], gripper 0 (closed) to 100 (open)."""
    q = np.asarray(qpos, dtype=np.float64)
    units = np.degrees(q)
    units[..., 5] = (q[..., 5] - JOINT_LOW[5]) / (JOINT_HIGH[5] - JOINT_LOW[5]) * 100.0
    return units


def from_units(units: ArrayLike) -> NDArray[np.float64]:
    """LeRobot's units (five joints [deg], gripper 0 to 100), shape (..., 6), to joint angles [rad]. Clips nothing."""
    u = np.asarray(units, dtype=np.float64)
    q = np.radians(u)
    q[..., 5] = JOINT_LOW[5] + u[..., 5] / 100.0 * (JOINT_HIGH[5] - JOINT_LOW[5])
    return q


def unit_limits() -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Joint limits in LeRobot's units: (low, high), each of shape (6,)."""
    return to_units(JOINT_LOW), to_units(JOINT_HIGH)


def gripper_angle(opening_m: float) -> float:
    """Gripper angle [rad] at which the finger tips are ``opening_m`` [m] apart."""
    return float(np.interp(opening_m, _OPENING_WIDTH, _OPENING_ANGLE))


def gripper_opening(angle: float) -> float:
    """Distance between the finger tips along the jaws' axis [m] at a gripper ``angle`` [rad]: 3 mm closed, 107 mm open."""
    return float(np.interp(angle, _OPENING_ANGLE, _OPENING_WIDTH))


def arm_spec(robot: str | Path | None = None) -> mujoco.MjSpec:
    """A new spec with the arm, base at the world's origin: our model, or the SO-101 MJCF file ``robot``.

    A file gives links, inertias and looks; the fingers' collision shapes, the joint limits and the servos are ours
    in both cases, since those decide whether a piece can be held and what an action means. A camera
    named "wrist" is added.

    Raises:
        ConfigError: ``robot`` cannot be read, or lacks one of the joints or the bodies of the gripper.
    """
    spec = _own_spec() if robot is None else _file_spec(Path(robot))
    for shape in FINGER_SHAPES:
        body = spec.body(shape.body) or spec.body(GRIPPER_BODY)
        _add_shape(body, shape, condim=6, friction=[1.0, 5e-3, 5e-4], solref=[0.01, 1.0], priority=1)
    spec.body(GRIPPER_BODY).add_camera(
        name="wrist", pos=WRIST_CAMERA_POS, quat=WRIST_CAMERA_QUAT, fovy=WRIST_CAMERA_FOVY_DEG
    )
    for index, name in enumerate(JOINT_NAMES):
        joint = spec.joint(name)
        joint.damping = _like(joint.damping, SERVO.damping)
        joint.frictionloss, joint.armature = SERVO.frictionloss, SERVO.armature
        limits = np.array([JOINT_LOW[index], JOINT_HIGH[index]])
        joint.range = np.degrees(limits) if spec.compiler.degree else limits  # a file may count in degrees
        joint.limited = mujoco.mjtLimited.mjLIMITED_TRUE
        actuator = spec.add_actuator(name=name, target=name, trntype=mujoco.mjtTrn.mjTRN_JOINT)
        actuator.set_to_position(kp=SERVO.kp, kv=SERVO.kv)
        actuator.forcerange, actuator.forcelimited = [-SERVO.force_limit, SERVO.force_limit], 1
        actuator.ctrlrange, actuator.ctrllimited = limits, 1
    return spec


def build_arm_model(robot: str | Path | None = None) -> mujoco.MjModel:
    """The arm alone, without table and pieces (nq = 6): what kinematics needs."""
    return arm_spec(robot).compile()


def check_conventions(model: mujoco.MjModel, robot: str | Path) -> None:
    """Compare the finger tips of a model made from the file ``robot`` with those of our arm in several poses.

    Raises:
        ConfigError: They are elsewhere, so that an action of ours would mean another pose: joints that count from another
            zero (as SO-101 files of the older calibration do) or the other way, or other link frames.
    """
    own = build_arm_model()
    zero = np.zeros(NUM_JOINTS)
    poses = {"every joint 0": zero} | {
        f"{name} 20 deg, the others 0": np.where(np.arange(NUM_JOINTS) == index, np.radians(20), 0.0)
        for index, name in enumerate(JOINT_NAMES)
    }
    for name, qpos in poses.items():
        theirs, ours = _finger_tips_w(model, qpos), _finger_tips_w(own, qpos)
        apart = float(np.linalg.norm(theirs - ours, axis=1).max())
        if apart > SAME_PLACE_M:
            raise ConfigError(
                f"robot={str(robot)!r}: with {name} its finger tips are {1000 * apart:.0f} mm from where LeRobot's calibration "
                "has them (zero in the middle of each joint's range): use a file of that calibration, such as so101_new_calib.xml"
            )


def _finger_tips_w(model: mujoco.MjModel, qpos: NDArray[np.float64]) -> NDArray[np.float64]:
    """Tips of the fixed and the moving jaw [m], world frame, shape (2, 3)."""
    data = mujoco.MjData(model)
    for name, angle in zip(JOINT_NAMES, qpos):
        data.qpos[model.joint(name).qposadr[0]] = angle
    mujoco.mj_kinematics(model, data)
    tips = []
    for body, point in ((GRIPPER_BODY, (FIXED_JAW_X, 0.0, TIP_Z)), (MOVING_JAW_BODY, MOVING_TIP)):
        frame = data.body(body)
        tips.append(frame.xpos + frame.xmat.reshape(3, 3) @ np.array(point))
    return np.array(tips)


def _like(current: Any, value: float) -> Any:
    """``value`` in the shape of ``current``: MuJoCo 4 made some joint scalars into polynomial coefficients."""
    if np.ndim(current) == 0:
        return value
    filled = np.zeros_like(np.asarray(current, dtype=np.float64))
    filled[0] = value
    return filled


def _own_spec() -> mujoco.MjSpec:
    spec = mujoco.MjSpec()
    spec.compiler.degree = False
    bodies: dict[str, mujoco.MjsBody] = {}
    for link in LINKS:
        parent = spec.worldbody if link.parent is None else bodies[link.parent]
        body = parent.add_body(name=link.name, pos=link.pos, quat=link.quat)
        body.mass, body.ipos, body.fullinertia = link.mass, link.com, link.inertia
        body.explicitinertial = True
        if link.joint is not None:
            body.add_joint(name=link.joint, type=mujoco.mjtJoint.mjJNT_HINGE, axis=[0, 0, 1])
        bodies[link.name] = body
    for shape in LINK_SHAPES:
        _add_shape(bodies[shape.body], shape, condim=3)
    so101_looks.add_visuals(spec)
    return spec


def _add_shape(body: mujoco.MjsBody, shape: Shape, **contact: Any) -> None:
    size = list(shape.size) + [0.0] * (3 - len(shape.size))
    body.add_geom(
        type=_GEOM_TYPES[shape.kind],
        size=size,
        pos=shape.pos,
        quat=shape.quat,
        group=COLLISION_GROUP,
        mass=0.0,
        rgba=[1, 0, 0, 1],
        **contact,
    )


def _file_spec(path: Path) -> mujoco.MjSpec:
    if not path.is_file():
        raise ConfigError(
            f"robot={str(path)!r} is no file; give an SO-101 MJCF file, or None for the built-in arm"
        )
    try:
        spec = mujoco.MjSpec.from_file(str(path))
    except ValueError as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"robot={str(path)!r} is not a readable MJCF file: {reason}") from error
    missing = [name for name in JOINT_NAMES if spec.joint(name) is None]
    missing += [name for name in (GRIPPER_BODY, MOVING_JAW_BODY) if spec.body(name) is None]
    if missing:
        raise ConfigError(
            f"robot={str(path)!r} has no {', '.join(missing)}; an SO-101 with these names is needed"
        )
    for element in [*spec.actuators, *spec.cameras, *spec.keys]:
        spec.delete(element)
    for geom in spec.geoms:
        if geom.parent.name in (GRIPPER_BODY, MOVING_JAW_BODY, "camera_mount"):
            geom.contype, geom.conaffinity = 0, 0
    return spec
