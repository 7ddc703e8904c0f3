"""What runs in a worker process of the vector environment."""

import faulthandler
import os
import signal
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import gymnasium
import mujoco
from gymnasium.vector.utils import CloudpickleWrapper, write_to_shared_memory

from chess_env.env import ChessPickEnv

THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def make_single(
    env_class: type[ChessPickEnv], max_episode_steps: int | None, arguments: dict
) -> gymnasium.Env:
    """One environment as a worker runs it."""
    env: gymnasium.Env = env_class(**arguments)
    if max_episode_steps is not None:
        env = gymnasium.wrappers.TimeLimit(env, max_episode_steps)
    return env


def run_worker(
    index: int,
    env_fn: CloudpickleWrapper,
    pipe: Connection,
    shared_memory: Any,
) -> None:
    """Serve one environment until told to close: every command gets one reply, `(ok, result or error)`.

    An exception of the environment is a reply, not the worker's end. Ctrl-C is the parent's affair.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()
    mujoco.set_mju_user_warning(lambda message: None)  # counted by the environment; MuJoCo would write a file
    env = None
    try:
        while True:
            command, data = pipe.recv()
            if command == "close":
                break
            try:
                if env is None:
                    env = env_fn()
                pipe.send((True, _serve(env, index, command, data, shared_memory)))
            except Exception as error:  # noqa: BLE001 - whatever it is, the parent reports it
                summary = f"{type(error).__name__}: {error}"
                pipe.send((False, (summary, traceback.format_exc())))
    except (EOFError, ConnectionError):
        pass  # the parent is gone: nobody is left to tell
    finally:
        if env is not None:
            env.close()


def _serve(env: gymnasium.Env, index: int, command: str, data: Any, shared_memory: Any) -> Any:
    """Execute one command; observations go into shared memory, the rest is returned."""
    if command == "step":
        observation, *rest = env.step(data)
        write_to_shared_memory(env.observation_space, index, observation, shared_memory)
        return tuple(rest)
    if command == "reset":
        observation, info = env.reset(**data)
        write_to_shared_memory(env.observation_space, index, observation, shared_memory)
        return info
    if command == "call":
        name, args, kwargs = data
        attribute = env.get_wrapper_attr(name)
        return attribute(*args, **kwargs) if callable(attribute) else attribute
    if command == "set":
        env.set_wrapper_attr(*data)
        return None
    raise RuntimeError(f"unknown command {command!r}")


@contextmanager
def single_threaded_children() -> Iterator[None]:
    """Let processes started inside have one BLAS thread each: many simulators share the cores."""
    missing = [name for name in THREAD_VARIABLES if name not in os.environ]
    os.environ.update(dict.fromkeys(missing, "1"))
    try:
        yield
    finally:
        for name in missing:
            os.environ.pop(name, None)
