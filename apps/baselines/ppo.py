"""PPO in one file, in the manner of CleanRL, on the privileged state of ChessPick-v0.

    python apps/baselines/ppo.py --steps 100000 --out outputs/ppo.json

Source: Schulman et al., "Proximal policy optimization algorithms" (2017), equations 7 and 9; advantages by Schulman et al.,
"High-dimensional continuous control using generalized advantage estimation" (2016), equation 16.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import time
from functools import partial
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode
from pick_task import GAMMA, TaskConfig, Vector, make_task, write_results
from torch import Tensor, nn
from torch.distributions import Normal


def mlp(inputs: int, outputs: int, last_gain: float) -> nn.Sequential:
    """Two hidden layers of 128 with orthogonal weights."""
    layers = [nn.Linear(inputs, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, outputs)]
    for layer, gain in zip(layers[::2], (2**0.5, 2**0.5, last_gain), strict=True):
        assert isinstance(layer, nn.Linear)
        nn.init.orthogonal_(layer.weight, gain)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(*layers)


class Agent(nn.Module):
    """A Gaussian policy with a standard deviation for each action, and a value."""

    def __init__(self, observation_size: int, action_size: int) -> None:
        super().__init__()
        self.mean = mlp(observation_size, action_size, 0.01)
        self.value = mlp(observation_size, 1, 1.0)
        self.log_std = nn.Parameter(torch.full((action_size,), -0.5))

    def distribution(self, observations: Tensor) -> Normal:
        """Of the actions, batch shape (..., action_size)."""
        return Normal(self.mean(observations), self.log_std.exp())


def advantages_of(
    rewards: Tensor, values: Tensor, next_values: Tensor, terminated: Tensor, done: Tensor, lam: float
) -> Tensor:
    """Generalized advantages, shape (T, N). `next_values` belong to the state after each step, before any reset."""
    deltas = rewards + GAMMA * next_values * (1 - terminated) - values
    advantages = torch.zeros_like(deltas)
    running = torch.zeros_like(deltas[0])
    for t in reversed(range(len(deltas))):
        running = deltas[t] + GAMMA * lam * (1 - done[t]) * running
        advantages[t] = running
    return advantages


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
    parser.add_argument("--lam", type=float, default=0.95)
    parser.add_argument("--clip", type=float, default=0.2)
    parser.add_argument("--vf-coef", type=float, default=0.5)
    parser.add_argument("--max-grad-norm", type=float, default=0.5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--eval-episodes", type=int, default=50)
    parser.add_argument("--out", type=Path, default=Path("outputs/baselines/ppo.json"))
    flags = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(flags.seed)
    task = TaskConfig()
    makers = [
        partial(make_task, task, first=flags.seed * 1_000_000 + i, stride=flags.num_envs)
        for i in range(flags.num_envs)
    ]
    envs = AsyncVectorEnv(makers, context="forkserver", autoreset_mode=AutoresetMode.SAME_STEP)
    agent = Agent(envs.single_observation_space.shape[0], envs.single_action_space.shape[0])
    optimizer = torch.optim.Adam(agent.parameters(), lr=flags.lr, eps=1e-5)
    began, steps = time.monotonic(), 0
    observation = torch.as_tensor(envs.reset()[0])
    successes: list[float] = []
    while steps < flags.steps:
        rows: dict[str, list[Tensor]] = {
            name: [] for name in ("x", "a", "log_prob", "r", "v", "v_next", "term", "done")
        }
        for _ in range(flags.rollout):  # collect
            with torch.no_grad():
                distribution = agent.distribution(observation)
                action = distribution.sample()
                value = agent.value(observation)[:, 0]
            following, reward, terminated, truncated, info = envs.step(action.numpy())
            done = terminated | truncated
            after = np.array(following)
            for i in np.flatnonzero(done):
                after[i] = info["final_obs"][i]
                successes.append(float(info["final_info"]["is_success"][i]))
            with torch.no_grad():
                next_value = agent.value(torch.as_tensor(after))[:, 0]
            values = (
                observation, action, distribution.log_prob(action).sum(-1), torch.as_tensor(reward, dtype=torch.float32),
                value, next_value, torch.as_tensor(terminated).float(), torch.as_tensor(done).float(),
            )  # fmt: skip
            for name, item in zip(rows, values, strict=True):
                rows[name].append(item)
            observation = torch.as_tensor(following)
            steps += flags.num_envs
        batch = {name: torch.stack(items) for name, items in rows.items()}
        advantages = advantages_of(
            batch["r"], batch["v"], batch["v_next"], batch["term"], batch["done"], flags.lam
        )
        returns = (advantages + batch["v"]).flatten()
        x, a, old = batch["x"].flatten(0, 1), batch["a"].flatten(0, 1), batch["log_prob"].flatten()
        adv = advantages.flatten()
        adv = (adv - adv.mean()) / (adv.std() + 1e-8)
        for _ in range(flags.epochs):  # update
            for index in torch.randperm(len(adv)).chunk(flags.minibatches):
                log_prob = agent.distribution(x[index]).log_prob(a[index]).sum(-1)
                ratio = (log_prob - old[index]).exp()
                clipped = ratio.clamp(1 - flags.clip, 1 + flags.clip)
                policy_loss = -torch.min(ratio * adv[index], clipped * adv[index]).mean()
                value_loss = 0.5 * (agent.value(x[index])[:, 0] - returns[index]).square().mean()
                optimizer.zero_grad()
                (policy_loss + flags.vf_coef * value_loss).backward()
                nn.utils.clip_grad_norm_(agent.parameters(), flags.max_grad_norm)
                optimizer.step()
        recent = np.mean(successes[-100:]) if successes else 0.0
        print(f"{steps} decisions, {time.monotonic() - began:.0f} s, success of the last 100 episodes {recent:.2f}, "
              f"reward a decision {batch['r'].mean():.4f}", flush=True)  # fmt: skip
    envs.close()

    def act(vector: Vector) -> Vector:
        with torch.no_grad():
            return agent.mean(torch.as_tensor(vector)).numpy()

    write_results(
        flags.out,
        "PPO in one file",
        flags,
        task,
        steps=steps,
        began=began,
        act=act,
        episodes=flags.eval_episodes,
        versions={name: version(name) for name in ("torch", "gymnasium", "mujoco")},
    )


if __name__ == "__main__":
    main()
