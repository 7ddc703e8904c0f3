"""Vector environments, ours and other people's: equal results, autoreset modes, start methods, and failures."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from gymnasium.wrappers.vector import RecordEpisodeStatistics

from chess_env.env import ChessPickEnv
from chess_env.errors import OptionError, WorkerError
from chess_episodes import expert_chunks

STATE = {"observation": "state", "distractors": (0, 3)}
SMALL = {"image_size": 32, "distractors": (0, 3)}


def make_one(arguments):
    """A function that makes one environment, picklable by every start method."""
    return lambda: gymnasium.make("chess_env:ChessPick-v0", **arguments)


def make_ours(num_envs, **arguments):
    return gymnasium.make_vec("chess_env:ChessPick-v0", num_envs=num_envs, **{**STATE, **arguments})


def hold(observation):
    return np.repeat(observation["agent_pos"][:, None], 50, axis=1)


def rollout(envs, num_steps=2):
    """Everything that a few steps return, one entry a step, as comparable bytes."""
    observation, info = envs.reset(seed=17)
    record = [(observation["agent_pos"].tobytes(), info["square"].tolist(), info["torch_seed"].tolist())]
    for step in range(num_steps):
        observation, reward, terminated, truncated, info = envs.step(hold(observation) + np.float32(step + 1))
        images = [observation["pixels"][name].tobytes() for name in ("top", "wrist")]
        record.append(
            (
                observation["agent_pos"].tobytes(),
                images,
                reward.tolist(),
                terminated.tolist(),
                truncated.tolist(),
                info["num_executed_frames"].tolist(),
                info["is_success"].tolist(),
                {name: values.tolist() for name, values in info["reward_terms"].items()},
            )
        )
    envs.close()
    return record


def test_ours_and_gymnasiums_sync_and_async_are_equal_with_every_start_method():
    functions = [make_one(SMALL)] * 2
    expected = rollout(SyncVectorEnv(functions))
    assert rollout(AsyncVectorEnv(functions, context="forkserver")) == expected
    for context in ("forkserver", "spawn"):
        ours = gymnasium.make_vec("chess_env:ChessPick-v0", num_envs=2, context=context, **SMALL)
        assert rollout(ours) == expected


FORK = """
import gymnasium, numpy as np
from gymnasium.vector import AsyncVectorEnv
arguments = {"image_size": 32, "distractors": 0}
parent = gymnasium.make("chess_env:ChessPick-v0", **arguments)  # made here, never rendered here
envs = AsyncVectorEnv([lambda: gymnasium.make("chess_env:ChessPick-v0", **arguments)] * 2, context="fork")
observation, _ = envs.reset(seed=3)
envs.close()
same, _ = parent.reset(seed=4)
print(np.array_equal(observation["pixels"]["top"][1], same["pixels"]["top"]))
"""


def test_forked_workers_of_a_parent_that_made_an_environment_render():
    result = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, timeout=120)
    assert result.stdout.strip() == "True", result.stderr


@pytest.mark.slow  # its process imports torch
def test_stable_baselines3s_processes_know_the_environment():
    vec_env = pytest.importorskip("stable_baselines3.common.vec_env")
    envs = vec_env.SubprocVecEnv([make_one(STATE)], start_method="forkserver")
    envs.seed(17)
    observation = envs.reset()
    expected = SyncVectorEnv([make_one(STATE)])
    assert np.array_equal(observation["agent_pos"], expected.reset(seed=17)[0]["agent_pos"])
    envs.close()
    expected.close()


# -- episodes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP, AutoresetMode.DISABLED])
def test_the_experts_success_arrives_in_every_autoreset_mode(mode):
    alone = ChessPickEnv(**STATE)
    envs = SyncVectorEnv([make_one(STATE)], autoreset_mode=mode)
    successes = []
    envs.reset(seed=21)
    for index in range(2):
        alone.reset(seed=21, options={"index": index})
        for chunk in expert_chunks(alone):
            single = alone.step(chunk)
            _, reward, terminated, _, info = envs.step(chunk[None])
            if terminated[0]:
                break
        last = info["final_info"] if mode is AutoresetMode.SAME_STEP else info
        assert single[2] and terminated[0] and reward[0] == 1.0
        assert last["episode_metrics"]["frames"][0] == single[4]["episode_metrics"]["frames"]
        successes.append(bool(last["is_success"][0]))
        if mode is AutoresetMode.NEXT_STEP:  # the step after an end resets, whatever the action
            _, reward, terminated, _, info = envs.step(chunk[None])
            assert reward[0] == 0.0 and not terminated[0]
        elif mode is AutoresetMode.DISABLED:
            info = envs.reset(options={"reset_mask": np.array([True])})[1]
        assert info["index"].tolist() == [index + 1]
    assert successes == [True, True]
    alone.close()
    envs.close()


def test_length_and_return_stay_the_same_episode_after_episode():
    envs = RecordEpisodeStatistics(make_ours(2, seconds=4.0))
    everyone = np.ones(2, np.bool_)
    observation, _ = envs.reset(seed=3)
    for _ in range(3):
        lengths = 0
        done = ~everyone
        while not done.any():
            observation, _, terminated, truncated, info = envs.step(hold(observation))
            done = terminated | truncated
            lengths += 1
        assert lengths == 3 and done.all()
        assert info["episode"]["l"].tolist() == [3, 3] and info["episode"]["r"].tolist() == [0.0, 0.0]
        observation, _ = envs.reset(options={"reset_mask": everyone.copy()})
    envs.close()


def test_bare_resets_continue_the_same_sequence_of_scenes_each_time_and_in_any_vector():
    ours, others = make_ours(2), SyncVectorEnv([make_one(STATE)] * 2)
    sequences = []
    for envs in (ours, ours, others):
        scenes = [envs.reset(seed=40)]
        scenes += [envs.reset() for _ in range(3)]
        sequences.append([observation["environment_state"].tobytes() for observation, _ in scenes])
    ours.close()
    others.close()
    assert sequences[0] == sequences[1] == sequences[2]
    assert len(set(sequences[0])) == 4


def test_twelve_scenes_are_twelve_starts_whatever_the_number_of_environments():
    starts = {}
    for num_envs in (1, 3):
        envs = make_ours(num_envs)
        rows = []
        for first in range(0, 12, num_envs):
            indices = np.arange(first, first + num_envs)
            observation, _ = envs.reset(seed=[5] * num_envs, options={"index": indices})
            rows += [row.tobytes() for row in observation["environment_state"]]
        starts[num_envs] = rows
        envs.close()
    assert starts[1] == starts[3]
    assert len(set(starts[1])) == 12


def test_environments_without_a_seed_differ_and_say_which_they_drew():
    envs = make_ours(2)
    observation, info = envs.reset()
    assert len(set(info["seed"].tolist())) == 2
    again, _ = envs.reset(seed=info["seed"].tolist())
    assert np.array_equal(observation["environment_state"], again["environment_state"])
    envs.close()


def test_sampled_actions_are_reproducible():
    envs = make_ours(2)
    draws = []
    for _ in range(2):
        envs.action_space.seed(9)
        draws.append(envs.action_space.sample())
    assert np.array_equal(*draws)
    envs.close()


# -- processes ---------------------------------------------------------------------------------------------------------


def test_made_stepped_and_closed_three_times_leaves_no_process():
    processes = []
    for _ in range(3):
        envs = make_ours(1, seconds=100.0)
        observation, _ = envs.reset(seed=1)
        for _ in range(5):
            observation, *_ = envs.step(hold(observation))
        processes += envs.unwrapped.processes
        envs.close()
        envs.close()
    assert len(processes) == 3 and not any(process.is_alive() for process in processes)


def test_closing_with_a_step_or_a_reset_pending_returns():
    for pending in ("step", "reset"):
        envs = make_ours(2)
        observation, _ = envs.reset(seed=1)
        if pending == "step":
            envs.step_async(hold(observation))
        else:
            envs.reset_async(seed=2)
        envs.close()
        assert not any(process.is_alive() for process in envs.unwrapped.processes)


THREADS = """
import gymnasium, os
def main():
    envs = gymnasium.make_vec("chess_env:ChessPick-v0", num_envs=2, observation="state", context="CONTEXT")
    envs.reset(seed=0)
    print(*[len(os.listdir(f"/proc/{p.pid}/task")) for p in envs.unwrapped.processes])
    envs.close()
if __name__ == "__main__":
    main()
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc")
@pytest.mark.parametrize("context", ["forkserver", "spawn"])
def test_a_worker_has_one_thread(context, tmp_path):
    """NumPy's BLAS starts its threads when it is imported: in a spawned worker, but not in a child of the fork server."""
    script = tmp_path / "script.py"
    script.write_text(THREADS.replace("CONTEXT", context))
    environment = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    result = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=120, env=environment
    )
    assert result.stdout.split() == ["1", "1"], result.stderr


@pytest.mark.parametrize("call", ["reset", "step"])
@pytest.mark.parametrize("fault", ["dies", "raises", "hangs"])
def test_failed_worker_is_named_in_time_and_the_same_scenes_run_again_in_new_ones(call, fault):
    indices = {"index": np.array([4, 7])}
    envs = make_ours(2, worker_timeout=60.0)
    before, _ = envs.reset(seed=[5, 5], options=indices)
    process = envs.unwrapped.processes[1]
    config = envs.get_attr("config")[1]
    if fault == "raises":
        envs.set_attr("config", [config, None])
    else:
        os.kill(process.pid, signal.SIGKILL if fault == "dies" else signal.SIGSTOP)
    timeout = 4.0 if fault == "hangs" else None
    message = {
        "dies": r"worker 1 died \(killed by SIGKILL",
        "raises": "worker 1 raised AttributeError",
        "hangs": "worker 1 did not answer within 4 s",
    }
    doing = "resetting to seed 5, index 7" if call == "reset" else "stepping"
    begin = time.monotonic()
    with pytest.raises(WorkerError, match=f"{message[fault]}.*while {doing}") as caught:
        if call == "reset":
            envs.reset_async(seed=[5, 5], options=indices)
            envs.reset_wait(timeout=timeout)
        else:
            envs.step_async(hold(before))
            envs.step_wait(timeout=timeout)
    assert caught.value.indices == (1,)
    assert time.monotonic() - begin < 60.0
    envs.close()
    assert not any(process.is_alive() for process in envs.unwrapped.processes)

    fresh = make_ours(1)
    again, _ = fresh.reset(seed=[5], options={"index": 7})
    assert np.array_equal(again["environment_state"][0], before["environment_state"][1])
    fresh.step(hold(again))
    fresh.close()


RAISES = """
import gymnasium
def main():
    envs = gymnasium.make_vec("chess_env:ChessPick-v0", num_envs=2, observation="state")
    envs.reset(seed=0)
    print(*[process.pid for process in envs.unwrapped.processes], flush=True)
    envs.step_async(envs.action_space.sample())
    raise RuntimeError("of the training loop")
if __name__ == "__main__":
    main()
"""


def test_exception_in_the_main_loop_ends_the_program_and_its_workers(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(RAISES)
    result = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60)
    assert result.returncode == 1
    assert result.stderr.strip().endswith("RuntimeError: of the training loop")
    for pid in result.stdout.split():
        assert not Path(f"/proc/{pid}").exists()


def test_reset_mask_of_nobody_is_refused_and_nothing_moves():
    envs = make_ours(2)
    observation, _ = envs.reset(seed=1)
    with pytest.raises(OptionError, match="at least one True"):
        envs.reset(options={"reset_mask": np.zeros(2, np.bool_)})
    envs.step(hold(observation))
    assert envs.call("num_frames") == (50, 50)
    envs.close()
