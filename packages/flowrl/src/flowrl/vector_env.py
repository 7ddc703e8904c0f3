"""The environment's side of the boundary: making vector environments, and telling their failures in one line.

flowrl needs of an environment: continuous actions, either chunks (Box of shape (T, A): one step executes T targets) or
single targets (Box of shape (A,), of which a wrapper executes a chunk), and observations that are a Dict of `pixels` and
`agent_pos` or a plain state (Box of shape (S,)). One with a vector class of its own must have no autoreset, and must leave
an environment that has ended alone until it is reset. flowrl reads optional keys of `metadata`:

- `reset_options`: names of the reset options that the environment understands. "index": scenes are a pure function of
  (seed, index). "early_stop": a bool that overrides the constructor's for one episode.
- `log_metrics`: what to report of `info["episode_metrics"]`, see `metrics.summarize_episodes`.
- `reward_weights`: weights of the reward's terms, for the run's record.
"""

import importlib
import os
import signal
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, VectorEnv

from flowrl.errors import FlowRLError
from flowrl.policy.interface import FlowPolicy, FlowSpec
from flowrl.sub_environment import SubEnvironmentMaker, make_environment

type Environments = VectorEnv | Sequence[VectorEnv]
"""One vector environment, or several of one kind, of which some simulate while the policy works for another."""
THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def make_vector_envs(
    env_id: str, num_envs: int, env_kwargs: Mapping[str, Any], policy: FlowPolicy, pipeline: int
) -> list[VectorEnv]:
    """Environments in processes of their own, with autoreset disabled, in groups.

    The environment's own vector class where it registered one that executes chunks, else Gymnasium's AsyncVectorEnv
    around `sub_environment.make_environment`; one group of a class that is not an AsyncVectorEnv, whose calls cannot
    be pending. The workers have one thread each, and ignore SIGINT and SIGTERM: the trainer decides when they end. All are
    reset once: an environment that cannot work fails here, and one that a rollout has no episode for may be stepped along.

    Args:
        env_id: Gymnasium id, `module:id` to import the module that registers it.
        num_envs: Number of environments of all groups together.
        env_kwargs: Arguments of the environment, see `resolve_env_kwargs`.
        policy: The policy: its chunk, how much of that is executed, and its device.
        pipeline: Groups at most; 0: 2 for a policy on a GPU, 1 on a CPU. See `group_sizes`.

    Raises:
        FlowRLError: unknown id, failing import, arguments that the environment refuses, or autoreset enabled.
    """
    return _make_groups(env_id, group_sizes(num_envs, pipeline, policy.device), env_kwargs, policy.spec)


def make_vector_env(env_id: str, num_envs: int, env_kwargs: Mapping[str, Any], policy: FlowSpec) -> VectorEnv:
    """All environments in one group, see `make_vector_envs`."""
    return _make_groups(env_id, [num_envs], env_kwargs, policy)[0]


def group_sizes(num_envs: int, pipeline: int, device: torch.device) -> list[int]:
    """Environments in each group: equal up to one, and two at least, since a batch of one is computed as one of two.

    Args:
        num_envs: Environments of all groups together.
        pipeline: Groups at most; 0: 2 if the policy works on a GPU beside the simulators, 1 if it takes their cores.
        device: The policy's.
    """
    most = pipeline or (2 if device.type == "cuda" else 1)
    groups = max(1, min(most, num_envs // 2))
    return [num_envs // groups + (number < num_envs % groups) for number in range(groups)]


def _make_groups(
    env_id: str, sizes: Sequence[int], env_kwargs: Mapping[str, Any], policy: FlowSpec
) -> list[VectorEnv]:
    vec_envs: list[VectorEnv] = []
    try:
        for size in sizes:
            vec_envs.append(_start_vector_env(env_id, size, env_kwargs, policy))
            if not isinstance(vec_envs[0], AsyncVectorEnv) and len(sizes) > 1:
                close_vector_env(vec_envs.pop())
                vec_envs.append(_start_vector_env(env_id, sum(sizes), env_kwargs, policy))
                break
        with environment_errors(f"--env-id {env_id}: the first reset failed"):
            answers = [begin_reset(vec_env, seed=0) for vec_env in vec_envs]
            for answer in answers:
                answer()
    except FlowRLError:
        close_vector_env(vec_envs, failed=True)
        raise
    return vec_envs


def group_list(vec_env: Environments) -> list[VectorEnv]:
    """The groups, one or several."""
    return [vec_env] if isinstance(vec_env, VectorEnv) else list(vec_env)


def begin_reset(vec_env: VectorEnv, **arguments: Any) -> Callable[[], Any]:
    """Starts a reset, where the class can; a call of what is returned waits, and returns what `reset` does."""
    if not isinstance(vec_env, AsyncVectorEnv):
        return partial(vec_env.reset, **arguments)
    vec_env.reset_async(**arguments)
    return vec_env.reset_wait


def begin_step(vec_env: VectorEnv, actions: np.ndarray) -> Callable[[], Any]:
    """Starts a step, where the class can; a call of what is returned waits, and returns what `step` does."""
    if not isinstance(vec_env, AsyncVectorEnv):
        return partial(vec_env.step, actions)
    vec_env.step_async(actions)
    return vec_env.step_wait


def _start_vector_env(
    env_id: str, num_envs: int, env_kwargs: Mapping[str, Any], policy: FlowSpec
) -> VectorEnv:
    spec = find_spec(env_id)
    vec_env: VectorEnv | None = None
    with (
        environment_errors(f"--env-id {env_id}: cannot be made"),
        _signals_ignored(),
        _one_thread_each(),
    ):
        if spec.vector_entry_point is not None:
            vec_env = gymnasium.make_vec(env_id, num_envs=num_envs, **env_kwargs)
            if len(vec_env.single_action_space.shape or ()) != 2:  # no chunks
                vec_env.close()
                vec_env = None
        if vec_env is None:
            sizes = policy.chunk_size, policy.n_action_steps
            makers = [
                SubEnvironmentMaker(env_id, number, dict(env_kwargs), *sizes) for number in range(num_envs)
            ]
            vec_env = AsyncVectorEnv(makers, autoreset_mode=AutoresetMode.DISABLED, context="forkserver")
    mode = vec_env.metadata.get("autoreset_mode")
    if mode != AutoresetMode.DISABLED:
        close_vector_env(vec_env)
        raise FlowRLError(
            f"--env-id {env_id}: its vector environment has autoreset mode {mode}; DISABLED is needed"
        )
    return vec_env


def make_single_env(env_id: str, env_kwargs: Mapping[str, Any], policy: FlowSpec) -> gymnasium.Env:
    """One environment, in this process, in the form that `make_vector_env` gives it.

    Raises:
        FlowRLError: unknown id, failing import, or arguments that the environment refuses.
    """
    find_spec(env_id)
    with environment_errors(f"--env-id {env_id}: cannot be made"):
        return make_environment(env_id, env_kwargs, policy.chunk_size, policy.n_action_steps)


def find_spec(env_id: str) -> gymnasium.envs.registration.EnvSpec:
    """The registered specification of an id; its `kwargs` are the environment's arguments with their defaults.

    Raises:
        FlowRLError: unknown id or failing import.
    """
    module, colon, name = env_id.rpartition(":")
    remedy = "" if colon else "; write module:id to import the module that registers it"
    with environment_errors(f"--env-id {env_id}: not found{remedy}"):
        if module:
            importlib.import_module(module)
        return gymnasium.spec(name)


def resolve_env_kwargs(
    spec: gymnasium.envs.registration.EnvSpec, env_kwargs: Mapping[str, Any], seconds: float, policy: FlowSpec
) -> dict[str, Any]:
    """The environment's arguments: the given ones, and those that follow from flags and policy.

    `seconds`, `chunk_size` and `n_action_steps` are filled in where the environment's registered kwargs have them and
    they are not given.

    Raises:
        FlowRLError: an argument that the environment does not have, in an environment that registers its arguments.
    """
    known = spec.kwargs
    unknown = sorted(set(env_kwargs) - set(known)) if known else []
    if unknown:
        raise FlowRLError(
            f"--env-kwargs: {spec.id} has no argument {', '.join(unknown)}; it has {', '.join(known)}"
        )
    implied = {"seconds": seconds, "chunk_size": policy.chunk_size, "n_action_steps": policy.n_action_steps}
    return {**{name: value for name, value in implied.items() if name in known}, **env_kwargs}


def check_spaces(env: VectorEnv | gymnasium.Env, policy: FlowSpec) -> None:
    """Raises FlowRLError unless the environment executes the chunks that the policy predicts, and its observations have names."""
    vector = isinstance(env, VectorEnv)
    actions = env.single_action_space if vector else env.action_space
    observations = env.single_observation_space if vector else env.observation_space
    if not isinstance(observations, gymnasium.spaces.Dict):
        raise FlowRLError(
            f"the environment's observations are {observations}; flowrl takes a Dict of pixels and agent_pos, or a plain "
            "state, Box of shape (S,); wrap the environment"
        )
    if not isinstance(actions, gymnasium.spaces.Box):
        raise FlowRLError(f"the environment's actions are {actions}; flowrl needs continuous ones, a Box")
    expected = (policy.chunk_size, policy.action_dim)
    if actions.shape == expected:
        return
    if actions.shape[1:] == expected[1:] or len(actions.shape) != 2:
        remedy = "set its chunk size with --env-kwargs or choose another policy"
    else:
        remedy = "use a policy that was trained for this robot"
    raise FlowRLError(
        f"chunks do not match: the policy predicts {expected} (targets, joints), the environment takes {actions.shape}; {remedy}"
    )


def close_vector_env(vec_env: Environments, failed: bool = False) -> None:
    """Ends all workers; after a failure by force, since workers out of step never answer."""
    with ExitStack() as stack:  # a group that fails leaves none of the others running
        for group in reversed(group_list(vec_env)):
            stack.callback(_close, group, failed)


def _close(vec_env: VectorEnv, failed: bool) -> None:
    base = vec_env.unwrapped
    if (
        failed and type(base) is AsyncVectorEnv
    ):  # its own close() waits for answers even when told to terminate
        for process in base.processes:
            process.kill()
            process.join()
        base.closed = True
        return
    with environment_errors("closing the environments"):
        vec_env.close(**({"terminate": True} if failed and isinstance(base, AsyncVectorEnv) else {}))


@contextmanager
def environment_errors(what: str) -> Iterator[None]:
    """Tells any failure of somebody's environment in one line that starts with `what`; the cause stays attached."""
    try:
        yield
    except FlowRLError:
        raise
    except (EOFError, BrokenPipeError, ConnectionResetError) as error:
        # Without their locals: the half-sent message in them, collected with a cycle, crashes the interpreter (CPython 3.12).
        traceback.clear_frames(error.__traceback__)
        raise FlowRLError(
            f"{what}: an environment's process died ({type(error).__name__}), perhaps out of memory"
        ) from error
    except Exception as error:
        text = " ".join(str(error).split()) or "no message"
        raise FlowRLError(f"{what}: {type(error).__name__}: {text}") from error


def info_of(infos: Mapping[str, Any], env: int) -> dict[str, Any]:
    """The info of one environment out of a vector environment's, whose `_name` entries say who has `name`.

    Numbers come back as Python's own; NaN, which is how an array of floats holds a None, as None.
    """
    info: dict[str, Any] = {}
    for name, value in infos.items():
        mask = infos.get(f"_{name}")
        if mask is None or not mask[env]:
            continue
        if isinstance(value, Mapping):
            info[name] = info_of(value, env)
            continue
        item = value[env]
        item = item.item() if isinstance(item, np.generic) else item
        info[name] = None if isinstance(item, float) and np.isnan(item) else item
    return info


@contextmanager
def _one_thread_each() -> Iterator[None]:
    """Processes that are started meanwhile compute with one thread each, unless the caller's environment says otherwise."""
    missing = [name for name in THREAD_VARIABLES if name not in os.environ]
    os.environ.update(dict.fromkeys(missing, "1"))
    try:
        yield
    finally:
        for name in missing:
            del os.environ[name]


@contextmanager
def _signals_ignored() -> Iterator[None]:
    """Processes that are started meanwhile ignore SIGINT and SIGTERM.

    Both often go to the whole process group: Ctrl-C would print every worker's stack, and workers that SIGTERM ends would leave
    the trainer, which finishes its step and saves, without environments. (Blocked signals are no way: `multiprocessing`
    unblocks them when it starts its helpers.)
    """
    previous: dict[int, Any] = {}
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            with suppress(ValueError):  # not in the main thread: handlers cannot be changed there
                previous[number] = signal.signal(number, signal.SIG_IGN)
        yield
    finally:
        for ignored, handler in previous.items():
            signal.signal(ignored, handler)
