"""The environments of a rollout in groups: while some simulate, another has its next chunks sampled.

The groups take turns in a fixed order, and their scenes from one queue: none waits for the end of another's episodes. Which
environment runs which scene, and which observations are one batch, depends on the episodes alone and never on who was
faster, so that a run on a GPU, where kernels depend on the batch, can be repeated.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

import numpy as np
from gymnasium.vector import AsyncVectorEnv, VectorEnv

from flowrl.episode import Episode
from flowrl.errors import FlowRLError
from flowrl.scenes import Scene
from flowrl.vector_env import begin_reset, begin_step, environment_errors, info_of


class Fleet:
    """Runs one episode on every scene; a context manager that leaves no call pending.

    `begin`, then until it is not `busy`: `wait` for a group, `refill` it, and `step` it if it has episodes.

    Args:
        vec_envs: The groups, of one kind. More than one must be Gymnasium's AsyncVectorEnv or a subclass.
        scenes: One per episode.
        early_stop: Value of that reset option, where the environment knows it.
        default_task: Instruction where the environment gives none.
        needs_task: Whether an episode without an instruction is an error.

    Attributes:
        episodes: Those that have begun, by their number.
    """

    def __init__(
        self,
        vec_envs: Sequence[VectorEnv],
        scenes: Sequence[Scene],
        early_stop: bool,
        default_task: str,
        needs_task: bool,
    ) -> None:
        self.waiting = deque(enumerate(scenes))
        self.early_stop, self.default_task, self.needs_task = early_stop, default_task, needs_task
        self.episodes: dict[int, Episode] = {}
        self.groups = [Group(vec_env, self) for vec_env in vec_envs]
        self._pending: list[Group] = []  # in the order of their calls

    @property
    def busy(self) -> bool:
        """Whether a call is pending."""
        return bool(self._pending)

    def begin(self) -> None:
        """Starts the first scenes in every group."""
        self._pending += [group for group in self.groups if group.begin_reset()]

    def wait(self) -> "tuple[Group, str]":
        """The group whose turn it is, with its answer taken in, and what it had been called for: reset or env.

        Raises:
            FlowRLError: an environment failed.
        """
        group = self._pending.pop(0)
        return group, group.receive()

    def refill(self, group: "Group") -> None:
        """Starts the next scenes on a group's free environments, and waits for them; the others simulate meanwhile."""
        if group.begin_reset():
            group.receive()

    def step(self, group: "Group", actions: Mapping[int, np.ndarray]) -> None:
        """Steps a group's environments whose episodes run, each with its chunk, float32 (T, A); `wait` has the results."""
        group.begin_step(actions)
        self._pending.append(group)

    def ordered_episodes(self) -> list[Episode]:
        """Those that have begun, in the order of their scenes."""
        return [self.episodes[number] for number in sorted(self.episodes)]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Waits for pending calls, so that the environments can be used again; not on an abort."""
        if kind is None:
            self._drain()
        elif issubclass(kind, FlowRLError):
            with suppress(FlowRLError):  # the first failure is the one that is told
                self._drain()

    def _drain(self) -> None:
        while self._pending:
            self._pending.pop(0).abandon()


class Group:
    """One vector environment, and the episodes that run in it.

    Attributes:
        episodes: Environment -> the episode that it runs, ascending.
        finished: Environment -> the episode that ended in the last step.
        observation: Of all environments, as the last answer left it.
    """

    def __init__(self, vec_env: VectorEnv, fleet: Fleet) -> None:
        self.vec_env, self.fleet = vec_env, fleet
        self.options = tuple(vec_env.metadata.get("reset_options", ()))
        self.episodes: dict[int, Episode] = {}
        self.finished: dict[int, Episode] = {}
        self.observation: Any = None
        shape = vec_env.single_action_space.shape
        self.actions = np.zeros((vec_env.num_envs, *(shape or ())), dtype=np.float32)
        self._starting: dict[int, tuple[int, Scene]] = {}
        self._answer: Callable[[], Any] | None = None

    def begin_reset(self) -> bool:
        """Starts the next scenes on the environments that are free; False when none is, or no scene is left."""
        free = [env for env in range(self.vec_env.num_envs) if env not in self.episodes]
        waiting = self.fleet.waiting
        self._starting = {env: waiting.popleft() for env in free[: len(waiting)]}
        if not self._starting:
            return False
        mask = np.zeros(self.vec_env.num_envs, dtype=np.bool_)
        mask[list(self._starting)] = True
        seeds: list[int | None] = [None] * self.vec_env.num_envs
        options: dict[str, Any] = {"reset_mask": mask}
        if "early_stop" in self.options:
            options["early_stop"] = self.fleet.early_stop
        if "index" in self.options:
            options["index"] = np.zeros(self.vec_env.num_envs, dtype=np.int64)
        for env, (_, scene) in self._starting.items():
            seeds[env] = scene.seed if "index" in self.options else scene.derived_seed
            if "index" in self.options:
                options["index"][env] = scene.index
        with environment_errors("resetting the environments"):
            self._answer = begin_reset(self.vec_env, seed=seeds, options=options)
        return True

    def begin_step(self, actions: Mapping[int, np.ndarray]) -> None:
        """Starts a step of the environments whose episodes run."""
        for env, action in actions.items():
            self.actions[env] = action
        with environment_errors("stepping the environments"):
            self._answer = begin_step(self.vec_env, self.actions)

    def receive(self) -> str:
        """Takes in the answer to the pending call; returns what that was: reset or env."""
        assert self._answer is not None
        answer, self._answer = self._answer, None
        self.finished = {}
        if not self._starting:
            with environment_errors("stepping the environments"):
                result = answer()
            self._take_step(*result)
            return "env"
        with environment_errors("resetting the environments"):
            self.observation, infos = answer()
        starting, self._starting = self._starting, {}
        for env, (number, scene) in starting.items():
            self._start_episode(env, number, scene, info_of(infos, env))
        self.episodes = dict(sorted(self.episodes.items()))
        return "reset"

    def abandon(self) -> None:
        """Waits for the answer to the pending call, and drops it."""
        answer, self._answer = self._answer, None
        if answer is not None and isinstance(self.vec_env, AsyncVectorEnv):
            with environment_errors("stopping the environments"):
                answer()

    def _start_episode(self, env: int, number: int, scene: Scene, info: dict[str, Any]) -> None:
        task = info.get("task") or self.fleet.default_task
        if not task and self.fleet.needs_task:
            raise FlowRLError('the environment gives no instruction in info["task"]; give one with --task')
        torch_seed = int(info.get("torch_seed", scene.torch_seed))
        episode = Episode(number, scene, task, torch_seed, reset_info=info)
        self.episodes[env] = self.fleet.episodes[number] = episode

    def _take_step(
        self,
        observation: Any,
        rewards: np.ndarray,
        terminated: np.ndarray,
        truncated: np.ndarray,
        infos: Mapping[str, Any],
    ) -> None:
        self.observation = observation
        for env, episode in list(self.episodes.items()):
            info = info_of(infos, env)
            episode.actions.append(self.actions[env].copy())
            episode.rewards.append(float(rewards[env]))
            episode.num_executed.append(int(info.get("num_executed_frames", self.actions.shape[1])))
            if terminated[env] or truncated[env]:
                episode.terminated, episode.truncated = bool(terminated[env]), bool(truncated[env])
                episode.metrics = dict(info.get("episode_metrics", {}))
                if "is_success" in info:
                    episode.metrics.setdefault("success", bool(info["is_success"]))
                self.finished[env] = self.episodes.pop(env)
