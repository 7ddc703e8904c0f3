"""Environments in worker processes: the same scenes as one alone, no work for idle ones, named errors and no hang."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError
from gymnasium.vector import AsyncVectorEnv, AutoresetMode
from python_process import run_python

from chess_env.env import ChessPickEnv
from chess_env.errors import ActionError, ChessEnvError, ConfigError, EpisodeError, OptionError, WorkerError
from chess_env.expert import Expert
from chess_env.opengl import choose_backend, choose_egl_device
from chess_env.so101 import to_units

SMALL = {"image_size": 48, "seconds": 4.0}  # three chunks: 50, 50 and 20 frames


def make(num_envs, **arguments):
    return gymnasium.make_vec("chess_env:ChessPick-v0", num_envs=num_envs, **{**SMALL, **arguments})


@pytest.fixture(scope="module")
def envs():
    """Three environments, reset by each test."""
    made = make(3)
    yield made
    made.close()


def hold(observation):
    return np.repeat(observation["agent_pos"][:, None], 50, axis=1)


def mask(*values):
    return np.array(values, np.bool_)


def same_observation(one, i, other, j):
    return (
        np.array_equal(one["agent_pos"][i], other["agent_pos"][j])
        and np.array_equal(one["pixels"]["top"][i], other["pixels"]["top"][j])
        and np.array_equal(one["pixels"]["wrist"][i], other["pixels"]["wrist"][j])
    )


def test_make_vec_gives_an_async_vector_env_without_autoreset(envs):
    assert isinstance(envs.unwrapped, AsyncVectorEnv)
    assert envs.metadata["autoreset_mode"] is AutoresetMode.DISABLED
    assert envs.action_space.shape == (3, 50, 6)
    observation, info = envs.reset(seed=7)
    assert envs.observation_space.contains(observation)
    assert info["seed"].tolist() == [7, 8, 9] and info["index"].tolist() == [0, 0, 0]
    assert len({image.tobytes() for image in observation["pixels"]["top"]}) == 3


def test_scenes_are_bit_equal_alone_and_in_any_number_of_workers_and_order(envs):
    indices, order = [4, 9, 2], [2, 0, 1]
    three, info = envs.reset(seed=[50] * 3, options={"index": np.array(indices)})
    three_next, *_ = envs.step(hold(three) + np.float32(3))
    shuffled, _ = envs.reset(seed=[50] * 3, options={"index": np.array(indices)[order]})
    shuffled_next, *_ = envs.step(hold(shuffled) + np.float32(3))
    for place, origin in enumerate(order):
        assert same_observation(shuffled, place, three, origin)
        assert same_observation(shuffled_next, place, three_next, origin)

    alone, one = ChessPickEnv(**SMALL), make(1)
    for i, index in enumerate(indices):
        single, single_info = alone.reset(seed=50, options={"index": index})
        batch, _ = one.reset(seed=[50], options={"index": np.array([index])})
        batch_next, *_ = one.step(hold(batch) + np.float32(3))
        chunk = np.repeat(single["agent_pos"][None], 50, axis=0) + np.float32(3)
        single_next = alone.step(chunk)[0]
        for batched, single_one, place in ((three, single, i), (three_next, single_next, i)):
            as_batch = {
                "agent_pos": single_one["agent_pos"][None],
                "pixels": {name: image[None] for name, image in single_one["pixels"].items()},
            }
            assert same_observation(batched, place, as_batch, 0)
        assert same_observation(batch, 0, three, i) and same_observation(batch_next, 0, three_next, i)
        assert single_info["torch_seed"] == info["torch_seed"][i]
    alone.close()
    one.close()


def test_masked_reset_touches_only_the_chosen_ones(envs):
    first, _ = envs.reset(seed=1)
    after_step, *_ = envs.step(hold(first))
    options = {"reset_mask": mask(0, 1, 0), "index": np.array([0, 6, 0]), "early_stop": True}
    before = dict(options)
    observation, info = envs.reset(seed=[None, 33, None], options=options)
    assert options == before
    assert info["_seed"].tolist() == [False, True, False]
    assert (info["seed"][1], info["index"][1]) == (33, 6)
    assert envs.call("num_frames") == (50, 0, 50)
    for i in (0, 2):
        assert same_observation(observation, i, after_step, i)
    assert not same_observation(observation, 1, after_step, 1)


def test_finished_environments_receive_nothing_and_cost_nothing(envs):
    observation, _ = envs.reset(seed=1)
    envs.step(hold(observation))
    envs.reset(options={"reset_mask": mask(0, 1, 0)})
    for _ in range(2):
        observation, reward, terminated, truncated, info = envs.step(hold(observation))
    assert truncated.tolist() == [True, False, True] and not terminated.any()
    assert info["_episode_metrics"].tolist() == [True, False, True]
    assert info["episode_metrics"]["frames"].tolist() == [120, 0, 120]
    assert info["episode_metrics"]["close_lateral_mm"][0] is None

    actions = hold(observation)
    actions[[0, 2]] = np.nan  # nobody reads them
    after, reward, terminated, truncated, info = envs.step(actions)
    assert truncated.tolist() == [True, True, True]
    assert info["_is_success"].tolist() == [False, True, False]
    assert reward.tolist() == [0.0, 0.0, 0.0]
    assert envs.call("num_frames") == (120, 120, 120)
    assert same_observation(after, 0, observation, 0) and same_observation(after, 2, observation, 2)
    with pytest.raises(EpisodeError, match="every environment has finished"):
        envs.step(actions)


def test_observations_are_copies(envs):
    first, _ = envs.reset(seed=1)
    kept = first["pixels"]["top"].copy()
    envs.reset(seed=2)
    assert np.array_equal(first["pixels"]["top"], kept)


def test_expert_episode_equals_the_one_of_a_single_environment(envs):
    alone = ChessPickEnv(**{**SMALL, "observation": "state"})
    alone.reset(seed=21, options={"check_expert": True})
    plan = Expert(alone.simulation.scene).plan(
        alone.simulation.data, alone.simulation.target_slot, np.random.default_rng(0)
    )
    chunks = np.concatenate([to_units(plan), np.repeat(to_units(plan[-1:]), 150 - len(plan), 0)])
    chunks = chunks.astype(np.float32).reshape(3, 50, 6)
    _, reset_info = envs.reset(seed=[21] * 3, options={"check_expert": True})
    assert reset_info["expert_ok"].tolist() == [True] * 3
    for chunk in chunks:
        single = alone.step(chunk)
        *_, terminated, _, info = envs.step(np.repeat(chunk[None], 3, axis=0))
        if single[2]:
            break
    assert terminated.all() and info["is_success"].all()
    expected = single[4]["episode_metrics"]
    metrics = info["episode_metrics"]
    for name, value in expected.items():
        assert metrics[name].tolist() == [value] * 3, name
    alone.close()


def test_wrong_calls_are_refused_and_leave_the_environments_usable(envs):
    observation, _ = envs.reset(seed=1)
    with pytest.raises(OptionError, match="unknown reset option 'piece'"):
        envs.reset(options={"piece": "pawn"})
    with pytest.raises(OptionError, match="index has shape"):
        envs.reset(options={"index": np.array([1, 2])})
    with pytest.raises(OptionError, match="reset_mask"):
        envs.reset(options={"reset_mask": [True, False, False]})
    with pytest.raises(OptionError, match="at least one True"):
        envs.reset(options={"reset_mask": mask(0, 0, 0)})
    with pytest.raises(OptionError, match="2 seeds for 3"):
        envs.reset(seed=[1, 2])
    with pytest.raises(ActionError, match=r"\(3, 50, 6\) is needed"):
        envs.step(hold(observation)[:2])
    actions = hold(observation)
    actions[1, 2, 3] = np.nan
    with pytest.raises(ActionError, match=r"nan at \(1, 2, 3\)"):
        envs.step(actions)
    with pytest.raises(ConfigError, match="bypass the bookkeeping"):
        envs.call("reset")
    envs.step_async(hold(observation))
    with pytest.raises(AlreadyPendingCallError):
        envs.reset()
    envs.step_wait()
    assert envs.call("num_frames") == (50, 50, 50)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"context": "fork"}, "allowed are 'forkserver', 'spawn'"),
        ({"autoreset_mode": "NextStep"}, "only Disabled is supported"),
        ({"num_envs": 0}, "num_envs=0"),
        ({"image_size": 1}, "image_size=1"),
        ({"colour": "red"}, "unexpected keyword argument 'colour'"),
    ],
)
def test_wrong_argument_is_refused_before_any_process_starts(arguments, message):
    with pytest.raises(ConfigError, match=message):
        make(**{"num_envs": 2, **arguments})


def test_steps_before_the_first_reset_are_refused():
    fresh = make(1)
    with pytest.raises(EpisodeError, match="needs a reset"):
        fresh.step(np.zeros((1, 50, 6), np.float32))
    fresh.close()
    fresh.close()
    with pytest.raises(ClosedEnvironmentError):
        fresh.reset()


def test_killed_worker_is_named_and_can_be_restarted():
    envs = make(2, worker_timeout=20.0)
    before, _ = envs.reset(seed=[5, 5], options={"index": np.array([0, 1])})
    os.kill(envs.unwrapped.processes[1].pid, signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(WorkerError, match=r"worker 1 died \(killed by SIGKILL.*while stepping") as caught:
        envs.step(hold(before))
    assert time.monotonic() - started < 20.0
    assert caught.value.indices == (1,) and "\n" not in str(caught.value)
    with pytest.raises(WorkerError, match="worker 1 is dead: call restart_workers"):
        envs.step(hold(before))
    assert envs.unwrapped.restart_workers() == (1,)
    again, _ = envs.reset(
        seed=[5, 5], options={"reset_mask": mask(0, 1), "index": np.array([0, 1])}
    )  # the scene is a pure function
    assert same_observation(again, 1, before, 1)
    assert envs.call("num_frames") == (50, 0)
    os.kill(envs.unwrapped.processes[0].pid, signal.SIGKILL)  # while idle, found at the next call
    envs.close()
    assert not any(process.is_alive() for process in envs.unwrapped.processes)


def test_worker_that_hangs_is_named_within_the_timeout():
    envs = make(2)
    observation, _ = envs.reset(seed=5)
    os.kill(envs.unwrapped.processes[0].pid, signal.SIGSTOP)
    envs.step_async(hold(observation))
    with pytest.raises(WorkerError, match=r"worker 0 did not answer within 8 s \(while stepping\)"):
        envs.step_wait(timeout=8)
    envs.close()
    assert not any(process.is_alive() for process in envs.unwrapped.processes)


def test_exception_in_a_worker_is_raised_with_its_own_message_and_the_rest_goes_on():
    envs = make(2)
    before, _ = envs.reset(seed=5)
    config = envs.get_attr("config")[0]
    envs.set_attr("config", [config, None])
    with pytest.raises(
        WorkerError, match=r"worker 1 raised AttributeError: 'NoneType'.*while stepping"
    ) as caught:
        envs.step(hold(before))
    assert caught.value.indices == (1,)
    assert "Traceback" in caught.value.__notes__[0]
    with pytest.raises(EpisodeError, match="environment 1 needs a reset"):
        envs.step(hold(before))
    envs.set_attr("config", config)
    envs.reset(options={"reset_mask": mask(0, 1)})
    envs.step(hold(before))
    with pytest.raises(WorkerError, match="has no attribute 'nonsense'"):
        envs.call("nonsense")
    envs.step(hold(before))  # a wrong call harms no episode
    envs.close()


def test_single_target_variant_and_spawn():
    envs = gymnasium.make_vec(
        "chess_env:ChessPickStep-v0", num_envs=1, observation="state", context="spawn", max_episode_steps=2
    )
    observation, _ = envs.reset(seed=0)
    assert envs.action_space.shape == (1, 6)
    assert [envs.step(observation["agent_pos"])[3][0] for _ in range(2)] == [False, True]
    envs.close()


def test_gymnasiums_own_vector_environments_run_it_too():
    for mode in ("sync", "async"):
        envs = gymnasium.make_vec(
            "chess_env:ChessPick-v0",
            num_envs=2,
            vectorization_mode=mode,
            vector_kwargs={"context": "spawn"} if mode == "async" else {},
            **SMALL,
        )
        observation, _ = envs.reset(seed=7)
        alone = ChessPickEnv(**SMALL)
        single, _ = alone.reset(seed=8)
        assert np.array_equal(observation["pixels"]["top"][1], single["pixels"]["top"])
        envs.step(hold(observation))
        alone.close()
        envs.close()


SCRIPT = """
import gymnasium, mujoco, os, sys
def main():
    envs = gymnasium.make_vec("chess_env:ChessPick-v0", num_envs=2, image_size=32)
    envs.reset(seed=0)
    envs.step(envs.action_space.sample())
    {ending}
if __name__ == "__main__":
    main()
"""


def test_parent_opens_no_opengl_and_ends_without_a_word(tmp_path):
    ending = (
        "from chess_env import rendering; egl = sys.modules.get('mujoco.egl'); "
        "print(len(rendering._open), egl is None or egl.EGL_DISPLAY is None)"
    )
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(ending=ending))
    result = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stdout.strip(), result.stderr) == (0, "0 True", "")


def test_workers_end_with_a_killed_parent(tmp_path):
    ending = "print(*[p.pid for p in envs.unwrapped.processes], flush=True); os.kill(os.getpid(), 9)"
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(ending=ending))
    result = subprocess.run([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, timeout=120)
    pids = [int(word) for word in result.stdout.split()]
    assert len(pids) == 2
    deadline = time.monotonic() + 20
    while any(is_running(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(is_running(pid) for pid in pids)


def test_ctrl_c_ends_everything_with_one_traceback(start_script, tmp_path):
    ending = "print('ready', flush=True); [envs.step(envs.action_space.sample()) for _ in iter(int, 1) if envs.reset()]"
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(ending=ending))
    program = start_script(script)
    assert program.stdout is not None and program.stdout.readline().strip() == "ready"
    os.killpg(program.pid, signal.SIGINT)  # as a terminal does
    _, errors = program.communicate(timeout=30)
    assert program.returncode != 0
    assert errors.count("Traceback") == 1 and errors.strip().endswith("KeyboardInterrupt")


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(
    ("environ", "num_devices", "device"),
    [
        ({}, 8, None),
        ({"LOCAL_RANK": "1"}, 8, "1"),
        ({"LOCAL_RANK": "1"}, 1, "0"),  # the software renderer of a machine without a GPU
        ({"LOCAL_RANK": "1"}, 0, None),
        ({"LOCAL_RANK": "1", "MUJOCO_EGL_DEVICE_ID": "0"}, 8, None),
        ({"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": "3"}, 8, "0"),
        ({"LOCAL_RANK": "1", "CUDA_VISIBLE_DEVICES": "3"}, 8, "0"),
        ({"LOCAL_RANK": "1", "CUDA_VISIBLE_DEVICES": "GPU-aa,GPU-bb"}, 8, "1"),
        ({"LOCAL_RANK": "3", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}, 2, "1"),
    ],
)
def test_each_rank_renders_on_a_visible_device_of_its_own(environ, num_devices, device):
    assert choose_egl_device(environ, num_devices) == device


def test_every_rank_renders_on_a_machine_with_fewer_devices_than_ranks():
    code = """
import gymnasium
env = gymnasium.make("chess_env:ChessPick-v0", image_size=32, distractors=0)
print(env.reset(seed=0)[0]["pixels"]["top"].std() > 10)
"""
    result = run_python(code, LOCAL_RANK="50")
    assert (result.stdout.strip(), result.stderr) == ("True", "")


def test_opengl_backend_follows_the_variable_and_defaults_to_egl_on_linux():
    assert choose_backend({}, "linux") == "egl"
    assert choose_backend({"MUJOCO_GL": "OSMesa"}, "linux") == "osmesa"
    assert choose_backend({}, "darwin") == "native"
    with pytest.raises(ChessEnvError, match="allowed are egl, osmesa, glfw"):
        choose_backend({"MUJOCO_GL": "vulkan"}, "linux")


def test_default_backend_needs_no_variable_and_no_display():
    code = """
import gymnasium
env = gymnasium.make("chess_env:ChessPick-v0", image_size=32)
print(env.reset(seed=0)[0]["pixels"]["top"].std() > 10)
"""
    result = run_python(code, MUJOCO_GL="", DISPLAY="", WAYLAND_DISPLAY="")
    assert (result.stdout.strip(), result.stderr) == ("True", "")
