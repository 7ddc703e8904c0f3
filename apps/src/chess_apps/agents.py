"""Agents that ``chess-play`` knows: the scripted expert, random targets, no motion, and a policy."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from numpy.typing import NDArray

from chess_env.env import ChessPickEnv
from chess_env.expert import Expert, ExpertAgent
from flowrl.config import EvalConfig, parse_env_kwargs, parse_rename
from flowrl.episode import Episode
from flowrl.plain import predict_chunk
from flowrl.policy.interface import FlowPolicy
from flowrl.vector_env import check_spaces

Act = Callable[[Any, Episode], NDArray[np.float32]]
"""Gives the next chunk, shape (T, 6), from the observation and the episode so far."""


def scripted_agent(name: str, env: gymnasium.Env) -> Act:
    """The agent "expert", "random" or "zero"; what it does in a scene is a function of the scene alone."""
    agents: dict[str, Callable[[gymnasium.Env], Act]] = {"expert": _Expert, "random": _Random, "zero": _Zero}
    return agents[name](env)


class _Expert:
    """The scripted pick, which reads the simulation and no observation."""

    def __init__(self, env: gymnasium.Env) -> None:
        base = env.unwrapped
        assert isinstance(base, ChessPickEnv)
        self._env = base
        self._expert: Expert | None = None

    def __call__(self, observation: Any, episode: Episode) -> NDArray[np.float32]:
        simulation, config = self._env.simulation, self._env.config
        if not episode.rewards:
            if self._expert is None or self._expert.scene is not simulation.scene:
                self._expert = Expert(simulation.scene)
            self._agent = ExpertAgent(self._expert, config.chunk_size, config.n_action_steps)
            self._rng = _generator(episode)
        return self._agent.act(simulation.data, simulation.target_slot, self._rng)


class _Zero:
    """No motion: every target is where the arm stood at the start."""

    def __init__(self, env: gymnasium.Env) -> None:
        self._space = _box(env)

    def __call__(self, observation: Any, episode: Episode) -> NDArray[np.float32]:
        if not episode.rewards:
            self._start = np.asarray(observation["agent_pos"], np.float32)
        return np.clip(self._start, self._space.low, self._space.high)


class _Random:
    """Joint targets drawn evenly between the limits, each on its own."""

    def __init__(self, env: gymnasium.Env) -> None:
        self._space = _box(env)

    def __call__(self, observation: Any, episode: Episode) -> NDArray[np.float32]:
        if not episode.rewards:
            self._rng = _generator(episode)
        return self._rng.uniform(self._space.low, self._space.high).astype(np.float32)


class PolicyAgent:
    """A policy by flowrl's own loading and sampler, with the environment arguments that it brings.

    LeRobot and the weights take seconds to load. Where the folder's config.json says how long a chunk is, they are loaded
    for the first decision, when the start of the first scene has been shown.

    Attributes:
        arguments: Of the environment.

    Raises:
        FlowRLError: no such policy, or one that cannot be loaded.
    """

    def __init__(self, config: EvalConfig) -> None:
        self._config = config
        self._policy: FlowPolicy | None = None
        sizes = _sizes_on_disk(config.policy)
        if sizes is None:
            spec = self._load().spec
            sizes = {"chunk_size": spec.chunk_size, "n_action_steps": spec.n_action_steps}
        self.arguments = {"seconds": config.seconds, **sizes, **parse_env_kwargs(config.env_kwargs)}

    def in_environment(self, env: gymnasium.Env) -> Act:
        """The policy's decisions in this environment."""

        def act(observation: Any, episode: Episode) -> NDArray[np.float32]:
            policy = self._policy or self._load()
            if not episode.rewards:
                check_spaces(env, policy.spec)
            return predict_chunk(policy, observation, episode)

        return act

    @property
    def device(self) -> torch.device:
        """Where the policy runs; loads it."""
        return (self._policy or self._load()).device

    def _load(self) -> FlowPolicy:
        from flowrl.device import prepare_torch
        from flowrl.policy.loading import load_policy

        config = self._config
        device = prepare_torch(config.device, config.torch_threads)
        rename = parse_rename(config.rename)
        policy = load_policy(config.policy, device=device, expert_dtype="loaded", rename=rename)
        self._policy = policy
        return policy


def _sizes_on_disk(policy: str) -> dict[str, int] | None:
    """`chunk_size` and `n_action_steps` of a policy folder; None where they are not to be had without loading it."""
    path = Path(policy) / "config.json"
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text())
        sizes = {name: content[name] for name in ("chunk_size", "n_action_steps")}
    except (OSError, ValueError, KeyError, TypeError):
        return None  # loading it will say what is wrong
    return sizes if all(type(size) is int for size in sizes.values()) else None


def _generator(episode: Episode) -> np.random.Generator:
    return np.random.default_rng([episode.scene.seed, episode.scene.index])


def _box(env: gymnasium.Env) -> gymnasium.spaces.Box:
    assert isinstance(env.action_space, gymnasium.spaces.Box)
    return env.action_space
