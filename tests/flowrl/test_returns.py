"""Environments that report no success: what is best, what is compared, and what a check says is the return."""

import json
from dataclasses import replace
from math import sqrt

import pytest
from small_mlp import small_mlp

from flowrl.check import check
from flowrl.checkpoint import read_meta
from flowrl.config import CheckConfig, EvalConfig, TrainConfig
from flowrl.errors import FlowRLError
from flowrl.evaluate import compare, evaluate, summarize
from flowrl.metrics import mean_interval
from flowrl.train import train
from flowrl.validate import validation_bound

PENDULUM = "Pendulum-v1"


@pytest.fixture
def folder(tmp_path):
    """A policy for Pendulum that executes 50 targets a decision: four decisions an episode."""
    path = tmp_path / "policy"
    path.mkdir()
    small_mlp(3, 1, chunk_size=50, n_action_steps=50).save(path)
    return path


def train_config(folder, out, **changes) -> TrainConfig:
    config = TrainConfig(
        policy=str(folder), env_id=PENDULUM, out=str(out), iterations=3, envs=2, episodes=3, val_episodes=3,
        val_every=1, save_every=2, critic_warmup=0, reward_scale=0.01, device="cpu", torch_threads=1, lr=1e-3,
        bootstrap_truncated=True,
    )  # fmt: skip
    return replace(config, **changes)


def read_log(out):
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


def test_the_interval_of_a_mean_is_that_of_its_standard_error():
    # mean 3, sample variance ((2)^2 + 0 + (2)^2) / 2 = 4, standard error 2 / sqrt(3)
    half = 1.959964 * 2 / sqrt(3)
    assert mean_interval([1.0, 3.0, 5.0]) == pytest.approx((3 - half, 3 + half))
    assert mean_interval([4.0]) is None


def test_the_best_is_chosen_by_success_where_it_is_reported_and_else_by_the_return():
    returns = [{"return": -1.0}, {"return": -3.0}, {"return": -5.0}]
    assert validation_bound(returns) == pytest.approx(-3 - 1.959964 * 2 / sqrt(3))
    assert validation_bound(returns[:1]) == -1.0
    rated = [{"success": True, "return": -900.0}, {"success": False, "return": 0.0}]
    assert 0 < validation_bound(rated) < 0.5


def test_training_logs_returns_and_keeps_the_best_mean_return(folder, tmp_path):
    out = train(train_config(folder, tmp_path / "run"))
    lines = read_log(out)
    assert [line["val_success"] for line in lines] == [None] * 4
    assert all(-2000 < line["val_return"] < 0 and line["decisions"] in (None, 12) for line in lines)
    assert lines[0]["ratio_max_dev"] is None and all(line["ratio_max_dev"] == 0 for line in lines[1:])
    meta = read_meta(out / "best")
    assert meta is not None and meta["best_bound"] < -1 and meta["best_iteration"] == meta["iteration"]


def test_the_noise_tax_is_told_in_returns(folder, tmp_path, capfd):
    out = train(train_config(folder, tmp_path / "run", iterations=0, noise_tax_episodes=2))
    tax = json.loads((out / "args.json").read_text())["noise_tax"]
    assert tax["return_with_noise"] - tax["return_without_noise"] == pytest.approx(tax["paired_difference"])
    assert tax["paired_difference"] != 0 and "noise tax: return without noise -" in capfd.readouterr().err


def test_the_reward_scale_changes_what_the_critic_sees_and_no_reported_return(folder, tmp_path):
    one, other = (
        train(train_config(folder, tmp_path / str(scale), iterations=1, reward_scale=scale))
        for scale in (0.01, 0.02)
    )
    (first, second) = (read_log(out)[1] for out in (one, other))
    assert first["train_return"] == second["train_return"]
    # With an untrained critic's values near 0 the squared error is that of the returns alone: four times as large.
    assert second["v_loss"] / first["v_loss"] == pytest.approx(4, rel=0.3)


def test_evaluations_report_and_compare_returns(folder, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    small_mlp(3, 1, chunk_size=50, n_action_steps=50, seed=7).save(other)
    config = EvalConfig(
        policy=str(folder), versus=str(other), env_id=PENDULUM, episodes=4, workers=2, out=str(tmp_path / "eval"),
        device="cpu", torch_threads=1,
    )  # fmt: skip
    out = evaluate(config)
    results = [json.loads((out / name / "eval_results.json").read_text()) for name in ("policy", "other")]
    own, versus = ([record["return"] for record in result["episodes"]] for result in results)
    differences = [a - b for a, b in zip(own, versus)]
    mean = sum(differences) / 4
    error = sqrt(sum((d - mean) ** 2 for d in differences) / 3) / 2
    found = json.loads((out / "versus.json").read_text())
    assert set(found) == {"policy", "versus", "episodes", "return_difference", "return_ci95"}
    assert found["return_difference"] == pytest.approx(mean)
    assert found["return_ci95"] == pytest.approx([mean - 1.959964 * error, mean + 1.959964 * error])
    assert results[0]["summary"]["return"] == pytest.approx(sum(own) / 4)
    assert results[0]["summary"]["success"] is None and "successes" not in results[0]["summary"]
    fast = evaluate(replace(config, versus="", fast=True, out=str(tmp_path / "fast")))
    assert json.loads((fast / "eval_results.json").read_text())["episodes"] == results[0]["episodes"]


def test_a_comparison_with_success_also_has_returns():
    own = [{"success": True, "return": 2.0}, {"success": False, "return": 0.0}]
    other = [{"success": False, "return": 1.0}, {"success": False, "return": 1.0}]
    found = compare(own, other)
    assert (found["paired_difference"], found["only_policy"], found["only_versus"]) == (0.5, 1, 0)
    assert found["return_difference"] == 0.0 and found["mcnemar_p"] == 1.0


def test_success_that_is_reported_only_sometimes_is_told():
    with pytest.raises(FlowRLError, match="in some episodes only"):
        summarize([{"success": True, "return": 1.0}, {"return": 1.0}], {})


def test_the_check_passes_on_returns_and_says_what_does_not_apply(folder, tmp_path):
    config = CheckConfig(
        policy=str(folder), env_id=PENDULUM, same_episodes=2, noise_episodes=2, schedules="", workers=2,
        out=str(tmp_path / "check"), device="cpu", torch_threads=1,
    )  # fmt: skip
    results = check(config, train_config(folder, tmp_path))
    assert [result.name for result in results if not result.passed] == []
    noise = next(result for result in results if result.name == "Noise").rows
    assert all(float(row["return"]) < 0 for row in noise) and noise[1]["episodes changed"] == "2/2"
    assert "not applicable: it has none" in (tmp_path / "check" / "check.md").read_text()


def test_a_resumed_run_equals_an_uninterrupted_one(folder, tmp_path):
    whole = train(train_config(folder, tmp_path / "whole"))
    parts = train(train_config(folder, tmp_path / "parts", iterations=1))
    train(train_config(folder, parts, resume=True))
    for name in ("model.safetensors", "flowrl.safetensors"):
        assert (parts / "last" / name).read_bytes() == (whole / "last" / name).read_bytes()
    timed = ("rollout_s", "rollout_parts", "update_s", "val_seconds")
    lines = [
        [{k: v for k, v in line.items() if k not in timed} for line in read_log(o)] for o in (whole, parts)
    ]
    assert lines[0] == lines[1]


def test_a_run_does_not_depend_on_the_number_of_environments(folder, tmp_path):
    one, three = (
        train(train_config(folder, tmp_path / str(envs), envs=envs, iterations=1)) for envs in (1, 3)
    )
    first, second = read_log(one), read_log(three)
    assert first[0]["val_return"] == second[0]["val_return"]
    assert first[1]["train_return"] == second[1]["train_return"]  # later the order of the decisions differs
