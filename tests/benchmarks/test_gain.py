"""The stages of the proof: their commands are understood by the programs and are those of the protocol."""

import dataclasses
import importlib
import json
import sys
from pathlib import Path

import pytest
import torch
import tyro

from chess_apps.config import CloneConfig
from flowrl.cli import parse_flags
from flowrl.config import EvalConfig, TrainConfig, check_config

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def gain(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("gain")


def jobs_of(gain, monkeypatch, out, *words):
    monkeypatch.setattr(sys, "argv", ["gain.py", *words, "--out", str(out)])
    args = gain.parse()
    return {job.name: job for job in gain.STAGES[args.stage](args)}


def config_of(step):
    """The program's own config of a step's command."""
    words = list(step.command())
    assert words[:2] == [
        sys.executable,
        "-c",
    ]  # a script's file would be imported by every environment's process
    program, flags = words[2], words[3:]
    if "evaluate" in program:
        config = parse_flags(EvalConfig, "flowrl-eval", flags)
    elif "chess_apps" in program:
        return parse_flags(CloneConfig, "chess-bc", flags)
    else:
        assert "train" in program or "without_critic" in program
        config = parse_flags(TrainConfig, "flowrl-train", flags)
    check_config(config)
    return config


def test_runs_are_those_of_the_protocol(gain, monkeypatch, tmp_path):
    jobs = jobs_of(gain, monkeypatch, tmp_path, "train", "500")
    configs = [config_of(job.steps[0]) for job in jobs.values()]
    assert list(jobs) == ["rl-seed1", "rl-seed2", "rl-seed3"]
    assert [config.train_seed for config in configs] == [7700004, 7700005, 7700006]
    assert {(c.iterations, c.episodes, c.val_seed, c.policy) for c in configs} == {
        (150, 256, 9300003, "models/chess-tiny")
    }


def test_a_run_that_has_begun_is_resumed_with_its_own_flags(gain, monkeypatch, tmp_path):
    run = tmp_path / "runs" / "rl-seed2"
    run.mkdir(parents=True)
    (run / "args.json").write_text("{}")
    step = jobs_of(gain, monkeypatch, tmp_path, "train", "500")["rl-seed2"].steps[0]
    assert "--resume" in step.command() and "--train-seed" not in step.command()
    assert not step.done()
    (run / "last").mkdir()
    (run / "last" / "flowrl.json").write_text(json.dumps({"meta": {"iteration": 150}}))
    assert step.done()


def test_an_ablation_differs_from_the_base_in_its_own_flags_alone(gain, monkeypatch, tmp_path):
    jobs = jobs_of(gain, monkeypatch, tmp_path, "ablate", "500")
    assert len(jobs) == 12
    base = dataclasses.asdict(config_of(jobs["base-s1"].steps[0]))
    changes = {}
    for name, job in jobs.items():
        run, evaluation = job.steps
        config = dataclasses.asdict(config_of(run))
        changes[name] = {key for key in config if config[key] != base[key]} - {"out"}
        assert config_of(evaluation).seed == 9300003
    assert changes["base-s2"] == {"train_seed"}
    assert changes["ratio-step-s1"] == changes["ratio-chunk-s1"] == {"ratio"}
    assert changes["learn-sigma-s1"] == {"learn_sigma"}
    assert changes["no-critic-s1"] == {"lam"}  # the preset's passes of the critic are taken away as well
    assert "without_critic" in " ".join(jobs["no-critic-s1"].steps[0].command())
    assert list(jobs_of(gain, monkeypatch, tmp_path, "ablate", "500", "base-s2", "no-average")) == [
        "base-s2", "no-average-s1", "no-average-s2",
    ]  # fmt: skip


def test_filtered_episodes_are_not_played_again_for_a_fit_that_is_left(gain, monkeypatch, tmp_path):
    steps = jobs_of(gain, monkeypatch, tmp_path, "control", "500", "filtered")["filtered"].steps
    assert [step.done() for step in steps] == [False, False, False]
    (tmp_path / "filtered").mkdir()
    (tmp_path / "filtered/decisions.safetensors").touch()
    (tmp_path / "final/filtered").mkdir(parents=True)
    assert [step.done() for step in steps] == [True, True, False]
    (
        tmp_path / "filtered/decisions.safetensors"
    ).unlink()  # on another machine, with both policies brought back
    assert [step.done() for step in steps] == [False, True, False]
    (tmp_path / "final/filtered-more").mkdir()
    assert [step.done() for step in steps] == [True, True, True]


def test_controls_have_the_budget_of_a_run(gain, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(BENCHMARKS.parent / "apps" / "baselines"))
    jobs = jobs_of(gain, monkeypatch, tmp_path, "control", "500")
    program = importlib.import_module("filtered_cloning").FilteredConfig
    play, *fits = [tyro.cli(program, args=list(step.command())[3:]) for step in jobs["filtered"].steps]
    assert (play.episodes, play.train_seed, play.out) == (38_400, 7700004, ())
    assert play.decisions and {fit.decisions for fit in fits} == {play.decisions}
    assert [(fit.out, fit.steps, fit.lr) for fit in fits] == [
        ((str(tmp_path / "final" / "filtered"),), (4000,), (1e-4,)),
        ((str(tmp_path / "final" / "filtered-more"),), (12000,), (3e-4,)),
    ]
    scenes = {name: config_of(jobs[name].steps[0]).record.episodes for name in ("longer", "longer-twice")}
    assert scenes == {"longer": 400, "longer-twice": 800}
    critic = config_of(jobs["critic-only"].steps[0])
    assert critic.critic_warmup == critic.iterations


def test_the_start_is_tested_once_and_first(gain, monkeypatch, tmp_path):
    for name in ("critic-only", "filtered", "rl-seed1"):
        (tmp_path / "final" / name).mkdir(parents=True)
    jobs = jobs_of(gain, monkeypatch, tmp_path, "test", "500")
    assert list(jobs) == ["start", "rl-seed1", "filtered", "critic-only"]
    configs = [config_of(job.steps[0]) for job in jobs.values()]
    assert {(c.seed, c.episodes, c.fast, c.expert_fp32, c.noise, c.versus) for c in configs} == {
        (9000003, 1000, True, True, False, "")
    }


def test_values_without_a_critic_are_zero(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    critic = importlib.import_module("without_critic").NoCritic(3)
    values = critic(torch.randn(5, 3))
    assert torch.equal(values, torch.zeros(5))
    values.sum().backward()
    assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in critic.parameters())


def test_a_larger_policy_goes_the_way_of_chess_tiny(gain, monkeypatch, tmp_path):
    larger = importlib.import_module("larger_policy")
    monkeypatch.setattr(sys, "argv", ["larger_policy.py", "run", "500", "--out", str(tmp_path)])
    steps = larger.steps_of(larger.parse(), cores=16)
    vision, start, validation, rl, _, *evaluations = steps
    assert (config_of(vision).policy, config_of(vision).size, config_of(vision).train) == (
        "new",
        "30m",
        "all",
    )
    sloppy = config_of(start)
    assert (sloppy.policy, sloppy.train, sloppy.reset_expert) == (str(tmp_path / "vision"), "expert", True)
    made = json.loads((BENCHMARKS.parent / "models/chess-tiny/clone.json").read_text())["config"]
    for name in (
        "episodes",
        "aim_error_mm",
        "hesitation_frames",
        "close_shift_frames",
        "first_index",
        "seed",
    ):
        assert getattr(sloppy.record, name) == made["record"][name]
    assert (sloppy.steps, sloppy.lr, sloppy.stride, sloppy.batch) == tuple(
        made[name] for name in ("steps", "lr", "stride", "batch")
    )
    assert config_of(rl).policy == str(tmp_path / "start")
    assert [config_of(step).seed for step in (validation, *evaluations)] == [
        9300003,
        9300003,
        9000003,
        9000003,
    ]
    assert all(step.needs_s < 585 for step in steps)  # each fits into one call of ten minutes
