"""A reward, advantage or metric that is not finite ends a run in one line that names it, and leaves what was written."""

import json
from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from toy_inline import InlineVectorEnv

from flowrl.cli import run_program
from flowrl.config import EvalConfig, TrainConfig
from flowrl.episode import Episode
from flowrl.errors import FlowRLError
from flowrl.evaluate import evaluate
from flowrl.finite import check_advantages, check_rewards
from flowrl.policy.critic import Critic
from flowrl.record import Record, empty_line
from flowrl.resume import recorded_config
from flowrl.scenes import Scene
from flowrl.sub_environment import SubEnvironmentMaker
from flowrl.train import train
from toy import load_toy
from toy_env import CHUNK_SIZE, KWARGS, ToyReachEnv

CONFIG = TrainConfig(
    policy="none", env_id="ToySpoilt-v0", iterations=3, envs=3, episodes=8, val_episodes=5, save_every=1, lr=1e-3,
    sigma_start=0.4, sigma_end=0.1, target_kl=1.0, device="cpu", torch_threads=1,
)  # fmt: skip


class SpoiltEnv(ToyReachEnv):
    """The first reward of scene 11 is the one of `reward`, read as a number."""

    def __init__(self, reward: str = "0", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.spoilt = float(reward)

    def step(self, action: np.ndarray) -> tuple[dict, float, bool, bool, dict]:
        observation, reward, *rest = super().step(action)
        return observation, self.spoilt if self.index == 11 and self.decision == 1 else reward, *rest


def make_spoilt(num_envs: int, **kwargs: Any) -> SyncVectorEnv:
    makers = [SubEnvironmentMaker("ToySpoilt-v0", n, kwargs, CHUNK_SIZE, CHUNK_SIZE) for n in range(num_envs)]
    return InlineVectorEnv(makers, autoreset_mode=AutoresetMode.DISABLED)


gymnasium.register(
    "ToySpoilt-v0", entry_point=SpoiltEnv, vector_entry_point=make_spoilt, kwargs={**KWARGS, "reward": "0"}
)


def load(path, *, device, expert_dtype, rename):
    return load_toy(path, device)


def error_line(program, capfd) -> str:
    assert run_program(lambda _: program(), []) == 2
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    return lines[0]


@pytest.mark.parametrize("reward", ["nan", "inf", "-inf"])
def test_a_training_reward_that_is_not_finite_names_its_scene_and_keeps_what_was_written(
    reward, tmp_path, capfd
):
    out = tmp_path / "run"
    config = replace(CONFIG, out=str(out), env_kwargs=json.dumps({"reward": reward}))
    told = error_line(lambda: train(config, load), capfd)
    assert f"reward is {reward} in scene {CONFIG.train_seed}:11, decision 0" in told
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert [line["iteration"] for line in lines] == [0, 1]
    assert (out / "last" / "flowrl.json").is_file() and (out / "iter_0001" / "flowrl.json").is_file()
    again = replace(recorded_config(str(out)), out=str(out), resume=True)
    assert "decision 0" in error_line(
        lambda: train(again, load), capfd
    )  # the run can be resumed, up to there
    assert len((out / "log.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize("fast", [False, True])
def test_an_evaluated_reward_that_is_not_finite_names_its_scene(fast, tmp_path, capfd):
    config = EvalConfig(
        policy="none", env_id="ToySpoilt-v0", env_kwargs='{"reward": "nan"}', episodes=12, workers=3, fast=fast,
        device="cpu", torch_threads=1, out=str(tmp_path / "eval"), seed=5,
    )  # fmt: skip
    assert "reward is nan in scene 5:11, decision 0" in error_line(lambda: evaluate(config, load), capfd)
    assert not (tmp_path / "eval" / "eval_results.json").exists()


def test_rewards_that_overflow_in_their_sum_are_told():
    episode = Episode(0, Scene(3, 4), "", 0, {}, rewards=[1e308, 1e308])
    with pytest.raises(FlowRLError, match="scene 3:4 are too large"):
        check_rewards([episode])
    check_rewards([replace(episode, rewards=[1e308, -1e308])])


def test_a_diverged_critic_is_told_with_the_scene_and_changes_nothing(tmp_path, capfd, monkeypatch):
    real = Critic.forward

    def diverges(self, features):
        values = real(self, features)
        return values.index_fill(0, torch.tensor([2]), float("inf")) if len(values) > 8 else values

    monkeypatch.setattr(Critic, "forward", diverges)
    told = error_line(lambda: train(replace(CONFIG, out=str(tmp_path / "run")), load), capfd)
    assert f"the first in scene {CONFIG.train_seed}:0:" in told and "--critic-lr" in told
    assert len((tmp_path / "run" / "log.jsonl").read_text().splitlines()) == 1


def test_the_scene_of_an_advantage_is_that_of_its_episode():
    episodes = [Episode(number, Scene(1, 7 + number), "", 0, {}) for number in range(2)]
    with pytest.raises(FlowRLError, match=r"1 of 3 advantages .* scene 1:8"):
        check_advantages(np.array([0.0, 1.0, np.nan]), np.array([0, 0, 1]), episodes)
    check_advantages(np.zeros(3), np.array([0, 0, 1]), episodes)


def test_a_value_of_the_log_that_is_not_finite_is_named_and_not_written(tmp_path):
    record = Record(tmp_path / "run", {})
    record.log(empty_line(0, {}))
    with pytest.raises(FlowRLError, match="val_distance inf of iteration 1 is not finite"):
        record.log(empty_line(1, {}) | {"val_distance": float("inf")})
    record.close()
    assert len((tmp_path / "run" / "log.jsonl").read_text().splitlines()) == 1
