"""Other libraries on the environment as it is: each program of apps/baselines, and the wrappers that they rest on."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch

from chess_env import FlatObservation
from chess_env.env import ChessPickEnv

BASELINES = Path(__file__).parents[2] / "apps" / "baselines"
PROGRAMS = {
    "sb3_sac": ["--steps", "40", "--learning-starts", "20"],
    "ppo": ["--steps", "32", "--num-envs", "2", "--rollout", "8", "--minibatches", "2", "--epochs", "1"],
    "skrl_ppo": ["--steps", "32", "--num-envs", "2", "--rollout", "8", "--minibatches", "2", "--epochs", "1"],
}


@pytest.fixture
def baselines(monkeypatch):
    """Imports a module of apps/baselines."""
    monkeypatch.syspath_prepend(str(BASELINES))
    return importlib.import_module


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
def test_program_trains_a_few_steps_and_reports(program, tmp_path):
    out = tmp_path / "results.json"
    evaluation = ["--eval-episodes", "1", "--out", str(out)]
    result = subprocess.run(
        [sys.executable, str(BASELINES / f"{program}.py"), *PROGRAMS[program], *evaluation],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stderr
    results = json.loads(out.read_text())
    assert results["decisions"] in (32, 40)
    for agent in ("evaluation", "random"):
        assert results[agent]["episodes"] == 1 and results[agent]["successes"] in (0, 1)
    assert results["flags"]["seed"] == 0 and results["task"]["reach"] > 0


def test_increments_move_the_targets_evenly_and_stay_inside_the_limits(baselines):
    pick_task = baselines("pick_task")
    env = pick_task.make_task(pick_task.TaskConfig())
    vector, _ = env.reset()
    assert env.observation_space.contains(vector)
    chunk = []
    inner_step = env.env.step
    env.env.step = lambda action: chunk.append(action) or inner_step(action)
    start = env._target.copy()
    env.step(np.array([1, 0, -0.5, 0, 0, 9], np.float32))
    moves = np.diff(np.vstack([start, chunk[0]]), axis=0)
    assert moves[:, 0] == pytest.approx(1.0, abs=1e-4) and moves[:, 2] == pytest.approx(-0.5, abs=1e-4)
    assert moves[:, 5] == pytest.approx(1.0, abs=1e-4)  # clipped to 1
    for _ in range(30):
        vector, *_ = env.step(np.ones(6, np.float32))
    assert (chunk[-1] <= env.high).all() and env.observation_space.contains(vector)
    env.close()


def test_scenes_are_dealt_out_to_several_environments(baselines):
    pick_task = baselines("pick_task")
    seen = []
    for first in (0, 1):
        env = pick_task.make_task(pick_task.TaskConfig(), first=first, stride=2)
        seen += [env.reset()[1]["index"] for _ in range(3)]
        assert env.reset()[1]["seed"] == 7_700_003
        env.close()
    assert sorted(seen) == list(range(6))


def test_advantages_of_the_single_file_equal_hand_arithmetic(baselines):
    ppo = baselines("ppo")
    gamma, lam = 0.98, 0.95
    rows = {"rewards": [1.0, 0.0, 2.0], "values": [0.5, 0.4, 0.3], "next_values": [0.4, 0.7, 0.6]}
    columns = {name: torch.tensor(values)[:, None] for name, values in rows.items()}
    terminated, done = torch.tensor([[0.0], [0.0], [1.0]]), torch.tensor([[0.0], [1.0], [1.0]])
    advantages = ppo.advantages_of(**columns, terminated=terminated, done=done, lam=lam)[:, 0]
    third = 2.0 - 0.3  # terminated: no value afterwards
    second = (
        0.0 + gamma * 0.7 - 0.4
    )  # truncated: the value of the last observation, nothing of the next episode
    first = 1.0 + gamma * 0.4 - 0.5 + gamma * lam * second
    assert advantages.tolist() == pytest.approx([first, second, third], abs=1e-6)


def test_wilson_interval_at_known_points(baselines):
    interval = baselines("pick_task").wilson_interval
    assert interval(0, 50) == pytest.approx((0.0, 0.0713), abs=1e-4)  # 3.8416 / 53.8416
    assert interval(50, 100) == pytest.approx((0.4038, 0.5962), abs=1e-4)


@pytest.mark.slow
def test_stable_baselines3_sees_both_cameras_as_channels_first():
    sb3 = pytest.importorskip("stable_baselines3")
    env = FlatObservation(ChessPickEnv(image_size=48, distractors=0, chunk_size=5, n_action_steps=5))
    torch.set_num_threads(1)
    model = sb3.PPO("MultiInputPolicy", env, n_steps=8, batch_size=8, n_epochs=1, device="cpu")
    spaces = model.observation_space.spaces
    assert spaces["top"].shape == spaces["wrist"].shape == (3, 48, 48)
    assert (spaces["top"].dtype, spaces["top"].low.min(), spaces["top"].high.max()) == (np.uint8, 0, 255)
    model.learn(8)
    observation, _ = env.reset(seed=0)
    batched = {name: array[None] for name, array in observation.items()}
    tensors, _ = model.policy.obs_to_tensor(batched)
    assert tensors["top"].shape == (1, 3, 48, 48)
    assert torch.equal(tensors["top"][0, :, 4, 9].cpu(), torch.tensor(observation["top"][4, 9]))
    env.close()


@pytest.mark.parametrize("vectorized", [False, True])
def test_skrl_runs_a_random_agent_on_one_and_on_several(vectorized):
    wrap_env = pytest.importorskip("skrl.envs.wrappers.torch").wrap_env
    arguments = {"observation": "state", "distractors": 0}
    if vectorized:
        env = gymnasium.make_vec(
            "chess_env:ChessPickStep-v0", num_envs=2, vectorization_mode="sync", **arguments
        )
        assert isinstance(env, gymnasium.vector.VectorEnv)
    else:
        env = gymnasium.make("chess_env:ChessPickStep-v0", **arguments)
    num_envs = 2 if vectorized else 1
    wrapped = wrap_env(env, wrapper="gymnasium", verbose=False)
    assert wrapped.num_envs == num_envs
    observation, _ = wrapped.reset()
    low, high = torch.tensor(wrapped.action_space.low), torch.tensor(wrapped.action_space.high)
    for _ in range(50):
        action = low + (high - low) * torch.rand(num_envs, 6)
        following, reward, terminated, truncated, _ = wrapped.step(action)
        assert following.shape == observation.shape == (num_envs, observation.shape[1])
        assert reward.shape == terminated.shape == truncated.shape == (num_envs, 1)
    wrapped.close()
