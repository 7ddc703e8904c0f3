"""Kinds of noise in a run: flags, checkpoints, evaluation with them, and what they cost."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from toy_inline import load, load_drawing

from flowrl.checkpoint import load_training_state
from flowrl.config import EvalConfig, TrainConfig, check_config
from flowrl.errors import FlowRLError
from flowrl.evaluate import evaluate, run_fast
from flowrl.exploration import describe_noise_tax, load_noise, noise_tax
from flowrl.metrics import wilson_interval
from flowrl.resume import recorded_config
from flowrl.scenes import fixed_scenes
from flowrl.train import train
from toy import ToyPolicy, load_toy

INLINE = "toy_inline:ToyInline-v0"
CONFIG = TrainConfig(
    policy="none",
    env_id=INLINE,
    iterations=2,
    envs=3,
    episodes=8,
    val_episodes=4,
    val_every=2,
    save_every=1,
    lr=1e-3,
    sigma_lr=1e-2,
    sigma_start=0.4,
    sigma_end=0.1,
    target_kl=1.0,
    minibatch=8,
    critic_warmup=0,
    device="cpu",
    torch_threads=1,
)
KINDS = {
    "learned": {"learn_sigma": True, "entropy_coef": 1e-3},
    "head": {"noise_kind": "head", "entropy_coef": 1e-3},
    "head dct": {"noise_kind": "head", "noise_basis": "dct", "noise_modes": 2},
    "flow-sde": {"noise_kind": "flow-sde", "flow_sde_level": 0.7},
    "flow-sde dct": {"noise_kind": "flow-sde", "noise_basis": "dct", "noise_modes": 2},
}


def read_log(out: Path) -> list[dict]:
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    times = ("rollout_s", "rollout_parts", "update_s", "val_seconds")
    return [{name: value for name, value in line.items() if name not in times} for line in lines]


@pytest.fixture(scope="module", params=list(KINDS))
def run(request, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("run") / "toy"
    return train(replace(CONFIG, out=str(out), grad_cosine=True, **KINDS[request.param]), load)


def test_every_kind_scores_its_own_chains_exactly(run):
    first, *rest = read_log(run)
    assert [line["ratio_max_dev"] for line in rest] == [0.0, 0.0] and first["kl"] is None
    assert all(line["kl"] > 0 and len(line["by_step"]["kl"]) == 4 for line in rest)
    assert all(np.isfinite(line["entropy"]) and line["sigma_mean"] > 0 for line in rest)


def test_the_checkpoint_says_which_noise_and_rebuilds_it(run):
    state = load_training_state(run / "last")
    flags = json.loads((run / "args.json").read_text())["flags"]
    assert state.sampler["kind"] == flags["noise_kind"] and state.sampler["basis"] == flags["noise_basis"]
    noise = load_noise(run / "last", load_toy(run / "last"))
    assert noise.settings() == {name: state.sampler[name] for name in noise.settings()}
    stored = state.group("noise")
    assert set(stored) == set(noise.state_dict())
    assert all(torch.equal(stored[name], value) for name, value in noise.state_dict().items())


def test_an_evaluation_with_noise_uses_the_trained_one(run, tmp_path):
    config = EvalConfig(
        policy=str(run / "last"), env_id=INLINE, episodes=6, seed=9, workers=3, fast=True, noise=True, device="cpu"
    )  # fmt: skip
    out = evaluate(replace(config, out=str(tmp_path / "eval")), load)
    records = json.loads((out / "eval_results.json").read_text())["episodes"]
    policy = load_toy(run / "last")
    noise = load_noise(run / "last", policy)
    expected, _ = run_fast(policy, INLINE, {}, fixed_scenes(9, 6), 3, label="same", noise=noise)
    assert [r["distance"] for r in records] == [r["distance"] for r in expected]
    noise.perturb = lambda mean, *_: mean
    without, _ = run_fast(policy, INLINE, {}, fixed_scenes(9, 6), 3, label="off", noise=noise)
    assert [r["distance"] for r in records] != [r["distance"] for r in without]


def test_a_resumed_run_equals_an_uninterrupted_one(run, tmp_path):
    flags = recorded_config(str(run))
    out = train(replace(flags, out=str(tmp_path / "half"), iterations=1), load)
    train(replace(recorded_config(str(out)), out=str(out), resume=True, iterations=2), load)
    assert read_log(out) == read_log(run)
    a, b = (load_training_state(folder / "last").tensors for folder in (out, run))
    assert set(a) == set(b) and all(torch.equal(a[name], b[name]) for name in a)


def test_the_trained_policy_is_the_one_that_a_checkpoint_gives(tmp_path):
    """One update with a large rate: the evaluated checkpoint acts as the trainer's own policy does, not as the start."""
    kept = []

    def keeping(path, **options):
        kept.append(load(path, **options))
        return kept[-1]

    out = train(replace(CONFIG, out=str(tmp_path / "run"), iterations=1, lr=3e-2), keeping)
    scenes = fixed_scenes(9, 6)
    policies = {"trained": kept[0], "saved": load_toy(out / "last"), "start": ToyPolicy()}
    records = {name: run_fast(p, INLINE, {}, scenes, 3, label=name)[0] for name, p in policies.items()}
    assert records["saved"] == records["trained"] != records["start"]


# ---- the noise tax


@pytest.fixture(scope="module")
def taxed(tmp_path_factory) -> tuple[Path, Path]:
    """The same run with the tax measured and without."""
    folder = tmp_path_factory.mktemp("tax")
    config = replace(CONFIG, sigma_start=1.5, sigma_end=1.0)
    with_tax = train(replace(config, out=str(folder / "with"), noise_tax_episodes=12), load_drawing)
    return with_tax, train(replace(config, out=str(folder / "without")), load_drawing)


def test_the_tax_is_measured_on_the_validation_scenes_and_recorded(taxed):
    tax = json.loads((taxed[0] / "args.json").read_text())["noise_tax"]
    assert tax["episodes"] == 12
    assert tuple(tax["ci95_with_noise"]) == pytest.approx(wilson_interval(tax["successes_with_noise"], 12))
    difference = (tax["successes_with_noise"] - tax["successes_without_noise"]) / 12
    assert tax["paired_difference"] == pytest.approx(difference)
    assert tax["paired_ci95"][0] <= difference <= tax["paired_ci95"][1]
    assert "noise_tax" not in json.loads((taxed[1] / "args.json").read_text())


def test_the_tax_changes_nothing_of_the_run(taxed):
    """Also where encoding draws from the global generators."""
    with_tax, without = taxed
    assert read_log(with_tax) == read_log(without)


def test_the_tax_is_told_and_not_measured_again_by_a_resumed_run(tmp_path, capsys):
    config = replace(CONFIG, out=str(tmp_path / "run"), iterations=0, noise_tax_episodes=4)
    train(config, load)
    assert "noise tax: success without noise " in capsys.readouterr().err
    before = json.loads((tmp_path / "run" / "args.json").read_text())["noise_tax"]
    train(replace(recorded_config(config.out), out=config.out, resume=True, iterations=1), load)
    assert "noise tax" not in capsys.readouterr().err
    assert json.loads((tmp_path / "run" / "args.json").read_text())["noise_tax"] == before


def test_an_environment_without_success_is_taxed_in_returns():
    none, noisy = (
        [{"return": value} for value in values] for values in ((-1.0, -3.0, -5.0), (-2.0, -4.0, -9.0))
    )
    tax = noise_tax(none, noisy)
    # differences -1, -1, -4: mean -2, sample variance (1 + 1 + 4) / 2 = 3, standard error 1
    assert (tax["return_without_noise"], tax["return_with_noise"], tax["paired_difference"]) == (-3, -5, -2)
    assert tax["paired_ci95"] == pytest.approx((-2 - 1.959964, -2 + 1.959964))
    told = describe_noise_tax(tax)
    assert "return without noise -3 (" in told and told.endswith("paired difference -2 (-3.96 to -0.04004)")
    single = describe_noise_tax(noise_tax(none[:1], noisy[:1]))
    assert single == "noise tax: return without noise -1, with it -2, paired difference -1"
    with pytest.raises(FlowRLError, match="some episodes only"):
        noise_tax([{"success": True, "return": 1.0}], [{"return": 1.0}])


# ---- flags that do not go together


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"noise_kind": "head", "learn_sigma": True}, "--learn-sigma"),
        ({"noise_kind": "flow-sde", "learn_sigma": True}, "--learn-sigma"),
        ({"flow_sde_level": 0.7}, "--flow-sde-level"),
        ({"noise_kind": "flow-sde", "flow_sde_level": 0.0}, "--flow-sde-level"),
        ({"noise_kind": "flow-sde", "flow_sde_level": 1.5}, "--flow-sde-level"),
        ({"entropy_coef": 0.1}, "--entropy-coef"),
        ({"entropy_coef": 0.1, "noise_kind": "flow-sde"}, "--entropy-coef"),
        ({"entropy_coef": -0.1, "learn_sigma": True}, "--entropy-coef"),
        ({"noise_tax_episodes": -1}, "--noise-tax-episodes"),
    ],
)
def test_flags_without_meaning_are_refused_in_one_line(changes, flag):
    with pytest.raises(FlowRLError) as error:
        check_config(replace(CONFIG, **changes))
    assert str(error.value).startswith(flag) and "\n" not in str(error.value)


@pytest.mark.parametrize("name", list(KINDS))
def test_kinds_with_their_flags_are_allowed(name):
    check_config(replace(CONFIG, **KINDS[name]))
