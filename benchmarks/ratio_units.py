"""What each unit of the probability ratio clips, on identical chains and for the same change of the policy.

    python benchmarks/ratio_units.py --policy models/chess-tiny --episodes 24 --envs 2

Episodes are collected with a noise, one update of the policy follows (its preset's learning rate, two epochs, advantages from
returns), and the same chains are scored again: spread of log r, and the share of units outside 1 +- clip.
"""

import argparse
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from flowrl.breakdown import break_down, element_sums
from flowrl.config import TrainConfig
from flowrl.device import prepare_torch
from flowrl.exploration import make_noise
from flowrl.gae import estimate_interleaved, normalize_advantages
from flowrl.loss import approx_kl, executed_mask, log_ratio, outside_clip
from flowrl.policy.critic import Critic
from flowrl.policy.loading import load_policy
from flowrl.ppo import PPO
from flowrl.prefix import Rows
from flowrl.preset import load_preset, with_preset
from flowrl.rollout import collect
from flowrl.scenes import training_scenes
from flowrl.vector_env import close_vector_env, find_spec, make_vector_env, resolve_env_kwargs

FIRST_INDEX = 20_000_000  # far from the scenes of any run
NOISES: dict[str, dict[str, Any]] = {
    "6 cosine modes, .2 to .05": {},
    "white, .2 to .002": {"noise_basis": "white", "sigma_end": 0.002},
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--policy", default="models/chess-tiny")
    parser.add_argument("--episodes", type=int, default=24)
    parser.add_argument("--envs", type=int, default=2)
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    device = prepare_torch(args.device, 1)
    preset = load_preset(args.policy)
    base = replace(
        with_preset(TrainConfig(), preset), critic_warmup=0, kl_adapt=None, target_kl=1e9, minibatch=32
    )
    print("| noise | unit | elements | std of log r | outside .8 to 1.2 |\n|---|---|---|---|---|")
    for name, changes in NOISES.items():
        config = replace(base, **changes)
        policy = load_policy(args.policy, device=device)
        kwargs = resolve_env_kwargs(find_spec(config.env_id), preset["env_kwargs"], 20.0, policy.spec)
        vec_env = make_vector_env(config.env_id, args.envs, kwargs, policy.spec)
        noise = make_noise(config, policy, 0)
        scenes = training_scenes(config.train_seed, FIRST_INDEX, args.episodes)
        rollout = collect(policy, vec_env, scenes, noise, early_stop=True, keep_decisions=True)
        close_vector_env(vec_env)
        decisions = rollout.decisions
        assert decisions is not None
        values = np.zeros(len(decisions))
        rewards = {episode.number: np.array(episode.rewards) for episode in rollout.episodes}
        advantages, returns = estimate_interleaved(
            decisions.episode, decisions.order, values, rewards, {}, config.gamma, 1.0
        )
        ppo = PPO(policy, noise, Critic(decisions.features.shape[1]).to(device), config)
        ppo.update(decisions, normalize_advantages(advantages), returns, iteration=1)
        with torch.no_grad():
            order = Rows.of(np.arange(len(decisions)), device)
            new = torch.cat([ppo._log_prob(decisions, part) for part in order.split(16)])
        mask = executed_mask(decisions.num_executed, noise)
        element = log_ratio(new, decisions.log_prob, mask, "element")
        sizes = {"element": 1, "step": element[0, 0].numel(), "chunk": element[0].numel()}
        for unit, size in sizes.items():
            ratios = log_ratio(new, decisions.log_prob, mask, unit)
            clipped = outside_clip(ratios, config.clip)
            if unit == "element":
                counted = mask.expand_as(ratios).bool()
                ratios, clipped = ratios[counted], clipped[counted]
            print(f"| {name} | {unit} | {size} | {float(ratios.std()):.2g} | {float(clipped.mean()):.1%} |")
        kl, kl_decision = approx_kl(new, decisions.log_prob, mask)
        print(
            f"{len(decisions)} decisions, lr {config.lr:g}, KL {float(kl):.2g} an element, {float(kl_decision):.2g} a decision"
        )
        parts = break_down([element_sums(element, outside_clip(element, config.clip), mask)])
        print("std of log r by step:", parts.by_step["ratio_std"])


if __name__ == "__main__":
    main()
