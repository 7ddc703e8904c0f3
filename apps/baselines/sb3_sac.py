"""Stable-Baselines3's SAC on the privileged state of ChessPick-v0.

python apps/baselines/sb3_sac.py --steps 30000 --out outputs/sb3_sac.json
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import time
from importlib.metadata import version
from pathlib import Path

import torch
from pick_task import GAMMA, TaskConfig, Vector, make_task, write_results
from stable_baselines3 import SAC
from stable_baselines3.common.monitor import Monitor


def main() -> None:
    """Train, evaluate, write the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=30_000, help="decisions to train for")
    parser.add_argument("--learning-starts", type=int, default=1_000, help="random decisions before learning")
    parser.add_argument("--train-freq", type=int, default=2, help="decisions between two gradient steps")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--eval-episodes", type=int, default=50)
    parser.add_argument("--out", type=Path, default=Path("outputs/baselines/sb3_sac.json"))
    flags = parser.parse_args()
    torch.set_num_threads(1)
    task = TaskConfig()
    env = Monitor(make_task(task, first=flags.seed * 1_000_000))
    model = SAC(
        "MlpPolicy",
        env,
        learning_rate=flags.lr,
        learning_starts=flags.learning_starts,
        train_freq=flags.train_freq,
        gamma=GAMMA,
        seed=flags.seed,
        device="cpu",
        verbose=0,
    )
    began = time.monotonic()
    model.learn(flags.steps, log_interval=10_000)
    env.close()

    def act(observation: Vector) -> Vector:
        return model.predict(observation, deterministic=True)[0]

    write_results(
        flags.out,
        "Stable-Baselines3 SAC",
        flags,
        task,
        steps=model.num_timesteps,
        began=began,
        act=act,
        episodes=flags.eval_episodes,
        versions={name: version(name) for name in ("stable-baselines3", "torch", "mujoco")},
    )


if __name__ == "__main__":
    main()
