"""flowrl-check passes a sound policy, and each of its checks fails on the fault that it is there for."""

import json
import re
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import toy_inline  # noqa: F401  registers its environment
from safetensors.torch import load_file, save_file

import flowrl.check
import flowrl.flow.likelihood
import flowrl.flow.sampler
import flowrl.plain
from flowrl.check import check, report
from flowrl.checks import (
    CheckResult,
    compare_records,
    distinct_starts,
    first_decisions,
    likelihood,
    reload,
    update,
)
from flowrl.config import CheckConfig, TrainConfig, parse_schedules
from flowrl.errors import FlowRLError
from flowrl.evaluate import run_fast, run_plain
from flowrl.exploration import make_noise
from flowrl.flow.sampler import episode_noise, sample_chain
from flowrl.flow.schedule import denoising_times
from flowrl.noise_checks import SIGMA_TOLERANCE, asked_sizes, noise_cost, noise_size_error
from flowrl.policy.critic import Critic
from flowrl.policy.noise import NoiseModel
from flowrl.policy.smolvla import SmolVLAFlowPolicy
from flowrl.ppo import PPO
from flowrl.rollout import Decisions
from flowrl.scenes import Scene, fixed_scenes
from toy import SPEC, ToyPolicy, load_toy, toy_decisions

TOY = "toy_env:ToyReach-v0"
CONFIG = CheckConfig(
    policy="no-folder",
    env_id=TOY,
    same_episodes=4,
    noise_episodes=6,
    schedules="0.4:0.05",
    workers=3,
    device="cpu",
)
TRAIN = TrainConfig(lr=1e-3)
BATCH = 2
KINDS = ("geometric", "head", "flow-sde")


def load(path, *, device, expert_dtype, rename):
    return load_toy(path, device)


def row(rows, text):
    return next(row for row in rows if any(text in str(value) for value in row.values()))


def failed(rows):
    return [row for row in rows if row["passed"] is False]


@contextmanager
def shifted_grid(monkeypatch, *modules):
    """The denoising times half a step late, in some of the modules that read them."""

    def late(num_steps):
        dt, times = denoising_times(num_steps)
        return dt, [time + dt / 2 for time in times]

    with monkeypatch.context() as patch:
        for module in modules:
            patch.setattr(module, "denoising_times", late)
        yield


# ---- the program


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("check")
    return out, check(replace(CONFIG, out=str(out)), TRAIN, load)


def test_a_sound_policy_passes_all_five(finished):
    _, results = finished
    assert [result.name for result in results] == ["Same as eval", "Noise", "Likelihood", "Update", "Reload"]
    assert [failed(result.rows) for result in results] == [[]] * 5 and all(r.passed for r in results)


def test_the_report_and_the_record_are_written_and_nothing_else(finished):
    out, results = finished
    record = json.loads((out / "check.json").read_text())
    assert record["passed"] is True and [c["name"] for c in record["checks"]] == [r.name for r in results]
    assert record["flags"]["schedules"] == "0.4:0.05" and record["versions"]["torch"]
    text = (out / "check.md").read_text()
    assert re.findall(r"^\d\. (.+): passed$", text, re.MULTILINE) == [r.name for r in results]
    assert "field.0.weight" in text and "actions cover " in text
    assert [r["joint"] for r in record["checks"][0]["details"]["action ranges"]] == [0, 1]
    assert {path.name for path in out.iterdir()} == {"check.json", "check.md"}


def test_every_noise_is_measured_on_the_same_scenes_beside_none(finished):
    _, results = finished
    assert [r["noise"] for r in results[1].rows] == [
        "none",
        "0.2:0.002 white, the policy's own",
        "0.4:0.05 white",
    ]
    assert all(r["success"].endswith("/6") for r in results[1].rows)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"noise_basis": "dct", "noise_modes": 2, "sigma_start": 0.3, "sigma_end": 0.1}, "0.3:0.1 dct 2"),
        ({"noise_kind": "flow-sde", "flow_sde_level": 0.3}, "flow-sde 0.3 white"),
        ({"noise_kind": "head"}, "head 0.2:0.002 white"),
    ],
)
def test_the_noise_that_is_asked_for_is_the_one_that_is_checked(changes, name, tmp_path):
    config = replace(
        CONFIG,
        env_id="toy_inline:ToyInline-v0",
        same_episodes=2,
        noise_episodes=3,
        schedules="",
        out=str(tmp_path),
    )
    results = check(replace(config, **changes), TRAIN, load)
    assert [failed(result.rows) for result in results] == [[]] * 5
    assert [r["noise"] for r in results[1].rows] == ["none", f"{name}, the policy's own"]
    assert [r["noise"] for r in results[2].rows] == ["0.2:0.002 white"] * 4 + [name] * 4
    record = json.loads((tmp_path / "check.json").read_text())
    assert all(record["training"][flag] == value for flag, value in changes.items())


def test_the_program_fails_where_training_samples_on_another_grid_than_the_library(monkeypatch, tmp_path):
    with shifted_grid(monkeypatch, flowrl.flow.sampler, flowrl.flow.likelihood):
        results = check(replace(CONFIG, out=str(tmp_path), same_episodes=2, noise_episodes=2), TRAIN, load)
    assert [result.passed for result in results] == [False, False, True, True, True]
    assert json.loads((tmp_path / "check.json").read_text())["passed"] is False
    assert "1. Same as eval: FAILED" in (tmp_path / "check.md").read_text()


def rounded(tensor):
    return tensor.bfloat16().float()


def plant_ignored_seeds(patch):
    real = flowrl.plain.reset_scene
    patch.setattr(flowrl.plain, "reset_scene", lambda env, scene: real(env, Scene(0, 0)))


def plant_ignored_schedule(patch):
    real = flowrl.check.make_noise
    default = {"sigma_start": 0.2, "sigma_end": 0.002}
    patch.setattr(flowrl.check, "make_noise", lambda flags, *rest: real(replace(flags, **default), *rest))


def plant_shifted_scores(patch):
    patch.setattr(
        flowrl.flow.likelihood, "denoising_times", lambda n: (-1 / n, [1 - k / n - 0.1 for k in range(n)])
    )


def plant_moved_encoder(patch):
    real = PPO.update

    def moves_it(self, *args, **kwargs):
        with torch.no_grad():
            self.policy.module["encoder"].bias[0] += 1e-3
        return real(self, *args, **kwargs)

    patch.setattr(PPO, "update", moves_it)


def plant_rounded_weights(patch):
    real = ToyPolicy.save

    def rounds(self, folder, **kwargs):
        real(self, folder, **kwargs)
        path = Path(folder) / "model.safetensors"
        save_file({name: rounded(tensor) for name, tensor in load_file(path).items()}, path)

    patch.setattr(ToyPolicy, "save", rounds)


PLANTS = [
    plant_ignored_seeds,
    plant_ignored_schedule,
    plant_shifted_scores,
    plant_moved_encoder,
    plant_rounded_weights,
]


@pytest.mark.parametrize("number", range(5))
def test_the_program_fails_the_check_that_a_fault_is_for_and_no_other(number, monkeypatch, tmp_path):
    config = replace(
        CONFIG, env_id="toy_inline:ToyInline-v0", same_episodes=2, noise_episodes=3, out=str(tmp_path)
    )
    PLANTS[number](monkeypatch)
    results = check(config, TRAIN, load)
    assert [place for place, result in enumerate(results) if not result.passed] == [number]
    assert json.loads((tmp_path / "check.json").read_text())["passed"] is False


def test_a_failed_check_is_told_and_fails_the_whole():
    result = CheckResult("Update", [{"what": "a", "passed": True}, {"what": "b", "passed": False}], {})
    assert not result.passed and "1. Update: FAILED" in report("x", [result])
    assert CheckResult("Noise", [{"what": "a", "passed": None}], {}).passed


def test_schedules_are_pairs_of_positive_numbers():
    assert (
        parse_schedules("0.1:0.002,0.3:0.003") == [(0.1, 0.002), (0.3, 0.003)] and parse_schedules("") == []
    )
    for bad in ("0.1", "0.1:0", "a:b", "0.1:0.2:0.3", "0.1:inf"):
        with pytest.raises(FlowRLError, match="--schedules"):
            parse_schedules(bad)


# ---- 1. same as eval


def records(how=run_plain, policy=None, scenes=None, *workers):
    scenes = scenes or fixed_scenes(9, 4)
    return how(policy or ToyPolicy(), TOY, {}, scenes, *workers, label="check")[0]


def test_equal_records_pass_and_are_counted():
    row = compare_records("same", records(), records(run_fast, None, None, 1))
    assert row["passed"] and row["equal"] == row["scenes"] == 4 and row["largest differences"] == ""


def test_another_sampler_in_eval_is_found():
    class Midpoint(ToyPolicy):
        @torch.no_grad()
        def predict_action_chunk(self, observation, tasks, x_0):
            prefix, x_t, dt = self.encode(observation, tasks), x_0, -1.0 / SPEC.num_denoising_steps
            for step in range(SPEC.num_denoising_steps):
                time = torch.full((len(x_t),), 1.0 + step * dt)
                half = x_t + dt / 2 * self.velocity(x_t, time, prefix)
                x_t = x_t + dt * self.velocity(half, time + dt / 2, prefix)
            return self.unnormalize(x_t[..., : SPEC.action_dim])

    row = compare_records("same", records(policy=Midpoint()), records(run_fast, Midpoint(), None, 1))
    assert row["passed"] is False and "distance" in row["largest differences"]


def test_a_shifted_time_grid_is_found(monkeypatch):
    plain = records()
    with shifted_grid(monkeypatch, flowrl.flow.sampler, flowrl.flow.likelihood):
        assert compare_records("same", plain, records(run_fast, None, None, 1))["passed"] is False


def test_ignored_scene_seeds_are_found(monkeypatch):
    trained = records(run_fast, None, None, 1)
    real = flowrl.plain.reset_scene
    monkeypatch.setattr(flowrl.plain, "reset_scene", lambda env, scene: real(env, Scene(0, 0)))
    assert compare_records("same", records(), trained)["passed"] is False


def test_ignored_noise_seeds_are_found(monkeypatch):
    trained = records(run_fast, None, None, 1)
    real = flowrl.plain.episode_noise
    monkeypatch.setattr(flowrl.plain, "episode_noise", lambda seed, decision, spec: real(0, decision, spec))
    assert compare_records("same", records(), trained)["passed"] is False


def test_scenes_that_start_alike_or_not_again_alike_are_found():
    starts = [{"agent_pos": np.array([x])} for x in (1.0, 2.0)]
    assert distinct_starts(starts, starts)["passed"]
    assert not distinct_starts([starts[0], starts[0]], [starts[0], starts[0]])["passed"]
    assert not distinct_starts(starts, starts[::-1])["passed"]


# ---- 2. noise


@pytest.mark.parametrize("kind", KINDS)
def test_a_noise_has_the_size_of_its_schedule_in_both_bases(kind):
    policy = ToyPolicy()
    decisions = toy_decisions(policy, NoiseModel(SPEC), 8)
    flags = replace(TRAIN, sigma_start=0.3, sigma_end=0.02, noise_kind=kind, noise_modes=2)
    for basis in ("white", "dct"):
        noise = make_noise(replace(flags, noise_basis=basis), policy, 2)
        assert noise_size_error(policy, decisions, noise, asked_sizes(flags, 4)) < 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_a_noise_schedule_that_is_not_applied_is_found(kind):
    policy = ToyPolicy()
    flags = replace(TRAIN, sigma_start=0.3, sigma_end=0.02, noise_kind=kind)
    decisions, asked = toy_decisions(policy, NoiseModel(SPEC), 8), asked_sizes(flags, 4)
    default = NoiseModel(SPEC)  # the flag had no effect
    assert noise_size_error(policy, decisions, default, asked) > 0.3
    noise = make_noise(flags, policy, 2)
    noise.perturb = lambda mean, *_: mean
    assert noise_size_error(policy, decisions, noise, asked) == pytest.approx(1.0)


def test_a_flow_sde_without_its_drift_is_found():
    policy, flags = ToyPolicy(), replace(TRAIN, noise_kind="flow-sde")
    decisions, noise = toy_decisions(policy, NoiseModel(SPEC), 8), make_noise(flags, policy, 2)
    noise.mean = lambda x_t, v_t, dt, step=None: x_t + dt * v_t
    assert noise_size_error(policy, decisions, noise, asked_sizes(flags, 4)) > SIGMA_TOLERANCE


def test_noise_that_changes_no_episode_or_has_another_size_fails():
    none = [{"success": True, "distance": 0.1}, {"success": False, "distance": 0.5}]
    noisy = [{"success": False, "distance": 0.2}, {"success": False, "distance": 0.4}]
    row = noise_cost("noise", none, noisy, 1e-5)
    assert row["passed"] and row["episodes changed"] == "2/2" and row["minus none"].startswith("-50.0 points")
    assert noise_cost("noise", none, none, 1e-5)["passed"] is False
    assert noise_cost("noise", none, noisy, 0.5)["passed"] is False
    assert noise_cost("none", none, none, None)["passed"] is None


# ---- 3. likelihood


def test_sound_chains_pass_in_every_composition():
    policy, noise = ToyPolicy(), NoiseModel(SPEC)
    rows = likelihood("default", policy, toy_decisions(policy, noise, 41), noise)
    assert len(rows) == 4 and not failed(rows) and {r["decisions"] for r in rows} == {41}
    assert rows[0]["largest ratio deviation"] == 0 and all(r["largest ratio deviation"] < 1e-3 for r in rows)


def test_a_likelihood_on_another_time_grid_than_the_sampler_is_found(monkeypatch):
    policy, noise = ToyPolicy(), NoiseModel(SPEC)
    decisions = toy_decisions(policy, noise, 20)
    with shifted_grid(monkeypatch, flowrl.flow.likelihood):
        assert len(failed(likelihood("default", policy, decisions, noise))) == 4


def test_chains_scored_with_another_schedule_are_found():
    policy, noise = ToyPolicy(), NoiseModel(SPEC)
    decisions = toy_decisions(policy, noise, 20)
    other = NoiseModel(SPEC, sigma_start=0.21)
    assert len(failed(likelihood("default", policy, decisions, other))) == 4


def test_a_prefix_of_another_decision_is_found():
    policy, noise = ToyPolicy(), NoiseModel(SPEC)
    decisions = toy_decisions(policy, noise, 20)
    decisions.prefix = decisions.prefix[[1, 0, *range(2, 20)]]
    assert failed(likelihood("default", policy, decisions, noise))


# ---- 4. and 5. on a small SmolVLA


class Case:
    """A small SmolVLA with decisions sampled from it, loaded anew for every test."""

    def __init__(self, folder: Path, make_observation, tasks) -> None:
        self.folder = folder
        self.policy = SmolVLAFlowPolicy.load(folder)
        self.noise = NoiseModel(self.policy.spec)
        self.observation, self.tasks = make_observation(BATCH), tasks(BATCH)
        spec = self.policy.spec
        drawn = [episode_noise(seed, 0, spec, self.noise.num_elements) for seed in range(BATCH)]
        self.x_0 = torch.stack([x_0 for x_0, _ in drawn])
        prefix = self.policy.encode(self.observation, self.tasks)
        eps = torch.stack([e for _, e in drawn if e is not None])
        chain = sample_chain(self.policy, prefix, self.x_0, self.noise, eps)
        features = self.policy.prefix_features(prefix)
        self.critic = Critic(features.shape[1])
        self.decisions = Decisions(
            prefix=prefix,
            states=chain.states,
            log_prob=chain.log_prob,
            features=features,
            num_executed=torch.full((BATCH,), spec.n_action_steps),
            episode=np.arange(BATCH),
            order=np.zeros(BATCH, dtype=np.int64),
            rounds=[np.arange(BATCH)],
        )

    def update(self) -> CheckResult:
        config = TrainConfig(lr=1e-5)
        return update(
            self.policy, self.decisions, self.noise, self.critic, config, self.observation, self.tasks
        )[0]

    def reload(self, out, load_same=SmolVLAFlowPolicy.load) -> CheckResult:
        ppo = PPO(self.policy, self.noise, self.critic, TrainConfig())
        return reload(
            self.policy, load_same, str(self.folder), out, self.noise, self.critic, ppo,
            self.observation, self.tasks, self.x_0,
        )  # fmt: skip


@pytest.fixture
def case(base_folder, make_observation, tasks):
    return Case(base_folder, make_observation, tasks)


def test_an_update_changes_the_expert_alone(case):
    result = case.update()
    assert result.passed and not result.details["wrong"]
    assert any(".lm_expert." in name for name in result.details["changed"])
    assert row(result.rows, "state_proj")["count"] == row(result.rows, "vlm")["count"] == 0
    assert row(result.rows, "state_proj")["of"] == 2


def test_a_moved_vlm_weight_is_found_by_its_name(case, monkeypatch):
    moved = next(n for n, _ in case.policy.module.named_parameters() if ".vlm." in n and "k_proj" in n)
    real = PPO.update

    def also_moves_the_vlm(self, *args, **kwargs):
        with torch.no_grad():
            self.policy.module.get_parameter(moved).view(-1)[0] += 1e-3
        return real(self, *args, **kwargs)

    monkeypatch.setattr(PPO, "update", also_moves_the_vlm)
    result = case.update()
    assert not result.passed and result.details["wrong"] == [moved]
    assert row(result.rows, "encoded observation")["passed"] is False


def test_a_trained_state_proj_is_found_even_if_the_policy_calls_it_trainable(case, monkeypatch):
    name = "model.state_proj.weight"
    real = SmolVLAFlowPolicy.trainable_parameters
    monkeypatch.setattr(
        SmolVLAFlowPolicy,
        "trainable_parameters",
        lambda self: {**real(self), name: self.module.get_parameter(name).requires_grad_(True)},
    )
    ppo_step = PPO.update

    def trains_it(self, *args, **kwargs):
        stats = ppo_step(self, *args, **kwargs)
        with torch.no_grad():
            self.policy.module.get_parameter(name).mul_(1.001)
        return stats

    monkeypatch.setattr(PPO, "update", trains_it)
    result = case.update()
    assert not result.passed and result.details["wrong"] == [name]
    assert row(result.rows, "state_proj")["passed"] is False


def test_an_update_that_changes_nothing_is_found(case, monkeypatch):
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self, closure=None: None)
    result = case.update()
    assert not result.passed and row(result.rows, "trainable weights")["passed"] is False


def test_a_reloaded_checkpoint_is_the_same_policy_also_in_lerobot(case, tmp_path):
    result = case.reload(tmp_path)
    assert result.passed and [r["passed"] for r in result.rows] == [True] * 6
    assert len(result.details["files"]) == 2 and list(tmp_path.iterdir()) == []


def test_statistics_changed_on_save_are_found(case, tmp_path, monkeypatch):
    real = SmolVLAFlowPolicy.save

    def saves_other_statistics(self, folder, **kwargs):
        real(self, folder, **kwargs)
        for path in Path(folder).glob("policy_*processor*.safetensors"):
            save_file({name: tensor * 1.01 for name, tensor in load_file(path).items()}, path)

    monkeypatch.setattr(SmolVLAFlowPolicy, "save", saves_other_statistics)
    result = case.reload(tmp_path)
    assert [r["what"] for r in failed(result.rows)] == [
        "normalization files, byte for byte",
        "normalization of actions",
        "chunk for the same x_0",
        "chunk by the library's own loader",
    ]


def test_an_expert_reloaded_in_bfloat16_is_found(case, tmp_path):
    def loads_bfloat16(folder):
        policy = SmolVLAFlowPolicy.load(folder)
        policy.module.model.vlm_with_expert.lm_expert.bfloat16()
        return policy

    result = case.reload(tmp_path, loads_bfloat16)
    assert not result.passed and all("lm_expert" in name for name in result.details["different weights"])
    assert row(result.rows, "weights bit-identical")["passed"] is False


def test_an_expert_stored_in_bfloat16_is_found_through_lerobot_too(case, tmp_path, monkeypatch):
    real = SmolVLAFlowPolicy.save

    def rounds_the_expert(self, folder, **kwargs):
        real(self, folder, **kwargs)
        path = Path(folder) / "model.safetensors"
        tensors = load_file(path)
        rounded = {n: t.bfloat16().float() if ".lm_expert." in n else t for n, t in tensors.items()}
        save_file(rounded, path, {"format": "pt"})

    monkeypatch.setattr(SmolVLAFlowPolicy, "save", rounds_the_expert)
    result = case.reload(tmp_path)
    assert row(result.rows, "weights bit-identical")["passed"] is False
    assert row(result.rows, "trained weights through the library")["passed"] is False


def test_whole_rounds_are_taken_for_one_step():
    policy, noise = ToyPolicy(), NoiseModel(SPEC)
    decisions = toy_decisions(policy, noise, 30, round_size=7)
    decisions.rounds = [np.array(rows) for rows in ([29, 0, 7], [3, 4, 5], [28, 1], [2, 6])]
    for count, size in ((3, 3), (4, 6), (6, 6), (7, 8)):
        part = first_decisions(decisions, count)
        chosen = sorted(row for rows in decisions.rounds[: len(part.rounds)] for row in rows)
        assert len(part) == size and part.episode.tolist() == chosen
        for rows, own in zip(decisions.rounds, part.rounds):
            assert torch.equal(part.states[own], decisions.states[rows])
