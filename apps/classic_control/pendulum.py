"""A mediocre flow policy for Gymnasium's Pendulum, to be improved by flowrl-train (docs/classic_control.md).

    uv run python apps/classic_control/pendulum.py --out runs/pendulum-start
    uv run flowrl-train --policy runs/pendulum-start --out runs/pendulum

A scripted controller that uses a quarter of the motor's torque swings the pendulum up and holds it, slowly. A small
velocity field is cloned from it by flow matching. Nothing here knows of reinforcement learning.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import gymnasium
import numpy as np
import torch
import tyro
from torch import Tensor

from flowrl.errors import FlowRLError
from flowrl.policy.mlp import MLPConfig, MLPFlowPolicy

ENV_ID, MAX_TORQUE = "Pendulum-v1", 2.0  # [N m]
CHUNK = 4  # targets of 0.05 s in a decision
PRESET = {
    "env_kwargs": {},
    "train": {
        "env_id": ENV_ID,
        "iterations": 60,
        "envs": 8,
        "episodes": 40,
        "val_episodes": 60,
        "val_every": 5,
        "lr": 2e-3,
        "critic_lr": 1e-3,
        "sigma_start": 0.5,
        "sigma_end": 0.2,
        "gamma": 0.95,
        "lam": 0.95,
        "reward_scale": 0.02,
        "bootstrap_truncated": True,
        "epochs": 5,
        "minibatch": 128,
        "target_kl": 0.1,
        "critic_warmup": 1,
    },
}


@dataclass(frozen=True)
class Config:
    """Clone the scripted controller into a flow policy."""

    out: str
    """Folder for the policy; new."""
    episodes: int = 40
    """Recorded episodes of 200 steps."""
    steps: int = 3000
    """Steps of flow matching."""
    torque: float = 0.5
    """Torque that the controller uses, of the motor's 2 [N m]."""
    seed: int = 0
    """Seed of the episodes, the weights and the minibatches."""


def control(observation: np.ndarray, torque: float) -> float:
    """Torque [N m] of the scripted controller, from (cos angle, sin angle, angular velocity [rad/s]); angle 0 is upright.

    Far from upright it pushes with the motion while the energy is below that of standing still upright, and against it
    above. Mass 1 kg, length 1 m, g = 10 m/s^2: energy [J] = velocity^2 / 6 + 5 (cos angle - 1).
    Source of the idea: Astrom and Furuta 2000, "Swinging up a pendulum by energy control".
    """
    cosine, sine, velocity = (float(value) for value in observation)
    angle = np.arctan2(sine, cosine)
    if abs(angle) < 0.4:
        wanted = -10.0 * angle - 2.0 * velocity
    else:
        missing_energy = -(velocity**2 / 6 + 5 * (cosine - 1))
        wanted = torque * np.sign(missing_energy) * (1.0 if velocity >= 0 else -1.0)
    return float(np.clip(wanted, -torque, torque))


def record(config: Config) -> tuple[Tensor, Tensor]:
    """States (N, 3) and the controller's next torques (N, CHUNK, 1), from episodes that are shaken for variety."""
    env, rng = gymnasium.make(ENV_ID), np.random.default_rng(config.seed)
    states, chunks = [], []
    for episode in range(config.episodes):
        observation, _ = env.reset(seed=config.seed * 1_000_003 + episode)
        seen, torques, ended = [], [], False
        while not ended:
            torque = control(observation, config.torque)
            seen.append(observation)
            torques.append(torque)
            shaken = np.array([torque + rng.normal(0, 0.3)], dtype=np.float32)
            observation, _, terminated, truncated, _ = env.step(shaken)
            ended = terminated or truncated
        for start in range(len(seen) - CHUNK):
            states.append(seen[start])
            chunks.append(torques[start : start + CHUNK])
    return torch.tensor(np.array(states)), torch.tensor(chunks, dtype=torch.float32)[..., None]


def clone(states: Tensor, chunks: Tensor, config: Config) -> MLPFlowPolicy:
    """Flow matching: at x_t = time * noise + (1 - time) * chunk the velocity is noise - chunk.

    Source: Lipman et al. 2023, "Flow matching for generative modeling", eq. 23, in SmolVLA's direction of time.
    """
    statistics = {
        "observation.state.mean": states.mean(dim=0),
        "observation.state.std": states.std(dim=0),
        "action.mean": torch.zeros(1),
        "action.std": torch.full((1,), MAX_TORQUE),
    }
    policy = MLPFlowPolicy.create(
        MLPConfig(state_dim=3, action_dim=1, chunk_size=CHUNK, n_action_steps=CHUNK),
        statistics,
        seed=config.seed,
        preset=PRESET,
    )
    parameters = list(policy.trainable_parameters().values())
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.0)
    generator = torch.Generator().manual_seed(config.seed)
    prefix = policy.encode({"agent_pos": states.numpy()}, [""] * len(states))
    targets = policy.normalize(chunks)
    for step in range(config.steps):
        index = torch.randint(len(states), (256,), generator=generator)
        actions, time = targets[index], torch.rand(256, generator=generator)
        noise = torch.randn(actions.shape, generator=generator)
        x_t = time[:, None, None] * noise + (1 - time[:, None, None]) * actions
        loss = (policy.velocity(x_t, time, prefix[index]) - (noise - actions)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 500 == 0:
            print(f"step {step}: loss {loss.item():.4f}", file=sys.stderr)
    return policy


def main(config: Config) -> Path:
    """Records, clones and saves; returns the folder.

    Raises:
        FlowRLError: The folder exists.
    """
    out = Path(config.out)
    if out.exists():
        raise FlowRLError(f"--out {out}: exists; choose another")
    torch.set_num_threads(1)
    policy = clone(*record(config), config)
    out.mkdir(parents=True)
    policy.save(out)
    return out


if __name__ == "__main__":
    try:
        print(main(tyro.cli(Config, description=__doc__)))
    except FlowRLError as error:
        sys.exit(f"error: {error}")
