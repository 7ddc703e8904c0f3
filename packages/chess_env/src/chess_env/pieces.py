"""Chess pieces: their shapes, sizes [m] and mass [kg]. A new kind is one more entry of ``PIECE_KINDS``.

A piece stands on its own frame's origin, z up. Sizes follow a small club set in Staunton's order of heights (pawn
48 mm, rook 45, knight 55, bishop 60, queen 70, king 78; bases 28 to 31 mm on 40 mm squares); 20 g is a plastic pawn
with felt, and the weight of every piece sits in its base. Source of what can be grasped: measured lifts in
simulation: 10 g is marginal and 5 g fails, a flat slab for a knight is fragile, while a round chest with a short
snout holds. Tall pieces have a plain round stem where the fingers close, and heads narrower than the open jaws.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import mujoco
import numpy as np

from chess_env.config import PieceKind

PIECE_MASS = 0.020
"""Of a pawn or a knight [kg]."""

WHITE_RGBA = (0.95, 0.94, 0.90, 1.0)
BLACK_RGBA = (0.09, 0.08, 0.08, 1.0)

CONTACT: dict[str, Any] = {"condim": 4, "friction": [1.0, 0.005, 0.0001], "solref": [0.01, 1.0]}
"""Contact of a piece with the board and with other pieces; the fingers' own parameters win over it."""

# A piece stands on small spheres along the rim of its base. The base itself touches the arm and other pieces only:
# MuJoCo 3.8 finds the contacts of a cylinder on a box at one corner alone, and a press of 2 N sinks it into the board.
NUM_FEET = 6
FOOT_RADIUS = 0.001
BASE_BIT = 2
"""Bit of ``contype`` and ``conaffinity`` for contacts with a base; the board and the table have bit 1 alone."""
_FOOT_GROUP = 3  # not drawn


@dataclass(frozen=True)
class Part:
    """A primitive in the piece's frame: cylinder and capsule (radius, half length), sphere (radius), box (half sizes),
    ellipsoid (half axes)."""

    shape: Literal["cylinder", "capsule", "sphere", "box", "ellipsoid"]
    size: tuple[float, ...]
    pos: tuple[float, float, float]
    mass_share: float = 0.0
    collides: bool = True
    is_base: bool = False
    quat: tuple[float, float, float, float] = (1, 0, 0, 0)


@dataclass(frozen=True)
class PieceShape:
    """What the simulator and the expert know of one kind."""

    parts: tuple[Part, ...]
    height: float
    base_radius: float
    grasp_radius: float
    """Radius that the fingers close on [m]."""
    grasp_height: float = 0.024
    """Where the finger tips take it, above its base [m]: on the stem, above the weight."""
    mass: float = PIECE_MASS
    """[kg]"""
    snout: tuple[float, float, float] | None = None
    """Half width (x), half length (y) and centre (y) of what sticks out above the grasp [m]; None: round."""


def _ring(count: int, radius: float, z: float, part: Part) -> tuple[Part, ...]:
    """``count`` copies of ``part`` around the axis, turned outwards; drawn only."""
    angles = 2 * np.pi * (np.arange(count) + 0.5) / count
    return tuple(
        replace(
            part,
            pos=(float(radius * np.cos(a)), float(radius * np.sin(a)), z),
            quat=(float(np.cos(a / 2)), 0.0, 0.0, float(np.sin(a / 2))),
            collides=False,
        )
        for a in angles
    )


PIECE_KINDS: dict[PieceKind, PieceShape] = {
    "pawn": PieceShape(
        parts=(
            Part("cylinder", (0.0140, 0.004), (0, 0, 0.004), mass_share=0.6, is_base=True),
            Part("cylinder", (0.0065, 0.011), (0, 0, 0.019), mass_share=0.2),
            Part("sphere", (0.0085,), (0, 0, 0.040), mass_share=0.2),
        ),
        height=0.0485,
        base_radius=0.0140,
        grasp_radius=0.0085,
    ),
    "knight": PieceShape(
        parts=(
            Part("cylinder", (0.0145, 0.004), (0, 0, 0.004), mass_share=0.6, is_base=True),
            Part("capsule", (0.0090, 0.010), (0, 0, 0.027), mass_share=0.2),
            Part("box", (0.0070, 0.0115, 0.006), (0, 0.003, 0.042), mass_share=0.2),
            Part("box", (0.0055, 0.0025, 0.004), (0, -0.004, 0.051), collides=False),  # ears
        ),
        height=0.055,
        base_radius=0.0145,
        grasp_radius=0.0090,
        snout=(0.0070, 0.0115, 0.003),
    ),
    "bishop": PieceShape(
        parts=(
            Part("cylinder", (0.0145, 0.004), (0, 0, 0.004), mass_share=0.6, is_base=True),
            Part("cylinder", (0.0075, 0.015), (0, 0, 0.023), mass_share=0.2),
            Part("cylinder", (0.0100, 0.0015), (0, 0, 0.0375), mass_share=0.05),
            Part("ellipsoid", (0.0085, 0.0085, 0.0100), (0, 0, 0.0475), mass_share=0.15),
            Part("sphere", (0.0025,), (0, 0, 0.0575), collides=False),
        ),
        height=0.060,
        base_radius=0.0145,
        grasp_radius=0.0075,
        mass=0.024,
    ),
    "rook": PieceShape(
        parts=(
            Part("cylinder", (0.0150, 0.004), (0, 0, 0.004), mass_share=0.6, is_base=True),
            Part("cylinder", (0.0090, 0.0125), (0, 0, 0.0205), mass_share=0.2),
            Part("cylinder", (0.0115, 0.0040), (0, 0, 0.037), mass_share=0.2),
            *_ring(5, 0.0098, 0.043, Part("box", (0.0017, 0.0036, 0.002), (0, 0, 0))),  # battlements
        ),
        height=0.045,
        base_radius=0.0150,
        grasp_radius=0.0090,
        mass=0.024,
    ),
    "queen": PieceShape(
        parts=(
            Part("cylinder", (0.0150, 0.004), (0, 0, 0.004), mass_share=0.6, is_base=True),
            Part("cylinder", (0.0080, 0.0190), (0, 0, 0.027), mass_share=0.2),
            Part("cylinder", (0.0105, 0.0015), (0, 0, 0.0475), mass_share=0.05),
            Part("cylinder", (0.0070, 0.0050), (0, 0, 0.054), mass_share=0.05),
            Part("cylinder", (0.0095, 0.0025), (0, 0, 0.0605), mass_share=0.1),
            *_ring(8, 0.0078, 0.0635, Part("sphere", (0.0020,), (0, 0, 0))),  # coronet
            Part("sphere", (0.0040,), (0, 0, 0.066), collides=False),
        ),
        height=0.070,
        base_radius=0.0150,
        grasp_radius=0.0080,
        grasp_height=0.030,
        mass=0.030,
    ),
    "king": PieceShape(
        parts=(
            Part("cylinder", (0.0155, 0.004), (0, 0, 0.004), mass_share=0.6, is_base=True),
            Part("cylinder", (0.0085, 0.0210), (0, 0, 0.029), mass_share=0.2),
            Part("cylinder", (0.0110, 0.0015), (0, 0, 0.0515), mass_share=0.05),
            Part("cylinder", (0.0085, 0.0060), (0, 0, 0.059), mass_share=0.1),
            Part("box", (0.0020, 0.0020, 0.0065), (0, 0, 0.0715), mass_share=0.05),  # cross
            Part("box", (0.0060, 0.0020, 0.0020), (0, 0, 0.0725), collides=False),
        ),
        height=0.078,
        base_radius=0.0155,
        grasp_radius=0.0085,
        grasp_height=0.032,
        mass=0.034,
    ),
}


@dataclass(frozen=True)
class Piece:
    """One piece of the pool: its ids in the model."""

    slot: int
    kind: PieceKind
    body_id: int
    qpos_adr: int
    dof_adr: int
    geom_ids: tuple[int, ...]
    drawn_geom_ids: tuple[int, ...]
    solid_geom_ids: tuple[int, ...]
    """Those of the drawn ones that collide while the piece is on the board."""


_GEOM_TYPES = {
    "box": mujoco.mjtGeom.mjGEOM_BOX,
    "sphere": mujoco.mjtGeom.mjGEOM_SPHERE,
    "capsule": mujoco.mjtGeom.mjGEOM_CAPSULE,
    "cylinder": mujoco.mjtGeom.mjGEOM_CYLINDER,
    "ellipsoid": mujoco.mjtGeom.mjGEOM_ELLIPSOID,
}


def add_piece(body: mujoco.MjsBody, kind: PieceKind) -> None:
    """Add the geoms of ``kind`` to ``body``, which has a free joint."""
    shape = PIECE_KINDS[kind]
    for part in shape.parts:
        if not part.collides:
            contype, conaffinity = 0, 0
        elif part.is_base:
            contype, conaffinity = BASE_BIT, BASE_BIT
        else:
            contype, conaffinity = 1, 1 | BASE_BIT
        body.add_geom(
            type=_GEOM_TYPES[part.shape],
            size=list(part.size) + [0.0] * (3 - len(part.size)),
            pos=part.pos,
            quat=part.quat,
            mass=shape.mass * part.mass_share,
            rgba=WHITE_RGBA,
            contype=contype,
            conaffinity=conaffinity,
            **CONTACT,
        )
    for angle in 2 * np.pi * np.arange(NUM_FEET) / NUM_FEET:
        rim = shape.base_radius - FOOT_RADIUS
        body.add_geom(
            type=mujoco.mjtGeom.mjGEOM_SPHERE,
            size=[FOOT_RADIUS, 0, 0],
            pos=[rim * np.cos(angle), rim * np.sin(angle), FOOT_RADIUS],
            group=_FOOT_GROUP,
            mass=0.0,
            **CONTACT,
        )
