"""Training end to end on the toy environment and the toy policy."""

import gc
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from flowrl.checkpoint import load_training_state
from flowrl.config import EvalConfig, TrainConfig
from flowrl.errors import FlowRLError
from flowrl.evaluate import evaluate, policy_name
from flowrl.stop import StopRequest
from flowrl.train import Run, train
from toy import ToyPolicy, load_toy

CONFIG = TrainConfig(
    policy="no-folder",
    env_id="toy_env:ToyReach-v0",
    iterations=2,
    envs=3,
    episodes=8,
    val_episodes=5,
    val_every=2,
    save_every=2,
    lr=1e-3,
    sigma_start=0.4,
    sigma_end=0.1,
    target_kl=1.0,
    minibatch=8,
    device="cpu",
)
FIELDS = [
    "iteration",
    "decisions",
    "train_episodes",
    "train_success",
    "train_return",
    "train_distance_median",
    "train_success_left",
    "val_episodes",
    "val_success",
    "val_return",
    "val_distance_median",
    "val_success_left",
    "val_gain",
    "val_gain_low",
    "val_gain_high",
    "val_collapse",
    "kl",
    "kl_decision",
    "clip_fraction",
    "pg_loss",
    "v_loss",
    "explained_variance",
    "grad_norm",
    "grad_cosine",
    "grad_signal",
    "episodes_needed",
    "ratio_max_dev",
    "ratio_std",
    "by_step",
    "by_position",
    "by_joint",
    "sigma_mean",
    "entropy",
    "epochs_done",
    "kl_stop",
    "lr",
    "skipped",
    *(
        f"{name}_{statistic}"
        for name in ("advantage", "return")
        for statistic in ("mean", "std", "min", "max")
    ),
    "rollout_s",
    "rollout_parts",
    "update_s",
    "val_seconds",
]


def load(path, *, device, expert_dtype, rename):
    return load_toy(path, device)


def read_log(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("run") / "toy"
    return train(replace(CONFIG, out=str(out)), load)


def test_log_has_a_line_for_every_iteration_with_every_field(run):
    lines = read_log(run)
    assert [line["iteration"] for line in lines] == [0, 1, 2]
    assert all(list(line) == FIELDS for line in lines)
    assert set(lines[1]["rollout_parts"]) == {"prepare", "sample", "env", "reset", "rounds"}
    numbers = [value for line in lines for value in line.values() if isinstance(value, float)]
    assert all(math.isfinite(value) for value in numbers)


def test_iteration_0_is_a_validation_before_any_update(run):
    first, second, third = read_log(run)
    assert first["val_episodes"] == 5 and first["val_success"] is not None
    assert first["train_success"] is None and first["kl"] is None and first["rollout_s"] is None
    assert second["val_success"] is None and second["train_episodes"] == 8
    assert third["val_success"] is not None


def test_first_iteration_warms_the_critic_up(run):
    _, second, third = read_log(run)
    assert second["lr"] == 0.0 and second["kl"] is None and second["v_loss"] > 0
    assert third["lr"] == 1e-3 and third["kl"] > 0 and third["epochs_done"] == 2


def test_chains_rescored_as_sampled_have_ratio_1(run):
    assert [line["ratio_max_dev"] for line in read_log(run)] == [None, 0.0, 0.0]


def test_record_names_flags_versions_and_environment(run):
    args = json.loads((run / "args.json").read_text())
    assert args["flags"]["lr"] == 1e-3 and args["flags"]["env_id"] == "toy_env:ToyReach-v0"
    assert args["environment"]["kwargs"] == {"seconds": 20.0, "chunk_size": 4, "reward": "success"}
    assert args["environment"]["reward_weights"] == {"success": 1.0}
    assert args["versions"]["torch"] and args["device"] == "cpu" and "commit" in args
    assert list(run.glob("events.out.tfevents.*"))


def test_checkpoints_are_written_and_hold_the_state(run):
    assert {path.name for path in run.iterdir() if path.is_dir()} == {"iter_0002", "last", "best"}
    state = load_training_state(run / "last")
    assert state.meta["iteration"] == 2 and state.meta["next_index"] == 16
    assert set(state.group("critic")) and set(state.group("optimizer.ppo"))
    trained = load_file(run / "last" / "model.safetensors")
    start = ToyPolicy().module.state_dict()
    changed = {name for name in start if not torch.equal(start[name], trained[name])}
    assert changed == {name for name in start if name.startswith("field.")}


def test_warm_up_leaves_the_saved_policy_bit_identical(tmp_path):
    out = train(replace(CONFIG, out=str(tmp_path / "run"), iterations=1, critic_warmup=1, val_every=5), load)
    saved, start = load_file(out / "last" / "model.safetensors"), ToyPolicy().module.state_dict()
    assert all(torch.equal(saved[name], start[name]) for name in start)


def test_two_runs_with_the_same_flags_are_equal_bit_for_bit(run, tmp_path):
    again = train(replace(CONFIG, out=str(tmp_path / "again")), load)
    first, second = (load_file(out / "last" / "model.safetensors") for out in (run, again))
    assert all(torch.equal(first[name], second[name]) for name in first)
    timed = ("rollout_s", "rollout_parts", "update_s", "val_seconds")
    for a, b in zip(read_log(run), read_log(again)):
        assert {k: v for k, v in a.items() if k not in timed} == {
            k: v for k, v in b.items() if k not in timed
        }


def test_used_out_folder_is_refused_and_untouched(run):
    before = (run / "log.jsonl").read_bytes()
    with pytest.raises(FlowRLError, match="already used"):
        train(replace(CONFIG, out=str(run)), load)
    assert (run / "log.jsonl").read_bytes() == before


def test_iterations_leave_no_tensors_behind(tmp_path):
    config = replace(CONFIG, out=str(tmp_path / "run"))
    counts = []
    with StopRequest() as stop, Run(config, load, {}) as run:
        for iteration in range(1, 5):
            run.learn(iteration, run.collect(iteration, stop))
            gc.collect()
            counts.append(sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects()))
    assert (
        counts[1] == counts[2] == counts[3]
    )  # the policy's moments come with its first step, in iteration 2


def test_no_training_scene_is_used_twice(tmp_path):
    config = replace(CONFIG, out=str(tmp_path / "run"))
    scenes = []
    with StopRequest() as stop, Run(config, load, {}) as run:
        for iteration in range(1, 4):
            rollout = run.collect(iteration, stop)
            scenes += [episode.scene for episode in rollout.episodes]
            run.learn(iteration, rollout)
    assert len(set(scenes)) == len(scenes) == 24
    assert {scene.seed for scene in scenes} == {config.train_seed}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"env_id": "toy_env:Nowhere-v0"}, "Nowhere"),
        ({"env_kwargs": '{"wind": 3}'}, "no argument wind; it has seconds, chunk_size, reward"),
        ({"env_kwargs": '{"chunk_size": 5}'}, "chunks do not match"),
        ({"env_id": "toy_env:ToyBare-v0"}, "--task"),
        ({"device": "cuda:99"}, "--device cuda:99"),
    ],
)
def test_bad_input_is_one_line_and_leaves_no_folder(tmp_path, change, message):
    out = tmp_path / "run"
    with pytest.raises(FlowRLError) as error:
        train(replace(CONFIG, out=str(out), **change), load)
    assert message in str(error.value) and "\n" not in str(error.value)
    assert not (out / "last").exists()


def test_environment_without_indices_or_metrics_trains(tmp_path):
    config = replace(
        CONFIG, env_id="toy_env:ToyBare-v0", task="go", out=str(tmp_path / "run"), bootstrap_truncated=True
    )
    lines = read_log(train(config, load))
    assert lines[2]["train_success"] == 1.0 and lines[2]["train_return"] >= 1.0


def test_evaluation_is_repeatable_and_paired(run, tmp_path):
    config = EvalConfig(
        policy=str(run / "last"),
        versus=str(run / "best"),
        env_id=CONFIG.env_id,
        episodes=12,
        workers=3,
        fast=True,
        device="cpu",
        out=str(tmp_path / "eval"),
    )
    out = evaluate(config, load)
    results = json.loads((out / "toy-last" / "eval_results.json").read_text())
    versus = json.loads((out / "versus.json").read_text())
    summary = results["summary"]
    assert [episode["index"] for episode in results["episodes"]] == list(range(12))
    assert summary["successes"] == sum(episode["success"] for episode in results["episodes"])
    assert summary["success"] == summary["successes"] / 12 and summary["ci95"][0] <= summary["success"]
    assert sum(side["episodes"] for side in summary["by"]["side"].values()) == 12
    assert versus["both"] + versus["neither"] + versus["only_policy"] + versus["only_versus"] == 12
    assert versus["paired_difference"] == pytest.approx((versus["only_policy"] - versus["only_versus"]) / 12)

    written = (out / "toy-last" / "eval_results.json").stat().st_mtime_ns
    evaluate(config, load)
    assert (out / "toy-last" / "eval_results.json").stat().st_mtime_ns == written
    with pytest.raises(FlowRLError, match="results with other seed"):
        evaluate(replace(config, seed=1), load)


def test_evaluation_with_the_trained_noise_differs(run, tmp_path):
    config = EvalConfig(
        policy=str(run / "last"), env_id=CONFIG.env_id, episodes=6, workers=3, fast=True, device="cpu"
    )
    distances = []
    for name, noise in (("off", False), ("on", True)):
        out = evaluate(replace(config, noise=noise, out=str(tmp_path / name)), load)
        episodes = json.loads((out / "eval_results.json").read_text())["episodes"]
        distances.append([episode["distance"] for episode in episodes])
    assert distances[0] != distances[1]


def test_names_of_policies_tell_runs_apart():
    assert policy_name("models/chess-tiny") == "chess-tiny"
    assert policy_name("runs/a/best/") == "a-best" and policy_name("runs/b/iter_0010") == "b-iter_0010"
