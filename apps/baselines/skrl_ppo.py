"""skrl's PPO on the privileged state of ChessPick-v0.

python apps/baselines/skrl_ppo.py --steps 100000 --out outputs/skrl_ppo.json
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import time
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode
from pick_task import GAMMA, TaskConfig, Vector, make_task, write_results
from skrl.agents.torch.ppo import PPO, PPO_CFG
from skrl.envs.wrappers.torch import wrap_env
from skrl.memories.torch import RandomMemory
from skrl.models.torch import DeterministicMixin, GaussianMixin, Model
from skrl.trainers.torch import SequentialTrainer
from skrl.utils import set_seed
from torch import Tensor, nn


def mlp(inputs: int, outputs: int) -> nn.Sequential:
    """Two hidden layers of 128."""
    return nn.Sequential(
        nn.Linear(inputs, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, outputs)
    )


class Policy(GaussianMixin, Model):
    """A Gaussian with a standard deviation for each action."""

    def __init__(self, **spaces: Any) -> None:
        Model.__init__(self, **spaces)
        GaussianMixin.__init__(self, clip_actions=False)
        self.net = mlp(self.num_observations, self.num_actions)
        self.log_std = nn.Parameter(torch.full((self.num_actions,), -0.5))

    def compute(self, inputs: dict[str, Any], role: str = "") -> tuple[Tensor, dict[str, Any]]:
        """Mean actions, and the log standard deviation as skrl wants it."""
        return self.net(inputs["observations"]), {"log_std": self.log_std}


class Value(DeterministicMixin, Model):
    """The value of a state."""

    def __init__(self, **spaces: Any) -> None:
        Model.__init__(self, **spaces)
        DeterministicMixin.__init__(self)
        self.net = mlp(self.num_observations, 1)

    def compute(self, inputs: dict[str, Any], role: str = "") -> tuple[Tensor, dict[str, Any]]:
        """Values, shape (batch, 1)."""
        return self.net(inputs["observations"]), {}


def main() -> None:
    """Train, evaluate, write the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--steps", type=int, default=100_000, help="decisions to train for, of all environments"
    )
    parser.add_argument("--num-envs", type=int, default=4)
    parser.add_argument(
        "--rollout", type=int, default=256, help="decisions of each environment in an iteration"
    )
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--minibatches", type=int, default=8)
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--eval-episodes", type=int, default=50)
    parser.add_argument("--out", type=Path, default=Path("outputs/baselines/skrl_ppo.json"))
    flags = parser.parse_args()
    torch.set_num_threads(1)
    set_seed(flags.seed)
    task = TaskConfig()
    makers = [
        partial(make_task, task, first=flags.seed * 1_000_000 + i, stride=flags.num_envs)
        for i in range(flags.num_envs)
    ]
    envs = AsyncVectorEnv(makers, context="forkserver", autoreset_mode=AutoresetMode.SAME_STEP)
    env = wrap_env(envs, wrapper="gymnasium", verbose=False)
    spaces = {
        "observation_space": env.observation_space,
        "action_space": env.action_space,
        "device": env.device,
    }
    policy = Policy(**spaces)
    config = PPO_CFG(
        rollouts=flags.rollout,
        learning_epochs=flags.epochs,
        mini_batches=flags.minibatches,
        discount_factor=GAMMA,
        learning_rate=flags.lr,
        value_loss_scale=0.5,
        value_clip=0.0,
        time_limit_bootstrap=True,
    )
    config.experiment.write_interval = config.experiment.checkpoint_interval = 0
    config.experiment.directory = str(flags.out.parent)
    memory = RandomMemory(memory_size=flags.rollout, num_envs=env.num_envs, device=env.device)
    agent = PPO(models={"policy": policy, "value": Value(**spaces)}, memory=memory, cfg=config, **spaces)
    timesteps = -(-flags.steps // flags.num_envs)
    trainer = SequentialTrainer(
        env=env,
        agents=agent,
        cfg={
            "timesteps": timesteps,
            "headless": True,
            "disable_progressbar": True,
            "close_environment_at_exit": False,
        },
    )
    began = time.monotonic()
    trainer.train()
    env.close()

    def act(observation: Vector) -> Vector:
        with torch.no_grad():
            return policy.net(torch.as_tensor(observation)).numpy()

    write_results(
        flags.out,
        "skrl PPO",
        flags,
        task,
        steps=timesteps * flags.num_envs,
        began=began,
        act=act,
        episodes=flags.eval_episodes,
        versions={name: version(name) for name in ("skrl", "torch", "mujoco")},
    )


if __name__ == "__main__":
    main()
