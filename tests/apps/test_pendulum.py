"""The classic-control example: its controller, its clone, and that training makes it better."""

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch

from flowrl.config import TrainConfig
from flowrl.errors import FlowRLError
from flowrl.policy.loading import load_policy
from flowrl.preset import load_preset, with_preset
from flowrl.train import train

SCRIPT = Path(__file__).parents[2] / "apps/classic_control/pendulum.py"


@pytest.fixture(scope="module")
def pendulum():
    spec = importlib.util.spec_from_file_location("pendulum_example", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def start(pendulum, tmp_path_factory) -> Path:
    """A start policy, cloned in a fifth of the example's steps."""
    out = tmp_path_factory.mktemp("pendulum") / "start"
    return pendulum.main(pendulum.Config(out=str(out), steps=600))


def controlled_return(pendulum, torque: float, episodes: int = 5) -> float:
    env, total = gymnasium.make(pendulum.ENV_ID), 0.0
    for seed in range(episodes):
        observation, _ = env.reset(seed=seed)
        truncated = False
        while not truncated:
            action = np.array([pendulum.control(observation, torque)], dtype=np.float32)
            observation, reward, _, truncated, _ = env.step(action)
            total += float(reward) / episodes
    return total


def test_the_controller_swings_up_late_with_little_torque_and_soon_with_all(pendulum):
    weak, strong = controlled_return(pendulum, 0.5), controlled_return(pendulum, 2.0)
    assert -900 < weak < -300 and -250 < strong < -50  # hanging still costs pi^2 a step, 1974 an episode


def test_the_controller_never_leaves_its_torque(pendulum):
    rng = np.random.default_rng(0)
    torques = [pendulum.control(rng.normal(size=3), 0.5) for _ in range(200)]
    assert max(np.abs(torques)) == 0.5


def test_the_clone_opens_with_its_preset_and_repeats_the_controller(pendulum, start):
    preset = load_preset(str(start))
    assert with_preset(TrainConfig(), preset).env_id == "Pendulum-v1"
    policy = load_policy(start)
    assert policy.spec.chunk_size == pendulum.CHUNK and policy.spec.action_dim == 1
    states, chunks = pendulum.record(pendulum.Config(out="", episodes=2, seed=5))
    x_0 = torch.randn(len(states), pendulum.CHUNK, 1, generator=torch.Generator().manual_seed(0))
    predicted = policy.predict_action_chunk({"agent_pos": states.numpy()}, [""] * len(states), x_0)
    # Half of the torques are +0.5 and half -0.5: a policy that knew nothing of the state would have correlation 0.
    correlation = np.corrcoef(predicted[:, 0, 0].numpy(), chunks[:, 0, 0].numpy())[0, 1]
    assert correlation > 0.7


def test_an_out_folder_that_exists_is_refused(pendulum, tmp_path):
    with pytest.raises(FlowRLError, match="exists; choose another"):
        pendulum.main(pendulum.Config(out=str(tmp_path)))


@pytest.mark.slow
def test_training_takes_off_a_third_of_the_start_policys_cost(pendulum, tmp_path):
    """Three seeds of the example took off half of it in ten iterations (docs/classic_control.md)."""
    start = pendulum.main(pendulum.Config(out=str(tmp_path / "start")))
    config = with_preset(replace(TrainConfig(), policy=str(start)), load_preset(str(start)))
    config = replace(
        config, out=str(tmp_path / "run"), iterations=10, envs=4, val_episodes=40, val_every=10, device="cpu",
        torch_threads=1,
    )  # fmt: skip
    lines = [json.loads(line) for line in (train(config) / "log.jsonl").read_text().splitlines()]
    before, after = lines[0]["val_return"], lines[-1]["val_return"]
    assert -1100 < before < -450
    assert after > 0.7 * before
