"""Domain randomization: what each range moves, and by how much."""

import re
from dataclasses import FrozenInstanceError, fields, replace

import numpy as np
import pytest

from chess_env.config import RANDOMIZATIONS, EnvConfig, Randomization
from chess_env.errors import ConfigError
from chess_env.simulation import Simulation

NONE, WIDE = RANDOMIZATIONS["none"], RANDOMIZATIONS["wide"]
NOMINAL_MASS = 0.020  # of a pawn or a knight [kg]
NOMINAL_GAIN = 998.22  # published servo gain [N m/rad]
NOMINAL_DAMPING = 0.60  # [N m s/rad]


def begin(randomization: Randomization, index: int = 3) -> Simulation:
    simulation = Simulation(EnvConfig(observation="state", randomization=randomization))
    simulation.begin(1, index, early_stop=False)
    return simulation


def fingerprint(simulation: Simulation) -> bytes:
    """Everything that a range may move: start pose and fields of the model."""
    model = simulation.scene.model
    light, head = model.light("sun").id, model.vis.headlight
    arrays = (
        simulation.data.qpos[:6], model.geom_rgba, model.geom_friction, model.cam_pos, model.cam_quat,
        model.light_diffuse[light], model.light_dir[light], head.ambient, model.body_mass, model.body_inertia,
        model.actuator_gainprm, model.actuator_biasprm, model.dof_damping,
    )  # fmt: skip
    return b"".join(np.asarray(array).tobytes() for array in arrays)


def test_without_ranges_nothing_varies():
    assert fingerprint(begin(NONE, 3)) != fingerprint(begin(WIDE, 3))
    first, second = begin(NONE, 3), begin(NONE, 3)
    assert fingerprint(first) == fingerprint(second)
    assert {getattr(NONE, item.name) for item in fields(NONE)} == {0.0}


@pytest.mark.parametrize("name", [item.name for item in fields(Randomization)])
def test_every_range_moves_something_and_wide_has_it(name):
    assert getattr(WIDE, name) > 0
    alone = begin(replace(NONE, **{name: getattr(WIDE, name)}))
    assert fingerprint(alone) != fingerprint(begin(NONE))


def test_default_keeps_masses_gains_friction_and_the_board_as_they_are():
    default = Randomization()
    for name in ("piece_friction", "piece_mass", "board_colour", "board_tint", "servo_gain", "joint_damping"):
        assert getattr(default, name) == 0.0
    assert default == RANDOMIZATIONS["default"]


def test_wide_masses_gains_and_damping_stay_within_their_fractions_and_spread():
    masses, gains, dampings = [], [], []
    simulation = Simulation(EnvConfig(observation="state", randomization=WIDE))
    for index in range(40):
        simulation.begin(1, index, early_stop=False)
        model, scene = simulation.scene.model, simulation.scene
        masses.append(model.body_mass[scene.pieces[0].body_id] / NOMINAL_MASS)
        gains.append(model.actuator_gainprm[scene.actuator_ids[2], 0] / NOMINAL_GAIN)
        assert (
            model.actuator_biasprm[scene.actuator_ids[2], 1]
            == -model.actuator_gainprm[scene.actuator_ids[2], 0]
        )
        dampings.append(np.ravel(model.dof_damping[:6])[0] / NOMINAL_DAMPING)
    for values, most in ((masses, 0.25), (gains, 0.10), (dampings, 0.20)):
        deviations = np.abs(np.array(values) - 1)
        assert deviations.max() <= most + 1e-9 and deviations.max() > 0.8 * most
        assert np.std(values) == pytest.approx(most / np.sqrt(3), rel=0.3)  # of an even draw


def test_board_colours_move_by_their_ranges_alone():
    ranges = replace(NONE, board_colour=0.05)
    model = begin(ranges).scene.model
    light = model.geom_rgba[model.geom("light_squares").id, :3] - np.array([0.70, 0.55, 0.36])
    dark = model.geom_rgba[model.geom("dark_squares").id, :3] - np.array([0.36, 0.22, 0.13])
    for shift in (light, dark):
        assert np.ptp(shift) < 1e-6 and 0 < abs(shift[0]) <= 0.05
    assert abs(light[0] - dark[0]) > 1e-4


def test_a_config_cannot_be_changed():
    with pytest.raises(FrozenInstanceError):
        Randomization().piece_mass = 0.1


@pytest.mark.parametrize(
    ("ranges", "message"),
    [
        ({"piece_mass": 0.6}, "randomization piece_mass=0.6: at most 0.5 is allowed"),
        ({"servo_gain": -0.1}, "randomization servo_gain=-0.1: a finite number of at least 0"),
        ({"joint_damping": float("inf")}, "randomization joint_damping=inf: a finite number"),
        ({"board_colour": "dark"}, "randomization board_colour='dark'"),
        ({"gravity": 0.1}, "randomization has no field ['gravity']: allowed are arm_start_deg"),
    ],
)
def test_wrong_range_is_named(ranges, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        EnvConfig.from_arguments(randomization=ranges)
