"""What can be reached on Pendulum: returns of a dynamic programme and of the scripted controller, on flowrl's scenes.

uv run python apps/classic_control/optimum.py --seed 9300003 --episodes 60

The dynamic programme knows the equations of motion and the 200 steps, and minimizes the cost-to-go on a grid of angle and
velocity. Pendulum has no randomness after its start, so executing targets by chunks loses nothing against it.
"""

from collections.abc import Callable
from dataclasses import dataclass

import gymnasium
import numpy as np
import tyro
from pendulum import ENV_ID, MAX_TORQUE, control

from flowrl.metrics import mean_interval
from flowrl.scenes import fixed_scenes

STEPS, TIMESTEP, MAX_SPEED = 200, 0.05, 8.0  # [s], [rad/s]; Gymnasium's PendulumEnv, g = 10 m/s^2, 1 kg, 1 m
GRID = 121  # points of angle and of velocity
ANGLES, VELOCITIES = np.linspace(-np.pi, np.pi, GRID), np.linspace(-MAX_SPEED, MAX_SPEED, GRID)

Act = Callable[[np.ndarray, int], float]
"""Torque [N m] from the observation and the number of the step."""


@dataclass(frozen=True)
class Config:
    """Returns that the start policy and a trained one can be compared with."""

    seed: int = 9_300_003
    """Seed of the scenes; by default those of flowrl's validation."""
    episodes: int = 60
    """Number of scenes."""


def advance(
    angle: np.ndarray, velocity: np.ndarray, torque: np.ndarray | float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Angle [rad], velocity [rad/s] and cost of one step. Source: Gymnasium's PendulumEnv.step."""
    cost = wrap(angle) ** 2 + 0.1 * velocity**2 + 0.001 * torque**2
    faster = np.clip(velocity + (15 * np.sin(angle) + 3 * torque) * TIMESTEP, -MAX_SPEED, MAX_SPEED)
    return angle + faster * TIMESTEP, faster, cost


def wrap(angle: np.ndarray) -> np.ndarray:
    """The angle in [-pi, pi)."""
    return (angle + np.pi) % (2 * np.pi) - np.pi


def interpolate(table: np.ndarray, angle: np.ndarray, velocity: np.ndarray) -> np.ndarray:
    """Bilinear interpolation of a (GRID, GRID) table."""
    row = (wrap(angle) + np.pi) / (2 * np.pi) * (GRID - 1)
    column = (velocity + MAX_SPEED) / (2 * MAX_SPEED) * (GRID - 1)
    i, j = (np.clip(x.astype(int), 0, GRID - 2) for x in (row, column))
    x, y = row - i, column - j
    left = (1 - y) * table[i, j] + y * table[i, j + 1]
    return (1 - x) * left + x * ((1 - y) * table[i + 1, j] + y * table[i + 1, j + 1])


def costs_to_go() -> list[np.ndarray]:
    """Smallest cost of the last k steps, k = 0 to 200, each (GRID, GRID)."""
    angle, velocity = np.meshgrid(ANGLES, VELOCITIES, indexing="ij")
    moves = [advance(angle, velocity, torque) for torque in np.linspace(-MAX_TORQUE, MAX_TORQUE, 9)]
    tables = [np.zeros((GRID, GRID))]
    for _ in range(STEPS):
        tables.append(np.min([cost + interpolate(tables[-1], a, v) for a, v, cost in moves], axis=0))
    return tables


def programme() -> Act:
    """Looks one step ahead, with 41 torques."""
    tables, torques = costs_to_go(), np.linspace(-MAX_TORQUE, MAX_TORQUE, 41)

    def act(observation: np.ndarray, step: int) -> float:
        angle = np.full(len(torques), np.arctan2(observation[1], observation[0]))
        angles, velocities, costs = advance(angle, np.full(len(torques), observation[2]), torques)
        totals = costs + interpolate(tables[STEPS - 1 - step], angles, velocities)
        return float(torques[int(np.argmin(totals))])

    return act


def returns(act: Act, config: Config) -> list[float]:
    """The return of each scene."""
    env, found = gymnasium.make(ENV_ID), []
    for scene in fixed_scenes(config.seed, config.episodes):
        observation, _ = env.reset(seed=scene.derived_seed)
        total = 0.0
        for step in range(STEPS):
            observation, reward, *_ = env.step(np.array([act(observation, step)], dtype=np.float32))
            total += float(reward)
        found.append(total)
    return found


if __name__ == "__main__":
    chosen = tyro.cli(Config, description=__doc__)
    agents: dict[str, Act] = {
        "dynamic programme": programme(),
        "controller, full torque": lambda observation, _: control(observation, MAX_TORQUE),
        "controller, quarter torque": lambda observation, _: control(observation, 0.5),
        "no torque": lambda observation, _: 0.0,
    }
    for name, agent in agents.items():
        values = returns(agent, chosen)
        interval = mean_interval(values)
        print(name, f"{np.mean(values):.1f}", *(f"{end:.1f}" for end in interval or ()))
