"""Intervals and tests against published or hand-computed numbers."""

import numpy as np
import pytest

from flowrl.metrics import (
    explained_variance,
    mcnemar_p,
    paired_difference,
    spread,
    summarize_episodes,
    wilson_interval,
)


def test_wilson_interval_of_a_textbook_case():
    # Newcombe 1998, table I: 81/263 gives 0.2553 to 0.3662, 1/29 gives 0.0061 to 0.1718
    assert wilson_interval(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert wilson_interval(1, 29) == pytest.approx((0.0061, 0.1718), abs=5e-5)
    # and 0/20: 0 to 0.1611
    assert wilson_interval(0, 20) == pytest.approx((0.0, 0.1611), abs=5e-5)


def test_wilson_interval_is_symmetric_and_inside_0_1():
    low, high = wilson_interval(3, 10)
    assert wilson_interval(7, 10) == pytest.approx((1 - high, 1 - low))
    assert wilson_interval(10, 10)[1] == pytest.approx(1) and wilson_interval(0, 0) == (0.0, 1.0)


def test_mcnemar_p_is_the_two_sided_binomial():
    # 2 * (C(10,0) + C(10,1)) / 2^10 = 22 / 1024
    assert mcnemar_p(1, 9) == pytest.approx(22 / 1024)
    assert mcnemar_p(9, 1) == mcnemar_p(1, 9)
    assert mcnemar_p(5, 5) == 1.0 and mcnemar_p(0, 0) == 1.0


def test_paired_difference_counts_the_four_cases():
    first = [True, True, False, False, False, True, False, False]
    second = [True, False, True, True, True, True, False, False]
    result = paired_difference(first, second)
    assert (result.both, result.only_first, result.only_second, result.neither) == (2, 1, 3, 2)
    assert result.paired_difference == pytest.approx(2 / 8)
    # differences: one -1, three +1, four 0: mean .25, variance (4 - 8 * .0625) / 8 = .4375
    half = 1.959964 * np.sqrt(0.4375) / np.sqrt(8)
    assert result.ci95 == pytest.approx((0.25 - half, 0.25 + half), abs=1e-6)
    assert result.mcnemar_p == pytest.approx(2 * (1 + 4) / 16)


def test_paired_difference_refuses_unequal_lengths():
    with pytest.raises(ValueError, match="3 and 2"):
        paired_difference([True] * 3, [True] * 2)


def test_summary_reduces_filters_and_skips_what_is_missing():
    records = [
        {"success": True, "piece": "pawn", "close": 4.0},
        {"success": False, "piece": "pawn", "close": None},
        {"success": True, "piece": "knight", "close": 8.0},
        {"success": True, "piece": "knight"},
    ]
    log_metrics = {
        "success": ("success", "mean"),
        "success_pawn": ("success", "mean", ("piece", "pawn")),
        "success_rook": ("success", "mean", ("piece", "rook")),
        "close_median": ("close", "median"),
    }
    assert summarize_episodes(records, log_metrics) == {
        "success": 0.75,
        "success_pawn": 0.5,
        "success_rook": None,
        "close_median": 6.0,
    }


def test_explained_variance_is_1_for_perfect_0_for_constant_none_for_equal_returns():
    returns = np.array([0.0, 1.0, 2.0, 5.0])
    assert explained_variance(returns, returns) == 1.0
    assert explained_variance(np.full(4, 2.0), returns) == 0.0
    # residuals 0, 0, 0, 4: variance 3; returns' variance 3.5
    assert explained_variance(np.array([0.0, 1.0, 2.0, 1.0]), returns) == pytest.approx(1 - 3 / 3.5)
    assert explained_variance(np.zeros(3), np.ones(3)) is None


def test_spread_names_its_statistics():
    expected = {"a_mean": 2.0, "a_std": pytest.approx(np.sqrt(2 / 3)), "a_min": 1.0, "a_max": 3.0}
    assert spread("a", np.array([1.0, 2.0, 3.0])) == expected
