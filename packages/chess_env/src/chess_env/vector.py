"""Environments in worker processes: Gymnasium's AsyncVectorEnv contract, with named errors in place of hangs.

Autoreset is disabled. A finished environment receives nothing until it is reset through
`reset(options={"reset_mask": ...})`, so it costs nothing while the others run.
"""

import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any

import gymnasium
import numpy as np
from gymnasium.error import AlreadyPendingCallError, NoAsyncCallError
from gymnasium.vector import AsyncVectorEnv, AutoresetMode
from gymnasium.vector.async_vector_env import AsyncState
from gymnasium.vector.utils import (
    CloudpickleWrapper,
    batch_space,
    create_shared_memory,
    read_from_shared_memory,
    write_to_shared_memory,
)

from chess_env.chunk import check_actions
from chess_env.env import ChessPickEnv, ChessPickStepEnv, check_options
from chess_env.errors import ConfigError, EpisodeError, OptionError, WorkerError

CONTEXTS = ("forkserver", "spawn")  # never fork: a forked child inherits locks, threads and GPU handles
PER_ENV_OPTIONS = ("index", "early_stop", "check_expert")
CLOSE_TIMEOUT_S = 5.0
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
def _single_threaded_children() -> Iterator[None]:
    """Let processes started inside have one BLAS thread each: many simulators share the cores."""
    missing = [name for name in THREAD_VARIABLES if name not in os.environ]
    os.environ.update(dict.fromkeys(missing, "1"))
    try:
        yield
    finally:
        for name in missing:
            os.environ.pop(name, None)


class ChessPickVectorEnv(AsyncVectorEnv):
    """`num_envs` chess environments, each in its own process; `gymnasium.make_vec("ChessPick-v0", num_envs=n)`.

    - **Observations** are `single_observation_space` with a leading axis (num_envs,), copies of shared memory.
    - **step(actions)**: actions of shape (num_envs, chunk_size, 6). Environments whose episode has ended are skipped:
      reward 0, `terminated`/`truncated` as at their end, the last observation, no info. When all have ended, it is an
      error.
    - **reset(seed=..., options=...)**: `seed` is an int (environment i gets seed + i) or a list; options may hold
      `reset_mask` (bool, shape (num_envs,)) and, as a value for all or an array of shape (num_envs,), `index`,
      `early_stop` and `check_expert`. The caller's dict is never changed.
    - **Errors**: an exception in a worker is raised here as `WorkerError` with the worker's own message; that
      environment then needs a reset and the others go on. A worker that dies or does not answer within
      `worker_timeout` seconds is a `WorkerError` too: `restart_workers()`, or close and make a new one, and repeat the
      episodes, since a scene is a function of (seed, index) alone. `close()` always returns.

    The start methods are forkserver (default) and spawn, so a script needs the `if __name__ == "__main__":` guard.

    Args:
        num_envs: Number of environments and processes.
        context: "forkserver" or "spawn".
        worker_timeout: Longest wait for one answer of a worker [s].
        copy: Return copies of the observations (False: views that the next call overwrites).
        max_episode_steps: Truncate after this many steps, as `gymnasium.make` does.
        arguments: Those of `ChessPickEnv`.

    Raises:
        ConfigError: An argument is outside what is allowed.
    """

    env_class: type[ChessPickEnv] = ChessPickEnv

    def __init__(
        self,
        num_envs: int = 1,
        *,
        context: str = "forkserver",
        worker_timeout: float = 120.0,
        copy: bool = True,
        max_episode_steps: int | None = None,
        autoreset_mode: str | AutoresetMode = AutoresetMode.DISABLED,
        **arguments: Any,
    ) -> None:
        # The parent's constructor is not called: it hides the shared buffer and ties the worker to its own protocol.
        if not isinstance(num_envs, (int, np.integer)) or num_envs < 1:
            raise ConfigError(f"num_envs={num_envs!r}: a whole number of at least 1 is needed")
        if context not in CONTEXTS:
            raise ConfigError(f"context={context!r}: allowed are {', '.join(map(repr, CONTEXTS))}")
        if AutoresetMode(autoreset_mode) is not AutoresetMode.DISABLED:
            raise ConfigError(
                f"autoreset_mode={autoreset_mode!r}: only Disabled is supported, reset with options={{'reset_mask': ...}}; "
                "make_vec(..., vectorization_mode='async') gives Gymnasium's own"
            )
        env_fn = partial(make_single, self.env_class, max_episode_steps, arguments)
        self.env_fns: Sequence[Callable[[], gymnasium.Env]] = [env_fn] * int(num_envs)
        self.num_envs = int(num_envs)
        self.worker_timeout = worker_timeout
        self.shared_memory, self.copy, self.daemon = True, copy, True
        self.context = context
        self.autoreset_mode = AutoresetMode.DISABLED

        template = env_fn()  # a wrong argument is reported here, before any process starts
        self.metadata = {**template.metadata, "autoreset_mode": self.autoreset_mode}
        self.render_mode = template.render_mode
        self.single_observation_space = template.observation_space
        self.single_action_space = template.action_space
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        template.close()

        self._context = get_context(context)
        self._buffer = create_shared_memory(self.single_observation_space, n=self.num_envs, ctx=self._context)
        self.observations = read_from_shared_memory(
            self.single_observation_space, self._buffer, n=self.num_envs
        )
        self._pending: tuple[int, ...] = ()
        self._needs_reset = np.ones(self.num_envs, np.bool_)
        self._terminated = np.zeros(self.num_envs, np.bool_)
        self._truncated = np.zeros(self.num_envs, np.bool_)
        self._dead: set[int] = set()
        self._doing = ["starting"] * self.num_envs
        self.parent_pipes: list[Connection] = []
        self.processes: list[Any] = []
        self._state = AsyncState.DEFAULT
        for index in range(self.num_envs):
            process, pipe = self._start_worker(index)
            self.processes.append(process)
            self.parent_pipes.append(pipe)

    # -- processes ---------------------------------------------------------------------------------------------------

    def _start_worker(self, index: int) -> tuple[Any, Connection]:
        parent_pipe, child_pipe = self._context.Pipe()
        process = self._context.Process(  # type: ignore[attr-defined]
            target=run_worker,
            name=f"{type(self).__name__}-worker-{index}",
            args=(index, CloudpickleWrapper(self.env_fns[index]), child_pipe, self._buffer),
            daemon=True,
        )
        with _single_threaded_children():
            process.start()
        child_pipe.close()
        return process, parent_pipe

    def restart_workers(self) -> tuple[int, ...]:
        """Start every dead worker again; its environment then needs a reset. Returns their indices."""
        self._assert_is_running()
        restarted = tuple(sorted(self._dead))
        for index in restarted:
            self._stop_process(index)
            self.processes[index], self.parent_pipes[index] = self._start_worker(index)
            self._needs_reset[index] = True
            self._doing[index] = "starting"
        self._dead.clear()
        return restarted

    def _stop_process(self, index: int, grace_s: float = 0.0) -> None:
        process, pipe = self.processes[index], self.parent_pipes[index]
        if grace_s > 0:
            process.join(grace_s)
        if process.is_alive():
            process.terminate()
            process.join(1.0)
        if process.is_alive():
            process.kill()
            process.join()
        pipe.close()

    def close_extras(self, timeout: float | None = None, terminate: bool = False) -> None:
        """Stop all workers; those that do not end within `timeout` seconds (default 5) are killed. Always returns."""
        deadline = time.monotonic() + (0.0 if terminate else CLOSE_TIMEOUT_S if timeout is None else timeout)
        for index, pipe in enumerate(self.parent_pipes):
            if index not in self._dead and not terminate:
                with suppress(OSError, ValueError):  # it died: nothing to tell it
                    pipe.send(("close", None))
        for index in range(len(self.processes)):
            self._stop_process(index, max(deadline - time.monotonic(), 0.0))
        self._state = AsyncState.DEFAULT

    # -- messages ----------------------------------------------------------------------------------------------------

    def _send(self, messages: Mapping[int, tuple[str, Any]], state: AsyncState, doing: str) -> None:
        """Send one message to each of some workers; all must be alive and no call pending."""
        self._assert_is_running()
        if self._state is not AsyncState.DEFAULT:
            raise AlreadyPendingCallError(
                f"a call to `{self._state.value}` is pending: wait for it first", str(self._state.value)
            )
        dead = sorted(self._dead & set(messages))
        if dead:
            raise WorkerError(
                f"worker {dead[0]} is dead: call restart_workers() and reset it, or make a new vector environment",
                tuple(dead),
            )
        for index, message in messages.items():
            with suppress(OSError):  # it died while idle: _receive finds it and reports it
                self.parent_pipes[index].send(message)
            if message[0] in ("step", "reset"):
                self._doing[index] = doing
        self._pending = tuple(messages)
        self._state = state

    def _receive(self, state: AsyncState, timeout: float | None) -> tuple[dict[int, Any], dict[int, str]]:
        """Replies of the workers that were sent a message, and a description of each failure, by index.

        A worker fails by raising, dying or not answering in time; every other reply has been read when this returns.
        """
        self._assert_is_running()
        if self._state is not state:
            raise NoAsyncCallError(
                f"`{state.value}_wait` without a `{state.value}_async` before it", state.value
            )
        limit = self.worker_timeout if timeout is None else timeout
        deadline = time.monotonic() + limit
        waiting = set(self._pending)
        replies: dict[int, Any] = {}
        failures: dict[int, str] = {}
        while waiting:
            pipes = {self.parent_pipes[i]: i for i in waiting}
            ready = wait(list(pipes), max(deadline - time.monotonic(), 0.0))
            for pipe in ready:
                index = pipes[pipe]  # type: ignore[index]
                waiting.discard(index)
                try:
                    ok, result = self.parent_pipes[index].recv()
                except (EOFError, OSError):
                    failures[index] = self._describe_death(index)
                    continue
                if ok:
                    replies[index] = result
                else:
                    summary, trace = result
                    failures[index] = f"worker {index} raised {summary} (while {self._doing[index]})\n{trace}"
                    self._needs_reset[index] = True
            if not ready and time.monotonic() >= deadline:
                for index in waiting:
                    failures[index] = (
                        f"worker {index} did not answer within {limit:g} s (while {self._doing[index]})"
                    )
                    self._mark_dead(index)
                break
        self._pending = ()
        self._state = AsyncState.DEFAULT
        return dict(sorted(replies.items())), failures

    @staticmethod
    def _raise_failures(failures: Mapping[int, str]) -> None:
        if failures:
            first, *others = sorted(failures)
            text = failures[first] + (f"; workers {others} failed too" if others else "")
            raise WorkerError(text, tuple(sorted(failures)))

    def _mark_dead(self, index: int) -> None:
        self._dead.add(index)
        self._needs_reset[index] = True
        if self.processes[index].is_alive():
            self.processes[index].kill()

    def _describe_death(self, index: int) -> str:
        process = self.processes[index]
        process.join(1.0)
        code = process.exitcode
        self._mark_dead(index)
        reason = f"exit code {code}"
        if code is not None and code < 0:
            reason = f"killed by {signal.Signals(-code).name}"
            if -code == signal.SIGKILL:
                reason += ", perhaps for lack of memory"
        return (
            f"worker {index} died ({reason}) while {self._doing[index]}: call restart_workers() and reset it, "
            "or make a new vector environment, and repeat the episode"
        )

    # -- Gymnasium's interface ---------------------------------------------------------------------------------------

    def reset_async(
        self, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> None:
        """Send a reset to every environment of `options["reset_mask"]` (default: all).

        Raises:
            OptionError: An option is unknown, or an array has another shape than (num_envs,).
        """
        self._assert_is_running()
        given = dict(options or {})
        mask = given.pop("reset_mask", np.ones(self.num_envs, np.bool_))
        if not isinstance(mask, np.ndarray) or mask.dtype != np.bool_ or mask.shape != (self.num_envs,):
            raise OptionError(
                f"reset_mask={mask!r}: a numpy bool array of shape ({self.num_envs},) is needed"
            )
        if not mask.any():
            raise OptionError("reset_mask selects no environment: at least one True is needed")
        seeds = self._deal_seeds(seed)
        dealt = [self._deal_options(given, i) for i in range(self.num_envs)]
        messages: dict[int, tuple[str, Any]] = {}
        for i in np.flatnonzero(mask).tolist():
            check_options(dealt[i])
            messages[i] = ("reset", {"seed": seeds[i], "options": dealt[i]})
        self._send(messages, AsyncState.WAITING_RESET, "resetting")
        for i in messages:
            self._doing[i] = f"resetting to seed {seeds[i]}, index {dealt[i].get('index')}"

    def _deal_seeds(self, seed: int | Sequence[int | None] | None) -> list[int | None]:
        if seed is None:
            return [None] * self.num_envs
        if isinstance(seed, (int, np.integer)):
            return [int(seed) + i for i in range(self.num_envs)]
        if len(seed) != self.num_envs:
            raise OptionError(f"{len(seed)} seeds for {self.num_envs} environments: give one of each")
        return [None if value is None else int(value) for value in seed]

    def _deal_options(self, options: Mapping[str, Any], index: int) -> dict[str, Any]:
        """Options of one environment: arrays of shape (num_envs,) are dealt out, single values are for all."""
        dealt = {}
        for name, value in options.items():
            if name in PER_ENV_OPTIONS and isinstance(value, (np.ndarray, list, tuple)):
                array = np.asarray(value)
                if array.ndim and array.shape != (self.num_envs,):
                    raise OptionError(
                        f"option {name} has shape {array.shape}: a single value or shape ({self.num_envs},) is needed"
                    )
                value = (array[index] if array.ndim else array[()]).item()
            dealt[name] = value
        return dealt

    def reset_wait(self, timeout: float | None = None) -> tuple[Any, dict[str, Any]]:
        """Observations of all environments, and the infos of those that were reset."""
        infos: dict[str, Any] = {}
        replies, failures = self._receive(AsyncState.WAITING_RESET, timeout)
        for index, info in replies.items():
            self._needs_reset[index] = self._terminated[index] = self._truncated[index] = False
            infos = self._add_info(infos, info, index)
        self._raise_failures(failures)
        return self._read_observations(), infos

    def step_async(self, actions: Any) -> None:
        """Send each running environment its action; finished ones get nothing.

        Raises:
            ActionError: Wrong shape, or a value that is not finite in a running environment's action.
            EpisodeError: No environment is running, or one was never reset.
        """
        self._assert_is_running()
        finished = self._terminated | self._truncated
        never = np.flatnonzero(self._needs_reset & ~finished).tolist()
        if never and not self._dead.intersection(never):
            raise EpisodeError(f"environment {never[0]} needs a reset before step()")
        active = np.flatnonzero(~finished).tolist()
        if not active:
            raise EpisodeError("every environment has finished its episode: reset at least one before step()")
        checked = check_actions(actions, self.action_space.shape, active)
        messages: dict[int, tuple[str, Any]] = {i: ("step", checked[i]) for i in active}
        self._send(messages, AsyncState.WAITING_STEP, "stepping")

    def step_wait(
        self, timeout: float | None = None
    ) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Results of the running environments, in the places of a full batch."""
        infos: dict[str, Any] = {}
        rewards = np.zeros(self.num_envs, np.float64)
        replies, failures = self._receive(AsyncState.WAITING_STEP, timeout)
        for index, result in replies.items():
            rewards[index], self._terminated[index], self._truncated[index], info = result
            infos = self._add_info(infos, info, index)
        self._raise_failures(failures)
        return self._read_observations(), rewards, self._terminated.copy(), self._truncated.copy(), infos

    def _read_observations(self) -> Any:
        return deepcopy(self.observations) if self.copy else self.observations

    def _add_info(
        self, vector_infos: dict[str, Any], env_info: dict[str, Any], env_num: int
    ) -> dict[str, Any]:
        """Gymnasium's, with one change: a None among numbers stays None (it would become NaN or an error)."""
        for key, value in env_info.items():
            if value is None and isinstance(vector_infos.get(key), np.ndarray):
                vector_infos[key] = vector_infos[key].astype(object)
        return super()._add_info(vector_infos, env_info, env_num)

    def call_async(self, name: str, /, *args: object, **kwargs: object) -> None:
        """Call a method, or read an attribute, in every environment."""
        if name in ("reset", "step", "close"):
            raise ConfigError(
                f"call({name!r}) would bypass the bookkeeping: use {name}() of the vector environment"
            )
        message = ("call", (name, args, kwargs))
        self._send(dict.fromkeys(range(self.num_envs), message), AsyncState.WAITING_CALL, "called")

    def call_wait(self, timeout: float | None = None) -> tuple[Any, ...]:
        """Results of `call_async`, one of each environment."""
        replies, failures = self._receive(AsyncState.WAITING_CALL, timeout)
        self._raise_failures(failures)
        return tuple(replies[i] for i in range(self.num_envs))

    def set_attr(self, name: str, values: Any) -> None:
        """Set an attribute in every environment: one value for all, or a list of num_envs values."""
        values = list(values) if isinstance(values, (list, tuple)) else [values] * self.num_envs
        if len(values) != self.num_envs:
            raise ConfigError(f"{len(values)} values for {self.num_envs} environments: give one of each")
        messages: dict[int, tuple[str, Any]] = {i: ("set", (name, v)) for i, v in enumerate(values)}
        self._send(messages, AsyncState.WAITING_CALL, "setting an attribute")
        self._raise_failures(self._receive(AsyncState.WAITING_CALL, None)[1])

    def __del__(self) -> None:
        """Stop the workers of a vector environment that nobody closed."""
        if (
            not getattr(self, "closed", True)
            and hasattr(self, "_state")
            and threading.main_thread().is_alive()
        ):
            self.close(terminate=True)


class ChessPickStepVectorEnv(ChessPickVectorEnv):
    """The same with one joint target per step: actions of shape (num_envs, 6)."""

    env_class = ChessPickStepEnv
