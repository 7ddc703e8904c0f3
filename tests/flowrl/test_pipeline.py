"""A whole training depends on its scenes and seeds alone, not on environments, groups, or who is faster."""

import json
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file
from small_smolvla import SMALL, statistics

from flowrl.config import TrainConfig
from flowrl.policy.noise import NoiseModel
from flowrl.policy.tiny import build_smolvla, save_policy_folder
from flowrl.record import TIME_FIELDS
from flowrl.rollout import collect
from flowrl.scenes import fixed_scenes
from flowrl.train import train
from flowrl.vector_env import close_vector_env
from toy import SPEC, ToyPolicy, load_toy, make_toy_groups

CONFIG = TrainConfig(
    policy="none",
    env_id="toy_env:ToyReach-v0",
    iterations=3,
    episodes=9,
    val_episodes=5,
    val_every=3,
    lr=1e-3,
    learn_sigma=True,
    sigma_start=0.4,
    sigma_end=0.1,
    target_kl=1.0,
    minibatch=4,
    bootstrap_truncated=True,
    grad_cosine=True,
    device="cpu",
    torch_threads=1,
)


def results(out: Path) -> tuple[list[dict], dict[str, torch.Tensor]]:
    """The log without its times, and every tensor of the last checkpoint."""
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    log = [{name: value for name, value in line.items() if name not in TIME_FIELDS} for line in lines]
    files = ("model.safetensors", "flowrl.safetensors")
    return log, {f"{file} {key}": t for file in files for key, t in load_file(out / "last" / file).items()}


def assert_equal(a: tuple[list[dict], dict], b: tuple[list[dict], dict]) -> None:
    assert a[0] == b[0]
    assert set(a[1]) == set(b[1])
    assert [key for key in a[1] if not torch.equal(a[1][key], b[1][key])] == []


def test_training_is_the_same_for_any_number_of_environments_and_groups(tmp_path):
    """Two groups of processes, and environments one after the other in this process."""
    runs = []
    for envs, pipeline in ((5, 2), (5, 1), (3, 1), (2, 1), (1, 1)):
        env_id = CONFIG.env_id if pipeline > 1 else "toy_inline:ToyInline-v0"
        out = str(tmp_path / f"{envs}-{pipeline}")
        config = replace(CONFIG, env_id=env_id, envs=envs, pipeline=pipeline, out=out)
        runs.append(results(train(config, lambda path, **_: load_toy(path))))
    assert runs[0][0][2]["kl"] > 0 and runs[0][0][2]["ratio_max_dev"] == 0
    for other in runs[1:]:
        assert_equal(runs[0], other)


def test_training_is_the_same_for_any_number_of_threads(tmp_path, monkeypatch):
    """Parts of a minibatch and of a round in threads of their own, against one after the other."""
    monkeypatch.setattr("flowrl.ppo.CPU_PART", 3)
    runs = []
    for threads in (5, 2, 1):
        out = str(tmp_path / f"{threads}")
        config = replace(
            CONFIG, env_id="toy_inline:ToyInline-v0", envs=7, minibatch=16, torch_threads=threads, out=out
        )
        runs.append(results(train(config, lambda path, **_: load_toy(path))))
    assert runs[0][0][2]["kl"] > 0 and runs[0][0][2]["ratio_max_dev"] == 0
    for other in runs[1:]:
        assert_equal(runs[0], other)


def test_training_of_a_smolvla_is_the_same_for_any_number_of_environments_groups_and_threads(
    tmp_path, monkeypatch
):
    """With images of 128 pixels, 16 tokens: at 4 tokens a batch of two is multiplied by another kernel than one of three."""
    monkeypatch.setattr("flowrl.ppo.CPU_PART", 2)
    folder = tmp_path / "policy"
    policy = build_smolvla(folder / "vlm", size=replace(SMALL, image_size=128), seed=1)
    save_policy_folder(folder, policy, statistics())
    runs = []
    for envs, pipeline, threads in ((4, 2, 1), (4, 1, 2), (3, 1, 1), (2, 1, 1)):
        config = replace(
            CONFIG,
            policy=str(folder),
            env_id="toy_camera_env:ToyArm-v0",
            iterations=1,
            critic_warmup=0,
            episodes=6,
            val_episodes=1,
            lr=1e-5,
            envs=envs,
            pipeline=pipeline,
            torch_threads=threads,
            out=str(tmp_path / f"{envs}-{pipeline}"),
        )
        runs.append(results(train(config)))
    assert runs[0][0][1]["kl"] > 0 and runs[0][0][1]["decisions"] > 6
    for other in runs[1:]:
        assert_equal(runs[0], other)


def test_batches_do_not_depend_on_who_is_faster():
    """Kernels of a GPU depend on the batch: a repeated run must have the same batches, in the same order."""
    vec_envs = make_toy_groups((2, 3), "toy_env:ToyJitter-v0")
    noise = NoiseModel(SPEC, sigma_start=0.5, sigma_end=0.2)
    batches = []
    for _ in range(3):
        rollout = collect(
            ToyPolicy(), vec_envs, fixed_scenes(5, 12), noise, early_stop=False, keep_decisions=True
        )
        assert rollout.decisions is not None
        batches.append([rows.tolist() for rows in rollout.decisions.rounds])
    close_vector_env(vec_envs)
    assert batches[0] == batches[1] == batches[2]
    assert {len(rows) for rows in batches[0]} >= {2, 3}
