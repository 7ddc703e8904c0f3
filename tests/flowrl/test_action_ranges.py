"""Range of the commanded actions: its numbers, and a warning for a policy that hardly moves or is pressed against a limit."""

import json
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch

from flowrl.action_ranges import describe_ranges, executed_targets, joint_ranges, warn_of_ranges
from flowrl.config import EvalConfig
from flowrl.episode import Episode
from flowrl.evaluate import evaluate
from flowrl.scenes import Scene
from toy import ToyPolicy

LOW, HIGH = np.array([-10.0, 0.0], np.float32), np.array([10.0, 100.0], np.float32)
CONFIG = EvalConfig(policy="none", env_id="toy_env:ToyReach-v0", episodes=3, device="cpu", torch_threads=1)


def targets(*columns) -> np.ndarray:
    return np.stack(np.broadcast_arrays(*[np.asarray(c, np.float32) for c in columns]), axis=1)


def test_ranges_are_those_of_the_executed_targets_over_all_episodes():
    episodes = [Episode(number, Scene(1, number), "", 0, {}) for number in range(2)]
    episodes[0].actions = [targets([0, 1, 2, 9], [0, 10, 20, 90])]
    episodes[0].num_executed = [3]  # the last target never ran
    episodes[1].actions = [targets([-4, -4], 50.0), targets([6, 6], 50.0)]
    episodes[1].num_executed = [2, 1]
    ran = executed_targets(episodes)
    assert [len(part) for part in ran] == [3, 3]
    first, second = joint_ranges(ran, LOW, HIGH)
    assert (first.min, first.max, first.coverage) == (-4.0, 6.0, 0.5)
    assert (second.min, second.max, second.coverage) == (0.0, 50.0, 0.5)
    assert first.at_limits == 0 and second.at_limits == pytest.approx(1 / 6)
    spreads = np.std([0, 1, 2]) / 20, np.std([-4, -4, 6]) / 20
    assert first.spread == pytest.approx(np.mean(spreads))


def test_targets_beyond_a_limit_are_at_it_and_such_near_it_are_not():
    (joint,) = joint_ranges([targets([-11, -10, -9.97, 9.97, 10.01])], LOW[:1], HIGH[:1])
    assert joint.at_limits == pytest.approx(3 / 5)


def test_a_joint_without_limits_has_no_shares_and_no_warning():
    ranges = joint_ranges([targets(np.zeros(9), np.zeros(9))], np.array([-np.inf, 0]), np.array([np.inf, 0]))
    assert all(r.coverage is None and r.at_limits is None and r.spread is None for r in ranges)
    assert (ranges[0].low, ranges[0].high) == (None, None)
    assert warn_of_ranges(ranges) == [] and describe_ranges(ranges) == ""
    json.dumps([asdict(r) for r in ranges], allow_nan=False)


def test_a_policy_that_moves_gives_no_warning():
    time = np.linspace(0, 6, 60)
    ranges = joint_ranges([targets(5 * np.sin(time), 40 + 30 * np.cos(time))], LOW, HIGH)
    assert warn_of_ranges(ranges) == [] and "50.0%, 60.0%" in describe_ranges(ranges)


def test_a_policy_that_shakes_around_its_start_is_told_in_one_line():
    shaking = np.random.default_rng(0).normal(size=200) * 0.03
    (line,) = warn_of_ranges(joint_ranges([targets(shaking, 50 + shaking)] * 3, LOW, HIGH))
    assert "the policy hardly moves" in line and "\n" not in line and "5%" in line


def test_one_still_joint_is_named_and_one_that_differs_between_episodes_is_not():
    time = np.linspace(0, 6, 60)
    moving = 5 * np.sin(time)
    (line,) = warn_of_ranges(joint_ranges([targets(moving, 50)] * 2, LOW, HIGH))
    assert "joint 1 hardly moves" in line
    assert warn_of_ranges(joint_ranges([targets(moving, 20), targets(moving, 80)], LOW, HIGH)) == []


@pytest.mark.parametrize(("at_limit", "told"), [(11, False), (13, True)])
def test_saturation_is_told_from_a_fifth_of_the_targets_on(at_limit, told):
    joint = np.linspace(-9, 9, 60)
    joint[:at_limit] = 10.0
    lines = warn_of_ranges(joint_ranges([targets(joint, np.linspace(10, 90, 60))], LOW, HIGH))
    assert len(lines) == told and all("joint 0 is at a limit" in line and "%" in line for line in lines)


class StillPolicy(ToyPolicy):
    """Always flows to zero actions."""

    def velocity(self, x_t, time, prefix):
        return (x_t + 0.2) / time[:, None, None]  # 0.5 * -0.2 + 0.1 = 0

    @torch.no_grad()
    def predict_action_chunk(self, observation, tasks, x_0):
        return torch.zeros(len(x_0), self.spec.chunk_size, self.spec.action_dim)


@pytest.mark.parametrize("fast", [False, True])
def test_an_evaluation_records_ranges_and_warns(fast, tmp_path, capfd):
    config = replace(CONFIG, fast=fast, out=str(tmp_path / "still"))
    evaluate(config, lambda path, **_: StillPolicy())
    told = capfd.readouterr().err.splitlines()
    assert sum("warning: the policy hardly moves" in line for line in told) == 1
    found = json.loads((tmp_path / "still" / "eval_results.json").read_text())
    assert [r["joint"] for r in found["action_ranges"]] == [0, 1]
    assert all(r["low"] == -5 and r["high"] == 5 and r["coverage"] < 1e-6 for r in found["action_ranges"])
    assert found["control_rate"] == 30 and found["chunk_size"] == found["n_action_steps"] == 4
    assert found["weights"] == "as trained"
