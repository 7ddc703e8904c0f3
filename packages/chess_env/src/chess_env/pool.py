"""The parent's side of the worker processes: start, message, await with a deadline, restart and stop them."""

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any

import gymnasium
from gymnasium.vector.utils import CloudpickleWrapper, create_shared_memory

from chess_env.errors import ConfigError, WorkerError
from chess_env.worker import run_worker, single_threaded_children

CONTEXTS = ("forkserver", "spawn")  # never fork: a forked child inherits locks, threads and GPU handles
KILL_GRACE_S = 1.0


class WorkerPool:
    """One process for each environment function, all writing observations into one shared buffer.

    Attributes:
        buffer: The shared memory of the observations.
        pipes, processes: One of each worker.
        dead: Workers that died or were killed because they did not answer.
        doing: What each worker was last asked to do, for error messages.
    """

    def __init__(
        self,
        env_fns: Sequence[Callable[[], gymnasium.Env]],
        observation_space: gymnasium.Space,
        context: str,
    ) -> None:
        if context not in CONTEXTS:
            raise ConfigError(f"context={context!r}: allowed are {', '.join(map(repr, CONTEXTS))}")
        self._env_fns = env_fns
        self._context: Any = get_context(context)
        if context == "forkserver":  # imported once for all workers; no effect on a server that runs already
            self._context.set_forkserver_preload(["chess_env.worker"])
        self.buffer = create_shared_memory(observation_space, n=len(env_fns), ctx=self._context)
        self.pipes: list[Connection] = []
        self.processes: list[Any] = []
        self.dead: set[int] = set()
        self.doing = ["starting"] * len(env_fns)
        self._pending: tuple[int, ...] = ()
        for index in range(len(env_fns)):
            process, pipe = self._start(index)
            self.processes.append(process)
            self.pipes.append(pipe)

    def _start(self, index: int) -> tuple[Any, Connection]:
        parent_pipe, child_pipe = self._context.Pipe()
        process = self._context.Process(
            target=run_worker,
            name=f"chess-env-worker-{index}",
            args=(index, CloudpickleWrapper(self._env_fns[index]), child_pipe, self.buffer),
            daemon=True,
        )
        with single_threaded_children():
            process.start()
        child_pipe.close()
        return process, parent_pipe

    def restart_dead(self) -> tuple[int, ...]:
        """Start every dead worker again; returns their indices."""
        restarted = tuple(sorted(self.dead))
        for index in restarted:
            self._stop(index)
            self.processes[index], self.pipes[index] = self._start(index)
            self.doing[index] = "starting"
        self.dead.clear()
        return restarted

    def send(self, messages: Mapping[int, tuple[str, Any]], doing: Mapping[int, str]) -> None:
        """Send one message to each of some workers; `receive` then awaits their replies.

        Raises:
            WorkerError: One of them is known to be dead; nothing was sent.
        """
        dead = sorted(self.dead & set(messages))
        if dead:
            raise WorkerError(
                f"worker {dead[0]} is dead: call restart_workers() and reset it, or make a new vector environment",
                tuple(dead),
            )
        for index, message in messages.items():
            with suppress(OSError):  # it died while idle: receive finds it and reports it
                self.pipes[index].send(message)
            self.doing[index] = doing[index]
        self._pending = tuple(messages)

    def receive(self, timeout: float) -> tuple[dict[int, Any], WorkerError | None]:
        """Replies of the workers that were sent a message, by index, and one error for those that failed.

        A worker fails by raising, by dying, or by not answering within `timeout` [s], when it is killed. Every other
        reply has been read when this returns.
        """
        deadline = time.monotonic() + timeout
        waiting = set(self._pending)
        self._pending = ()
        replies: dict[int, Any] = {}
        failures: dict[int, str] = {}
        traces: dict[int, str] = {}
        while waiting:
            ready = set(wait([self.pipes[i] for i in waiting], max(deadline - time.monotonic(), 0.0)))
            for index in [i for i in waiting if self.pipes[i] in ready]:
                waiting.discard(index)
                try:
                    ok, result = self.pipes[index].recv()
                except (EOFError, OSError):
                    failures[index] = self._describe_death(index)
                    continue
                if ok:
                    replies[index] = result
                else:
                    summary, traces[index] = result
                    failures[index] = f"worker {index} raised {summary} (while {self.doing[index]})"
            if not ready and time.monotonic() >= deadline:
                for index in waiting:
                    failures[index] = (
                        f"worker {index} did not answer within {timeout:g} s (while {self.doing[index]})"
                    )
                    self._mark_dead(index)
                break
        return dict(sorted(replies.items())), _one_error(failures, traces)

    def stop(self, grace_s: float) -> None:
        """Ask all workers to end, and kill those that have not within `grace_s` [s]. Always returns."""
        deadline = time.monotonic() + grace_s
        for index, pipe in enumerate(self.pipes):
            if index not in self.dead and grace_s > 0:
                with suppress(OSError, ValueError):  # it died: nothing to tell it
                    pipe.send(("close", None))
        for index in range(len(self.pipes)):
            self._stop(index, max(deadline - time.monotonic(), 0.0))

    def _stop(self, index: int, grace_s: float = 0.0) -> None:
        process = self.processes[index]
        if grace_s > 0:
            process.join(grace_s)
        if (
            process.is_alive()
        ):  # not terminate(): a worker whose parent ignored SIGTERM when it started does too
            process.kill()
            process.join()
        self.pipes[index].close()

    def _mark_dead(self, index: int) -> None:
        self.dead.add(index)
        if self.processes[index].is_alive():
            self.processes[index].kill()

    def _describe_death(self, index: int) -> str:
        process = self.processes[index]
        process.join(KILL_GRACE_S)
        code = process.exitcode
        self._mark_dead(index)
        reason = f"exit code {code}"
        if code is not None and code < 0:
            reason = f"killed by {signal.Signals(-code).name}"
            if -code == signal.SIGKILL:
                reason += ", perhaps for lack of memory"
        return (
            f"worker {index} died ({reason}) while {self.doing[index]}: call restart_workers() and reset it, "
            "or make a new vector environment, and repeat the episode"
        )


def _one_error(failures: Mapping[int, str], traces: Mapping[int, str]) -> WorkerError | None:
    """The first failure's message with the workers' tracebacks as notes, None without failures."""
    if not failures:
        return None
    first, *others = sorted(failures)
    text = failures[first] + (f"; workers {others} failed too" if others else "")
    error = WorkerError(text, tuple(sorted(failures)))
    for index, trace in traces.items():
        error.add_note(f"in worker {index}:\n{trace}")
    return error
