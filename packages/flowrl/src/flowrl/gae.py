"""Generalized advantage estimation over the decisions of one episode, and its normalization. Pure functions.

Source: Schulman et al. 2016, "High-dimensional continuous control using generalized advantage estimation", eq. 16.
"""

from collections.abc import Mapping

import numpy as np

SMALLEST_STD = 1e-6
"""Advantages that differ by less carry no signal, only rounding: they become 0."""


def estimate_advantages(
    rewards: np.ndarray, values: np.ndarray, final_value: float, gamma: float, lam: float
) -> tuple[np.ndarray, np.ndarray]:
    """Advantages and returns of one episode.

    delta_t = r_t + gamma * V_{t+1} - V_t;  A_t = delta_t + gamma * lam * A_{t+1};  return_t = A_t + V_t

    Args:
        rewards: Reward of each decision, shape (num_decisions,).
        values: Critic's value of each decision's observation, shape (num_decisions,).
        final_value: Value after the last decision: 0 for an episode that ended, the critic's value of the final
            observation for one that is bootstrapped.
        gamma: Discount from one decision to the next.
        lam: Weight of longer estimates, 0 to 1.

    Returns:
        Advantages and returns, each float64 of shape (num_decisions,).
    """
    rewards = np.asarray(rewards, dtype=np.float64)
    values = np.asarray(values, dtype=np.float64)
    next_values = np.append(values[1:], final_value)
    deltas = rewards + gamma * next_values - values
    advantages = np.empty_like(deltas)
    advantage = 0.0
    for t in reversed(range(len(deltas))):
        advantage = deltas[t] + gamma * lam * advantage
        advantages[t] = advantage
    return advantages, advantages + values


def estimate_interleaved(
    episode: np.ndarray,
    order: np.ndarray,
    values: np.ndarray,
    rewards: Mapping[int, np.ndarray],
    final_values: Mapping[int, float],
    gamma: float,
    lam: float,
) -> tuple[np.ndarray, np.ndarray]:
    """Advantages and returns of a rollout whose decisions may lie in any order, episodes interleaved.

    Args:
        episode: Number of each decision's episode, (N,).
        order: Its place in that episode, from 0, (N,).
        values: Critic's value of each decision's observation, (N,).
        rewards: Rewards of each episode, by its number.
        final_values: Value after the last decision of the episodes that are bootstrapped; 0 for the others.
        gamma, lam: As in `estimate_advantages`.

    Returns:
        Advantages and returns, each float64 of shape (N,).
    """
    advantages, returns = np.zeros(len(episode)), np.zeros(len(episode))
    for number, episode_rewards in rewards.items():
        rows = np.nonzero(episode == number)[0]
        rows = rows[np.argsort(order[rows])]
        advantages[rows], returns[rows] = estimate_advantages(
            episode_rewards, values[rows], final_values.get(number, 0.0), gamma, lam
        )
    return advantages, returns


def normalize_advantages(advantages: np.ndarray) -> np.ndarray:
    """Advantages of a whole iteration with mean 0 and standard deviation 1; all 0 when they hardly differ."""
    centred = advantages - advantages.mean()
    std = centred.std()
    return centred / std if std > SMALLEST_STD else np.zeros_like(centred)
