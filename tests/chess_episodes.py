"""Chunks of actions and whole states, for tests of the environment."""

import mujoco
import numpy as np

from chess_env.expert import Expert
from chess_env.so101 import to_units

SMALL = {"image_size": 48}


def hold(observation, chunk_size=50):
    """The chunk that stays where the arm is."""
    return np.repeat(observation["agent_pos"][None], chunk_size, axis=0)


def full_state(env):
    model, data = env.simulation.scene.model, env.simulation.data
    state = np.empty(mujoco.mj_stateSize(model, mujoco.mjtState.mjSTATE_INTEGRATION))
    mujoco.mj_getState(model, data, state, mujoco.mjtState.mjSTATE_INTEGRATION)
    return state


def expert_chunks(env, variety_seed=0):
    """The expert's whole plan as chunks, the last one filled up with its last target."""
    plan = Expert(env.simulation.scene).plan(
        env.simulation.data, env.simulation.target_slot, np.random.default_rng(variety_seed)
    )
    units = to_units(plan).astype(np.float32)
    length = -(-len(units) // 50) * 50
    return np.concatenate([units, np.repeat(units[-1:], length - len(units), 0)]).reshape(-1, 50, 6)


def run_chunks(env, chunks):
    for chunk in chunks:
        result = env.step(chunk)
        if result[2] or result[3]:
            break
    return result
