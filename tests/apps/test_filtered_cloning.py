"""Filtered cloning: what is kept, and that fitting it moves the policy there."""

import importlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from flowrl.errors import FlowRLError
from flowrl.flow.sampler import sample_chain
from flowrl.policy.noise import NoiseModel
from flowrl.prefix import Prefix
from flowrl.rollout import Rollout
from toy import SPEC, ToyPolicy, toy_decisions

BASELINES = Path(__file__).parents[2] / "apps" / "baselines"


@pytest.fixture
def program(monkeypatch):
    monkeypatch.syspath_prepend(str(BASELINES))
    return importlib.import_module("filtered_cloning")


def test_decisions_of_other_episodes_are_left_out(program):
    noise = NoiseModel(SPEC, sigma_start=0.2, sigma_end=0.1)
    decisions = toy_decisions(ToyPolicy(), noise, 10)
    rollout = Rollout([], decisions, {}, wall_s=0.0, rounds=1)
    [(prefix, actions)] = program.filtered(rollout, {2, 7})
    assert torch.equal(actions, decisions.states[[2, 7], -1])
    assert torch.equal(prefix.tensors["state"], decisions.prefix.tensors["state"][[2, 7]])
    assert program.filtered(rollout, set()) == []


def test_policy_comes_to_act_as_the_kept_decisions_do(program):
    policy = ToyPolicy()
    generator = torch.Generator().manual_seed(1)
    state = torch.empty(512, 2).uniform_(-1, 1, generator=generator)
    actions = torch.zeros(512, SPEC.chunk_size, SPEC.padded_action_dim)
    actions[..., 0], actions[..., 1] = 0.5 * state[:, :1], -0.8 * state[:, 1:]

    def error() -> float:
        x_0 = torch.randn(
            512, SPEC.chunk_size, SPEC.padded_action_dim, generator=torch.Generator().manual_seed(2)
        )
        chunks = sample_chain(policy, Prefix({"state": state}), x_0).actions
        return float((chunks - actions)[..., : SPEC.action_dim].square().mean())

    before = error()
    losses = program.fit(
        policy, Prefix({"state": state}), actions, steps=1500, lr=3e-3, batch=128, seed=7_700_003
    )
    assert error() < 0.1 * before
    assert losses[-1][0] == 1500 and losses[-1][1] < losses[0][1]


def test_frozen_parameters_stay(program):
    policy = ToyPolicy()
    before = {name: p.detach().clone() for name, p in policy.module.named_parameters()}
    state = torch.zeros(8, 2)
    actions = torch.ones(8, SPEC.chunk_size, SPEC.padded_action_dim)
    program.fit(policy, Prefix({"state": state}), actions, steps=3, lr=1e-4, batch=4, seed=0)
    changed = {name for name, p in policy.module.named_parameters() if not torch.equal(p, before[name])}
    assert changed and changed == set(policy.trainable_parameters())


def test_an_existing_folder_is_refused(program, tmp_path):
    with pytest.raises(FlowRLError, match="exists"):
        program.run(program.FilteredConfig(out=(str(tmp_path),)))


def test_as_many_steps_as_folders_are_needed(program, tmp_path):
    with pytest.raises(FlowRLError, match="2, 1 and 1 values"):
        program.run(program.FilteredConfig(out=(str(tmp_path / "a"), str(tmp_path / "b"))))


def test_program_fits_each_folder_from_the_start_to_the_same_episodes(program, tmp_path, monkeypatch):
    monkeypatch.setattr(program, "load_policy", lambda path, device: ToyPolicy())
    outs = tuple(str(tmp_path / name) for name in ("a", "same", "longer"))
    program.run(
        program.FilteredConfig(
            out=outs, policy=str(tmp_path), env_id="toy_env:ToyReach-v0", episodes=24, collect_at_once=16, envs=2,
            steps=(3, 3, 6), lr=(1e-3, 1e-3, 1e-3), batch=8, device="cpu", torch_threads=1,
        )
    )  # fmt: skip
    records = [json.loads((Path(out) / "filtered_cloning.json").read_text()) for out in outs]
    assert 0 < records[0]["successes"] <= 24 and records[0]["decisions"] > 0
    assert [record["flags"]["steps"] for record in records] == [3, 3, 6]
    weights = [load_file(Path(out) / "model.safetensors") for out in outs]
    start = ToyPolicy()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    for name, parameter in start.trainable_parameters().items():
        assert not torch.equal(weights[0][name], parameter) and not torch.equal(
            weights[0][name], weights[2][name]
        )


@pytest.fixture
def play(program, tmp_path, monkeypatch):
    """Runs the program on the toy with a file of decisions; returns the weights of the policy it fits."""
    monkeypatch.setattr(program, "load_policy", lambda path, device: ToyPolicy())

    def run(name: str, decisions: str, episodes: int = 24) -> dict[str, torch.Tensor]:
        out = (str(tmp_path / name),) if name else ()
        program.run(
            program.FilteredConfig(
                out=out, decisions=decisions, policy=str(tmp_path), env_id="toy_env:ToyReach-v0", episodes=episodes,
                envs=2, steps=(5,), lr=(1e-3,), batch=8, device="cpu", torch_threads=1,
            )
        )  # fmt: skip
        return load_file(tmp_path / name / "model.safetensors") if name else {}

    return run


def test_a_fit_to_kept_decisions_is_the_fit_after_playing(program, tmp_path, monkeypatch, play):
    file = str(tmp_path / "kept" / "decisions.safetensors")
    played = play("played", "")
    play("", file)
    monkeypatch.setattr(program, "successful_decisions", None)  # must not be played again
    read = play("read", file)
    assert read.keys() == played.keys()
    assert all(torch.equal(read[name], played[name]) for name in read)
    records = [
        json.loads((tmp_path / name / "filtered_cloning.json").read_text()) for name in ("read", "played")
    ]
    assert records[0]["successes"] == records[1]["successes"] > 0
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["decisions.safetensors"]


def test_decisions_of_other_episodes_and_other_files_are_refused(tmp_path, play):
    file = tmp_path / "decisions.safetensors"
    play("", str(file))
    with pytest.raises(FlowRLError, match="was played with --episodes 24, not 25; choose another file"):
        play("other", str(file), episodes=25)
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(FlowRLError, match="cannot be read"):
        play("other", str(file))
    save_file({"actions": torch.zeros(1)}, file)
    with pytest.raises(FlowRLError, match="was not written by this program"):
        play("other", str(file))
    assert not (tmp_path / "other").exists()


def test_a_file_that_cannot_be_written_is_told_before_playing(program, monkeypatch, play):
    monkeypatch.setattr(program, "successful_decisions", None)  # must not be played
    with pytest.raises(FlowRLError, match="cannot be written"):
        play("", "/proc/decisions.safetensors")


def test_something_to_write_must_be_named(program):
    with pytest.raises(FlowRLError, match="neither --out nor --decisions"):
        program.run(program.FilteredConfig())
