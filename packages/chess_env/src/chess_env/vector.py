"""Environments in worker processes: Gymnasium's AsyncVectorEnv contract, with named errors in place of hangs.

Autoreset is disabled. A finished environment receives nothing until it is reset through
`reset(options={"reset_mask": ...})`, so it costs nothing while the others run.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium.error import AlreadyPendingCallError, NoAsyncCallError
from gymnasium.vector import AsyncVectorEnv, AutoresetMode
from gymnasium.vector.async_vector_env import AsyncState
from gymnasium.vector.utils import batch_space, read_from_shared_memory

from chess_env.chunk import check_actions
from chess_env.env import ChessPickEnv, ChessPickStepEnv
from chess_env.errors import ConfigError, EpisodeError, OptionError, WorkerError
from chess_env.layout import check_seed
from chess_env.options import RESET_OPTIONS, check_options
from chess_env.pool import WorkerPool
from chess_env.worker import make_single

CLOSE_TIMEOUT_S = 5.0


class ChessPickVectorEnv(AsyncVectorEnv):
    """`num_envs` chess environments, each in its own process; `gymnasium.make_vec("ChessPick-v0", num_envs=n)`.

    - **Observations** are `single_observation_space` with a leading axis (num_envs,), copies of shared memory.
    - **step(actions)**: actions of shape (num_envs, chunk_size, 6). Environments whose episode has ended are skipped:
      reward 0, `terminated`/`truncated` as at their end, the last observation, no info. When all have ended, it is an
      error.
    - **reset(seed=..., options=...)**: `seed` is an int (environment i gets seed + i) or a list; options may hold
      `reset_mask` (bool, shape (num_envs,)) and those of `ChessPickEnv`, each as a value for all or an array or list of
      num_envs values, where None leaves the option out. The caller's dict is never changed.
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
        self._config = template.unwrapped.config
        self.metadata = {**template.metadata, "autoreset_mode": self.autoreset_mode}
        self.render_mode = template.render_mode
        self.single_observation_space = template.observation_space
        self.single_action_space = template.action_space
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        template.close()

        self._pool = WorkerPool(self.env_fns, self.single_observation_space, context)
        self.parent_pipes, self.processes = self._pool.pipes, self._pool.processes
        self.observations = read_from_shared_memory(
            self.single_observation_space, self._pool.buffer, n=self.num_envs
        )
        self._needs_reset = np.ones(self.num_envs, np.bool_)
        self._terminated = np.zeros(self.num_envs, np.bool_)
        self._truncated = np.zeros(self.num_envs, np.bool_)
        self._state = AsyncState.DEFAULT

    def restart_workers(self) -> tuple[int, ...]:
        """Start every dead worker again; its environment then needs a reset. Returns their indices."""
        self._assert_is_running()
        restarted = self._pool.restart_dead()
        self._needs_reset[list(restarted)] = True
        return restarted

    def close_extras(self, timeout: float | None = None, terminate: bool = False) -> None:
        """Stop all workers; those that do not end within `timeout` seconds (default 5) are killed. Always returns."""
        self._pool.stop(0.0 if terminate else CLOSE_TIMEOUT_S if timeout is None else timeout)
        self._state = AsyncState.DEFAULT

    def _send(
        self, messages: Mapping[int, tuple[str, Any]], state: AsyncState, doing: Mapping[int, str]
    ) -> None:
        """Begin a call: one message to each of some workers, when no other call is pending."""
        self._assert_is_running()
        if self._state is not AsyncState.DEFAULT:
            raise AlreadyPendingCallError(
                f"a call to `{self._state.value}` is pending: wait for it first", str(self._state.value)
            )
        self._pool.send(messages, doing)
        self._state = state

    def _receive(self, state: AsyncState, timeout: float | None) -> tuple[dict[int, Any], WorkerError | None]:
        """End the call that `_send` began: replies by index, and one error for the workers that failed."""
        self._assert_is_running()
        if self._state is not state:
            raise NoAsyncCallError(
                f"`{state.value}_wait` without a `{state.value}_async` before it", state.value
            )
        replies, failure = self._pool.receive(self.worker_timeout if timeout is None else timeout)
        self._state = AsyncState.DEFAULT
        if failure is not None:
            lost = failure.indices if state is not AsyncState.WAITING_CALL else tuple(self._pool.dead)
            self._needs_reset[list(lost)] = True
        return replies, failure

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
            check_options(dealt[i], self._config)
            messages[i] = ("reset", {"seed": seeds[i], "options": dealt[i]})
        doing = {i: f"resetting to seed {seeds[i]}, index {dealt[i].get('index')}" for i in messages}
        self._send(messages, AsyncState.WAITING_RESET, doing)

    def _deal_seeds(self, seed: int | Sequence[int | None] | None) -> list[int | None]:
        if seed is None:
            return [None] * self.num_envs
        if isinstance(seed, (int, np.integer)):
            return [check_seed(int(seed) + i) for i in range(self.num_envs)]
        if len(seed) != self.num_envs:
            raise OptionError(f"{len(seed)} seeds for {self.num_envs} environments: give one of each")
        return [None if value is None else check_seed(value) for value in seed]

    def _deal_options(self, options: Mapping[str, Any], index: int) -> dict[str, Any]:
        """Options of one environment: arrays and lists of num_envs values are dealt out, single values are for all."""
        dealt = {}
        for name, value in options.items():
            if name in RESET_OPTIONS and isinstance(value, np.ndarray) and value.ndim == 0:
                value = value.item()
            elif name in RESET_OPTIONS and isinstance(value, (np.ndarray, list, tuple)):
                shape = value.shape if isinstance(value, np.ndarray) else (len(value),)
                if shape != (self.num_envs,):
                    raise OptionError(
                        f"option {name} has shape {shape}: a single value or shape ({self.num_envs},) is needed"
                    )
                value = value[index]
                if value is None:
                    continue
            dealt[name] = value.item() if isinstance(value, np.generic) else value
        return dealt

    def reset_wait(self, timeout: float | None = None) -> tuple[Any, dict[str, Any]]:
        """Observations of all environments, and the infos of those that were reset."""
        infos: dict[str, Any] = {}
        replies, failure = self._receive(AsyncState.WAITING_RESET, timeout)
        for index, info in replies.items():
            self._needs_reset[index] = self._terminated[index] = self._truncated[index] = False
            infos = self._add_info(infos, info, index)
        if failure is not None:
            raise failure
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
        if never and not self._pool.dead.intersection(never):
            raise EpisodeError(f"environment {never[0]} needs a reset before step()")
        active = np.flatnonzero(~finished).tolist()
        if not active:
            raise EpisodeError("every environment has finished its episode: reset at least one before step()")
        checked = check_actions(actions, self.action_space.shape, active)
        messages: dict[int, tuple[str, Any]] = {i: ("step", checked[i]) for i in active}
        self._send(messages, AsyncState.WAITING_STEP, dict.fromkeys(active, "stepping"))

    def step_wait(
        self, timeout: float | None = None
    ) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Results of the running environments, in the places of a full batch."""
        infos: dict[str, Any] = {}
        rewards = np.zeros(self.num_envs, np.float64)
        replies, failure = self._receive(AsyncState.WAITING_STEP, timeout)
        for index, result in replies.items():
            rewards[index], self._terminated[index], self._truncated[index], info = result
            infos = self._add_info(infos, info, index)
        if failure is not None:
            raise failure
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
        everyone = range(self.num_envs)
        messages = dict.fromkeys(everyone, ("call", (name, args, kwargs)))
        self._send(messages, AsyncState.WAITING_CALL, dict.fromkeys(everyone, f"calling {name}"))

    def call_wait(self, timeout: float | None = None) -> tuple[Any, ...]:
        """Results of `call_async`, one of each environment."""
        replies, failure = self._receive(AsyncState.WAITING_CALL, timeout)
        if failure is not None:
            raise failure
        return tuple(replies[i] for i in range(self.num_envs))

    def set_attr(self, name: str, values: Any) -> None:
        """Set an attribute in every environment: one value for all, or a list of num_envs values."""
        values = list(values) if isinstance(values, (list, tuple)) else [values] * self.num_envs
        if len(values) != self.num_envs:
            raise ConfigError(f"{len(values)} values for {self.num_envs} environments: give one of each")
        messages: dict[int, tuple[str, Any]] = {i: ("set", (name, v)) for i, v in enumerate(values)}
        self._send(messages, AsyncState.WAITING_CALL, dict.fromkeys(messages, f"setting {name}"))
        self.call_wait()

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
