"""Reward terms against numbers computed by hand."""

import itertools

import pytest

from chess_env.config import REWARDS, RewardConfig
from chess_env.errors import ConfigError
from chess_env.reward import TERM_NAMES, RewardState, lift_potential, reach_potential, reward_terms


def moment(
    distance=0.2, height=0.0, success=False, disturbed=False, toppled=False, terminal=False
) -> RewardState:
    return RewardState(distance, height, success, disturbed, toppled, terminal)


def test_sparse_reward_is_one_at_success_and_zero_elsewhere():
    config = REWARDS["sparse"]
    assert sum(reward_terms(moment(), moment(0.01, 0.03), config).values()) == 0.0
    end = moment(0.0, 0.05, success=True, terminal=True)
    assert reward_terms(moment(), end, config) == {
        "success": 1.0,
        "reach": 0.0,
        "lift": 0.0,
        "disturb": 0.0,
        "topple": 0.0,
    }


def test_potentials_at_hand_computed_points():
    assert reach_potential(moment(0.1)) == pytest.approx(0.75)  # 1 - 0.1 / 0.4
    assert reach_potential(moment(0.9)) == 0.0
    assert reach_potential(moment(0.0)) == 1.0
    assert lift_potential(moment(height=0.03)) == pytest.approx(0.75)  # 0.03 / 0.04
    assert lift_potential(moment(height=0.08)) == 1.0
    assert lift_potential(moment(height=-0.01)) == 0.0


def test_shaping_terms_are_discounted_differences_of_potentials():
    config = RewardConfig(reach=2.0, lift=4.0, discount=0.5)
    terms = reward_terms(moment(0.2), moment(0.1, 0.02), config)
    assert terms["reach"] == pytest.approx(2.0 * (0.5 * 0.75 - 0.5))  # potentials 0.5 -> 0.75
    assert terms["lift"] == pytest.approx(4.0 * (0.5 * 0.5 - 0.0))  # potentials 0 -> 0.5


def test_discounted_sum_of_shaping_depends_on_the_start_alone():
    """sum_t d^t (d p_{t+1} - p_t) = -p_0 when the potential after the end is 0, whatever happened between."""
    config = RewardConfig(success=0.0, reach=1.0, lift=1.0, discount=0.9)
    paths = (
        [moment(0.3), moment(0.1), moment(0.02, 0.01), moment(0.0, 0.05, success=True, terminal=True)],
        [moment(0.3), moment(0.05), moment(0.3), moment(0.05), moment(0.3, toppled=True, terminal=True)],
    )
    for path in paths:
        total = sum(
            0.9**t * sum(reward_terms(a, b, config).values())
            for t, (a, b) in enumerate(itertools.pairwise(path))
        )
        assert total == pytest.approx(-reach_potential(path[0]))


def test_penalties_are_paid_once():
    config = RewardConfig(disturb=0.3, topple=0.5)
    first = reward_terms(moment(), moment(disturbed=True, toppled=True), config)
    assert (first["disturb"], first["topple"]) == (-0.3, -0.5)
    again = reward_terms(moment(disturbed=True, toppled=True), moment(disturbed=True, toppled=True), config)
    assert (again["disturb"], again["topple"]) == (0.0, 0.0)


def test_every_term_is_named():
    assert tuple(reward_terms(moment(), moment(), RewardConfig())) == TERM_NAMES


@pytest.mark.parametrize("field", ["success", "reach", "lift", "disturb", "topple", "discount"])
@pytest.mark.parametrize("value", [-1.0, float("nan"), "1", None])
def test_wrong_weight_is_named(field, value):
    with pytest.raises(ConfigError, match=f"reward {field}="):
        RewardConfig(**{field: value})
