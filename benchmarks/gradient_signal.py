"""How much of a policy gradient is signal: which parameters, denoising steps, modes, joints and decisions carry it.

    python benchmarks/gradient_signal.py --noise dct:6:0.2:0.05 dct:3:0.2:0.05 --episodes 3072 --out signal.json

Episodes are collected once for each noise, with the policy as it is. Their gradients, in blocks of `--block` episodes, give
S = mean <g_i, g_j> over pairs of different blocks, an unbiased estimate of the squared length of the true gradient, and
N = mean |g_i|^2 - S, the variance of a block's. S / (S + N) is the squared cosine that one block's gradient has with the
true one; N / S is how many blocks make half of it signal, the simple noise scale of McCandlish et al. 2018 ("An empirical
model of large-batch training", appendix A). `adam` is the same after division by the root mean square of each parameter.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowrl.device import prepare_torch
from flowrl.flow.likelihood import rescore_flat
from flowrl.gae import estimate_advantages, normalize_advantages
from flowrl.policy.critic import Critic
from flowrl.policy.interface import FlowPolicy
from flowrl.policy.loading import load_policy
from flowrl.policy.noise import NoiseModel
from flowrl.preset import load_preset
from flowrl.rollout import Decisions, Rollout, collect
from flowrl.scenes import training_scenes
from flowrl.vector_env import close_vector_env, find_spec, make_vector_env, resolve_env_kwargs

SEED = 7_700_003
FIRST_INDEX = 10_000_000  # far from the scenes of any run
PART = 256
CRITIC_EPOCHS = 300


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--policy", default="models/chess-tiny")
    parser.add_argument("--env-id", default="chess_env:ChessPick-v0")
    parser.add_argument("--env-kwargs", default="{}", help="JSON, over the preset's")
    parser.add_argument(
        "--noise", nargs="+", default=["dct:6:0.2:0.05"], help="basis:modes:sigma_start:sigma_end"
    )
    parser.add_argument("--episodes", type=int, default=3072)
    parser.add_argument("--block", type=int, default=256)
    parser.add_argument("--envs", type=int, default=96)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--torch-threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("gradient_signal.json"))
    args = parser.parse_args()

    device = prepare_torch(args.device, args.torch_threads)
    policy = load_policy(args.policy, device=device)
    given = {**load_preset(args.policy)["env_kwargs"], **json.loads(args.env_kwargs)}
    kwargs = resolve_env_kwargs(find_spec(args.env_id), given, 20.0, policy.spec)
    vec_env = make_vector_env(args.env_id, args.envs, kwargs, policy.spec)
    results = {}
    for text in args.noise:
        basis, modes, start, end = text.split(":")
        noise = NoiseModel(
            policy.spec,
            sigma_start=float(start),
            sigma_end=float(end),
            basis=basis,
            num_modes=int(modes) if basis == "dct" else None,
        ).to(device)
        scenes = training_scenes(SEED, FIRST_INDEX, args.episodes)
        rollout = collect(policy, vec_env, scenes, noise, early_stop=True, keep_decisions=True)
        results[text] = measure(policy, noise, rollout, args.block)
        args.out.write_text(json.dumps(results, indent=1))
    close_vector_env(vec_env)


def measure(policy: FlowPolicy, noise: NoiseModel, rollout: Rollout, block: int) -> dict[str, Any]:
    """All figures of one rollout; prints them."""
    decisions = rollout.decisions
    assert decisions is not None
    success = float(np.mean([episode.metrics["success"] for episode in rollout.episodes]))
    print(f"\n{noise.basis} {noise.num_elements}: {len(rollout.episodes)} episodes, success {success:.1%}, ")
    print(f"{len(decisions)} decisions, rollout {sum(rollout.seconds.values()):.0f} s {rollout.parts()}")
    values = cross_fitted_values(decisions, rollout)
    zero = np.zeros(len(decisions))
    plain, returns = advantages_of(rollout, zero, 1.0)
    advantages = {
        "return - mean": plain,
        "critic, lambda .95": advantages_of(rollout, values, 0.95)[0],
        "critic, lambda 1": advantages_of(rollout, values, 1.0)[0],
    }
    explained = {"all": explained_variance(values, returns)}
    for order in range(4):
        rows = decisions.order == order
        explained[f"decision {order}"] = explained_variance(values[rows], returns[rows])
    print("explained variance, cross-fitted:", {name: round(value, 3) for name, value in explained.items()})
    signals = {}
    for name, advantage in advantages.items():
        signals |= {
            f"{name}: {part}": figures
            for part, figures in signal(
                policy,
                noise,
                decisions,
                normalize_advantages(advantage),
                block,
                components(noise, decisions) if name == "critic, lambda .95" else {"all": everything},
            ).items()
        }
    for name, figures in signals.items():
        print(
            f"{name:60s} S {figures['signal']:9.2e} +- {figures['error']:8.1e}  cos^2 {figures['cos2']:7.4f}  "
            f"adam cos^2 {figures['adam_cos2']:7.4f} +- {figures['adam_error']:.4f}"
        )
    return {"success": success, "decisions": len(decisions), "explained": explained, "signals": signals}


def advantages_of(rollout: Rollout, values: np.ndarray, lam: float) -> tuple[np.ndarray, np.ndarray]:
    """Advantages and returns of every decision, (N,) each."""
    decisions = rollout.decisions
    assert decisions is not None
    advantages, returns = np.zeros(len(decisions)), np.zeros(len(decisions))
    rows_of: dict[int, list[int]] = {}
    for row in np.lexsort((decisions.order, decisions.episode)):
        rows_of.setdefault(int(decisions.episode[row]), []).append(int(row))
    for episode in rollout.episodes:
        rows = np.array(rows_of[episode.number])
        advantages[rows], returns[rows] = estimate_advantages(
            np.array(episode.rewards), values[rows], 0.0, 0.99, lam
        )
    return advantages, returns


def cross_fitted_values(decisions: Decisions, rollout: Rollout) -> np.ndarray:
    """Each half of the episodes valued by a critic that was fitted to the other half, (N,)."""
    _, returns = advantages_of(rollout, np.zeros(len(decisions)), 1.0)
    device = decisions.features.device
    target = torch.as_tensor(returns, dtype=torch.float32, device=device)
    half = torch.as_tensor(decisions.episode % 2, device=device)
    values = torch.zeros(len(decisions), device=device)
    for own in (0, 1):
        torch.manual_seed(own)
        critic = Critic(decisions.features.shape[1]).to(device)
        optimizer = torch.optim.AdamW(critic.parameters(), lr=3e-4, weight_decay=0.1)
        rows = torch.nonzero(half != own).squeeze(1)
        best, best_values = float("inf"), values[half == own]
        for _ in range(CRITIC_EPOCHS):
            for index in rows[torch.randperm(len(rows), device=device)].split(PART):
                loss = (critic(decisions.features[index]) - target[index]).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            with torch.no_grad():
                fresh = critic(decisions.features[half == own])
                error = float((fresh - target[half == own]).square().mean())
            if error < best:  # early stopping on the other half: an upper bound of what the features give
                best, best_values = error, fresh
        values[half == own] = best_values
    return values.double().cpu().numpy()


def explained_variance(values: np.ndarray, returns: np.ndarray) -> float:
    """1 - Var(return - value) / Var(return)."""
    return float(1 - np.var(returns - values) / max(np.var(returns), 1e-12)) if len(returns) else float("nan")


Component = Callable[[Tensor, Tensor], Tensor]
"""(log-probabilities (B, K, F, A), rows (B,)) -> those of them that count, summed over a decision's elements, (B,)."""


def everything(log_prob: Tensor, rows: Tensor) -> Tensor:
    """All elements."""
    return log_prob.sum((1, 2, 3))


def components(noise: NoiseModel, decisions: Decisions) -> dict[str, Component]:
    """Elements by denoising step, mode, joint and place of the decision in its episode."""
    order = torch.as_tensor(decisions.order, device=decisions.states.device)
    num_steps = decisions.states.shape[1] - 1
    chosen: dict[str, Component] = {"all": everything}
    for first, last in ((0, 3), (4, 6), *((step, step) for step in range(7, num_steps))):
        chosen[f"steps {first}-{last}"] = lambda lp, _, a=first, b=last + 1: lp[:, a:b].sum((1, 2, 3))
    if noise.basis == "dct":
        for mode in range(noise.num_elements):
            chosen[f"mode {mode}"] = lambda lp, _, m=mode: lp[:, :, m].sum((1, 2))
    for joint in range(decisions.log_prob.shape[-1]):
        chosen[f"joint {joint}"] = lambda lp, _, j=joint: lp[..., j].sum((1, 2))
    for place in range(4):
        chosen[f"decision {place}{'+' if place == 3 else ''}"] = lambda lp, rows, p=place: (
            lp.sum((1, 2, 3)) * ((order[rows] == p) | ((order[rows] > p) & (p == 3)))
        )
    return chosen


def signal(
    policy: FlowPolicy,
    noise: NoiseModel,
    decisions: Decisions,
    advantage: np.ndarray,
    block: int,
    chosen: dict[str, Component],
) -> dict[str, dict[str, float]]:
    """S, its standard error and the squared cosines of each component, and of each group of parameters for all elements."""
    device = decisions.states.device
    names, parameters = zip(*policy.trainable_parameters().items())
    weight = torch.as_tensor(advantage, dtype=torch.float32, device=device)
    blocks = decisions.episode // block
    num_blocks = int(blocks.max()) + 1
    gradients = {
        name: torch.zeros(num_blocks, sum(p.numel() for p in parameters), device=device) for name in chosen
    }
    for number in range(num_blocks):
        rows = torch.as_tensor(np.nonzero(blocks == number)[0], device=device)
        for index in rows.split(PART):
            log_prob = rescore_flat(policy, decisions.prefix[index], decisions.states[index], noise)
            for position, (name, component) in enumerate(chosen.items()):
                objective = (component(log_prob, index) * weight[index]).sum() / len(rows)
                keep = position < len(chosen) - 1
                parts = torch.autograd.grad(objective, parameters, retain_graph=keep)
                gradients[name][number] += torch.cat([part.flatten() for part in parts])
    figures = {name: estimate(gradient) for name, gradient in gradients.items()}
    first = 0
    groups: dict[str, list[Tensor]] = {}
    for name, parameter in zip(names, parameters):
        columns = gradients["all"][:, first : first + parameter.numel()]
        first += parameter.numel()
        groups.setdefault(group_of(name), []).append(columns)
    for name, columns_of in groups.items():
        if len(chosen) > 1:
            figures[f"parameters {name}"] = estimate(torch.cat(columns_of, 1))
    return figures


def group_of(name: str) -> str:
    """`layers.2 mlp` for a weight of the expert's layers, else the last two parts of its name."""
    if ".layers." in name:
        parts = name.split(".layers.")[1].split(".")
        return f"layer {parts[0]} {parts[1]}"
    return ".".join(name.split(".")[-2:])


def estimate(gradient: Tensor) -> dict[str, float]:
    """S and the squared cosines of blocks' gradients (blocks, parameters), with jackknife errors over the blocks."""
    scaled = gradient / (gradient.square().mean(0).sqrt() + 1e-12)
    signal_, total, error = _pairs(gradient)
    adam_signal, adam_total, adam_error = _pairs(scaled)
    return {
        "signal": signal_,
        "error": error,
        "total": total,
        "cos2": signal_ / total,
        "adam_cos2": adam_signal / adam_total,
        "adam_error": adam_error / adam_total,
    }


def _pairs(gradient: Tensor) -> tuple[float, float, float]:
    """Mean <g_i, g_j> over i != j, mean |g_i|^2, and the jackknife error of the first."""
    product = (gradient @ gradient.T).double().cpu().numpy()
    count = len(product)

    def mean_pair(kept: np.ndarray) -> float:
        own = product[np.ix_(kept, kept)]
        return float((own.sum() - np.trace(own)) / (len(kept) * (len(kept) - 1)))

    everyone = np.arange(count)
    left_out = np.array([mean_pair(np.delete(everyone, i)) for i in range(count)])
    error = float(np.sqrt((count - 1) / count * np.square(left_out - left_out.mean()).sum()))
    return mean_pair(everyone), float(np.trace(product) / count), error


if __name__ == "__main__":
    main()
