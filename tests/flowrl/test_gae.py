"""Advantages by hand."""

import numpy as np
import pytest

from flowrl.gae import estimate_advantages, estimate_interleaved, normalize_advantages

GAMMA, LAM = 0.9, 0.5


def test_terminated_episode_has_no_value_after_its_end():
    # delta_2 = 1.0 + 0.9 * 0.0 - 0.6 =  0.4        A_2 = 0.4
    # delta_1 = 0.0 + 0.9 * 0.6 - 0.5 =  0.04       A_1 = 0.04 + 0.45 * 0.4  = 0.22
    # delta_0 = 0.0 + 0.9 * 0.5 - 0.2 =  0.25       A_0 = 0.25 + 0.45 * 0.22 = 0.349
    advantages, returns = estimate_advantages(
        np.array([0, 0, 1.0]), np.array([0.2, 0.5, 0.6]), 0.0, GAMMA, LAM
    )
    np.testing.assert_allclose(advantages, [0.349, 0.22, 0.4], atol=1e-12)
    np.testing.assert_allclose(returns, [0.549, 0.72, 1.0], atol=1e-12)


def test_bootstrapped_episode_counts_the_value_of_the_final_observation():
    # delta_2 = 0.0 + 0.9 * 0.8 - 0.6 =  0.12       A_2 = 0.12
    # delta_1 = 0.04                                A_1 = 0.04 + 0.45 * 0.12  = 0.094
    # delta_0 = 0.25                                A_0 = 0.25 + 0.45 * 0.094 = 0.2923
    advantages, returns = estimate_advantages(
        np.array([0, 0, 0.0]), np.array([0.2, 0.5, 0.6]), 0.8, GAMMA, LAM
    )
    np.testing.assert_allclose(advantages, [0.2923, 0.094, 0.12], atol=1e-12)
    np.testing.assert_allclose(returns, [0.4923, 0.594, 0.72], atol=1e-12)


def test_one_decision_is_reward_minus_value():
    advantages, returns = estimate_advantages(np.array([1.0]), np.array([0.25]), 0.0, GAMMA, LAM)
    assert advantages.tolist() == [0.75] and returns.tolist() == [1.0]


def test_lambda_one_is_the_discounted_return_minus_value():
    rewards, values = np.array([0.0, 2.0, 1.0]), np.array([3.0, -1.0, 0.5])
    _, returns = estimate_advantages(rewards, values, 0.0, GAMMA, lam=1.0)
    np.testing.assert_allclose(returns, [0.9 * 2 + 0.81 * 1, 2 + 0.9 * 1, 1.0])


def test_interleaved_episodes_each_take_their_own_next_value_in_any_order():
    rewards = {0: np.array([0.0, 0.0, 1.0]), 1: np.array([2.0]), 2: np.array([0.5, -1.0])}
    values = {0: [0.2, 0.5, 0.6], 1: [0.3], 2: [-0.4, 0.9]}
    final_values = {2: 0.8}
    decisions = [(number, order) for number, own in rewards.items() for order in range(len(own))]
    for seed in range(3):
        shuffled = [decisions[i] for i in np.random.default_rng(seed).permutation(len(decisions))]
        episode, order = (np.array(column) for column in zip(*shuffled))
        value = np.array([values[number][place] for number, place in shuffled])
        advantages, returns = estimate_interleaved(episode, order, value, rewards, final_values, GAMMA, LAM)
        for number, own in rewards.items():
            expected = estimate_advantages(
                own, np.array(values[number]), final_values.get(number, 0.0), GAMMA, LAM
            )
            rows = [shuffled.index((number, place)) for place in range(len(own))]
            np.testing.assert_array_equal(advantages[rows], expected[0])
            np.testing.assert_array_equal(returns[rows], expected[1])
    # Episode 0 by hand, as above.
    assert advantages[shuffled.index((0, 0))] == pytest.approx(0.349)


def test_normalized_advantages_have_mean_0_and_std_1():
    normalized = normalize_advantages(np.array([1.0, 2.0, 3.0, 10.0]))
    assert normalized.mean() == pytest.approx(0, abs=1e-12)
    assert normalized.std() == pytest.approx(1)


@pytest.mark.parametrize(
    "advantages", [np.zeros(5), np.full(5, 0.3), np.array([0.7]), 0.3 + 1e-9 * np.arange(5)]
)
def test_advantages_without_signal_become_0_not_nan(advantages):
    assert normalize_advantages(advantages).tolist() == [0.0] * len(advantages)
