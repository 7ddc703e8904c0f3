"""Gain over the start: its numbers, the alarm when a run collapses, and that both survive a resume."""

import json
from dataclasses import replace

import pytest
import torch
import toy_inline  # noqa: F401  registers its environment
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from flowrl.checkpoint import load_training_state
from flowrl.config import TrainConfig
from flowrl.gain import Validation, describe_collapse, describe_gain, gain
from flowrl.metrics import mcnemar_p, mean_interval
from flowrl.record import empty_line
from flowrl.resume import recorded_config
from flowrl.stop import StopRequest
from flowrl.train import Run
from toy import ToyPolicy

CONFIG = TrainConfig(
    policy="none",
    env_id="toy_inline:ToyInline-v0",
    iterations=4,
    envs=3,
    episodes=4,
    val_episodes=20,
    val_every=1,
    save_every=1,
    device="cpu",
    torch_threads=1,
)


class ReachingPolicy(ToyPolicy):
    """Moves the point onto the goal, but for the offset of its last bias."""

    def velocity(self, x_t, time, prefix):
        target = (prefix.tensors["state"] - 0.1) / 0.5 + self.module["field"][-1].bias[0]
        target = torch.cat([target, torch.zeros(len(target), 1)], dim=1)[:, None]
        return (x_t - target) / time[:, None, None]


def load(path, **_):
    policy = ReachingPolicy()
    with torch.no_grad():
        policy.module["field"][-1].bias[0] = 0.0
    return policy


def of_success(*success: bool) -> Validation:
    return Validation.of([{"success": value, "return": float(value)} for value in success])


def of_returns(*returns: float) -> Validation:
    return Validation.of([{"return": value} for value in returns])


def test_gain_in_success_is_the_paired_difference_with_its_interval():
    # 2 of 4 scenes won, none lost: mean 1/2, standard deviation 1/2, standard error 1/4
    found = gain(of_success(False, False, True, False), of_success(True, True, True, False))
    assert found["val_gain"] == 0.5 and found["val_collapse"] is False
    assert found["val_gain_low"] == pytest.approx(0.5 - 1.959964 / 4)
    assert found["val_gain_high"] == pytest.approx(0.5 + 1.959964 / 4)


@pytest.mark.parametrize(
    ("lost", "won", "collapse"), [(7, 0, False), (8, 0, True), (0, 20, False), (20, 5, True)]
)
def test_success_collapses_when_mcnemar_says_so_and_only_downwards(lost, won, collapse):
    start = of_success(*[True] * lost, *[False] * won, True, False)
    now = of_success(*[False] * lost, *[True] * won, True, False)
    assert gain(start, now)["val_collapse"] is collapse
    assert collapse == (lost > won and mcnemar_p(lost, won) < 0.01)


def test_returns_are_compared_where_no_success_is_reported():
    start = of_returns(*[10.0] * 10)
    differences = [-1.0, -2.0] * 5
    found = gain(start, of_returns(*(10.0 + d for d in differences)))
    assert (found["val_gain_low"], found["val_gain_high"]) == pytest.approx(mean_interval(differences))
    assert found["val_gain"] == -1.5 and found["val_collapse"] is True
    # mean -1, standard error 0.43: the 95 % interval is below 0, the 99 % interval is not
    noisy = gain(start, of_returns(*(10.0 + d for d in [0.29, -2.29] * 5)))
    assert noisy["val_gain_high"] < 0 and noisy["val_collapse"] is False
    assert gain(start, of_returns(*[11.0] * 10))["val_collapse"] is False


def test_one_scene_says_nothing_of_its_spread():
    found = gain(of_returns(1.0), of_returns(-5.0))
    assert found == {"val_gain": -6.0, "val_gain_low": None, "val_gain_high": None, "val_collapse": False}
    assert describe_gain({"val_success": None, **found}) == "-6 against the start"


@pytest.mark.parametrize("validation", [of_success(True, False), of_returns(0.1, -1e300)])
def test_results_come_back_from_a_checkpoint_as_they_were(validation):
    assert Validation.restore(validation.tensors()) == validation
    assert Validation.restore({}) is None


def test_lines_say_the_gain_and_what_to_do_about_a_collapse(tmp_path):
    numbers = {"val_gain": -0.25, "val_gain_low": -0.4, "val_gain_high": -0.1, "val_collapse": True}
    line = {"val_success": 0.5, **numbers}
    assert describe_gain(line) == "-25.0 points against the start (-40.0 to -10.0)"
    told = describe_collapse(line, tmp_path, 5)
    assert "\n" not in told and "-25.0 points" in told and f"{tmp_path / 'best'} holds iteration 5" in told
    assert all(flag in told for flag in ("--lr", "--kl-adapt", "--sigma-start", "--episodes"))
    assert describe_gain(empty_line(0, {})) == ""


def complete(run: Run, iteration: int, offset: float) -> None:
    """Logs an iteration whose update has left the policy with this offset."""
    with torch.no_grad():
        run.policy.module["field"][-1].bias[0] = offset
    run.iteration = iteration
    run.complete(empty_line(iteration, run.log_metrics), StopRequest())


def test_a_run_that_collapses_goes_on_and_says_so_also_when_it_is_resumed(tmp_path, capfd):
    out = tmp_path / "run"
    with StopRequest(), Run(replace(CONFIG, out=str(out)), load, {}) as run:
        for iteration, offset in enumerate((0.0, 0.01, 9.0)):
            complete(run, iteration, offset)
    told = capfd.readouterr().err
    assert told.count("has collapsed, -100.0 points against the start") == 1 and "iteration 1. Usual" in told
    config = replace(recorded_config(str(out)), out=str(out), resume=True)
    with StopRequest(), Run(config, load, {}) as run:
        complete(run, 3, 9.0)
        complete(run, 4, 0.0)
    told = capfd.readouterr().err
    assert told.count("has collapsed") == 1 and "+0.0 points against the start" in told

    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert [line["val_success"] for line in lines] == [1.0, 1.0, 0.0, 0.0, 1.0]
    assert [line["val_gain"] for line in lines] == [None, 0.0, -1.0, -1.0, 0.0]
    assert [line["val_collapse"] for line in lines] == [None, False, True, True, False]
    board = EventAccumulator(str(out))
    board.Reload()
    assert [event.value for event in board.Scalars("val/val_gain")] == [0.0, -1.0, -1.0, 0.0]
    assert [event.value for event in board.Scalars("val/val_collapse")] == [0.0, 1.0, 1.0, 0.0]
    assert load_training_state(out / "last").group("start")["success"].tolist() == [True] * 20
