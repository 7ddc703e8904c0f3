"""A toy flow policy for tests: the velocity field is a small MLP, the prefix is the state itself."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium.vector import VectorEnv
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from flowrl.flow.sampler import episode_noise, sample_chain
from flowrl.policy.interface import FlowPolicy, FlowSpec
from flowrl.policy.noise import NoiseModel
from flowrl.prefix import Prefix
from flowrl.rollout import Decisions, pad_to_two
from flowrl.vector_env import make_vector_env
from toy_env import ACTION_DIM, CHUNK_SIZE

SPEC = FlowSpec(
    num_denoising_steps=4,
    chunk_size=CHUNK_SIZE,
    n_action_steps=CHUNK_SIZE,
    action_dim=ACTION_DIM,
    padded_action_dim=3,
)
HIDDEN = 32
SCALE, SHIFT = 0.5, 0.1
"""Actions in the environment's units are 0.5 * normalized + 0.1."""


class ToyPolicy(FlowPolicy):
    """Velocity MLP over the noisy chunk, the time and the state; a frozen linear layer encodes the state."""

    def __init__(self, seed: int = 0, device: str = "cpu") -> None:
        self.spec = SPEC
        self.device = torch.device(device)
        generator_state = torch.get_rng_state()
        torch.manual_seed(seed)
        chunk = SPEC.chunk_size * SPEC.padded_action_dim
        self.module = nn.ModuleDict(
            {
                "encoder": nn.Linear(ACTION_DIM, ACTION_DIM),
                "field": nn.Sequential(
                    nn.Linear(chunk + 1 + ACTION_DIM, HIDDEN),
                    nn.SiLU(),
                    nn.Linear(HIDDEN, HIDDEN),
                    nn.SiLU(),
                    nn.Linear(HIDDEN, chunk),
                ),
            }
        ).to(self.device)
        torch.set_rng_state(generator_state)
        with torch.no_grad():
            self.module["encoder"].weight.copy_(torch.eye(ACTION_DIM))
            self.module["encoder"].bias.zero_()
        self.module.eval()
        self.module["encoder"].requires_grad_(False)

    @torch.no_grad()
    def encode(self, observation: Mapping[str, Any], tasks: Sequence[str]) -> Prefix:
        state = torch.as_tensor(observation["agent_pos"], dtype=torch.float32, device=self.device)
        assert len(tasks) == len(state) and all(tasks)
        return Prefix({"state": self.module["encoder"](state)})

    def velocity(self, x_t: Tensor, time: Tensor, prefix: Prefix) -> Tensor:
        inputs = torch.cat([x_t.flatten(1), time[:, None], prefix.tensors["state"]], dim=1)
        return self.module["field"](inputs).view_as(x_t)

    @torch.no_grad()
    def predict_action_chunk(
        self, observation: Mapping[str, Any], tasks: Sequence[str], x_0: Tensor
    ) -> Tensor:
        """The "library's own" sampler: Euler steps of LeRobot's loop, written out."""
        prefix, x_t, dt = (
            self.encode(observation, tasks),
            x_0.to(self.device),
            -1.0 / SPEC.num_denoising_steps,
        )
        for step in range(SPEC.num_denoising_steps):
            x_t = x_t + dt * self.velocity(x_t, torch.full((len(x_t),), 1.0 + step * dt), prefix)
        return self.unnormalize(x_t[..., :ACTION_DIM])

    def normalize(self, actions: Tensor) -> Tensor:
        return (actions - SHIFT) / SCALE

    def unnormalize(self, actions: Tensor) -> Tensor:
        return (actions * SCALE + SHIFT).cpu()

    def prefix_features(self, prefix: Prefix) -> Tensor:
        return prefix.tensors["state"].detach().float()

    def trainable_parameters(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.module.named_parameters() if name.startswith("field.")}

    def save(self, folder: Path | str, *, final_folder: Path | str | None = None) -> None:
        tensors = {name: tensor.cpu().contiguous() for name, tensor in self.module.state_dict().items()}
        save_file(tensors, Path(folder) / "model.safetensors")
        (Path(folder) / "config.json").write_text(json.dumps({"type": "toy"}))


def load_toy(path: Path | str, device: str = "cpu") -> ToyPolicy:
    """A ToyPolicy from a folder that `save` wrote; a fresh one for an empty folder."""
    policy = ToyPolicy(device=device)
    weights = Path(path) / "model.safetensors"
    if weights.is_file():
        policy.module.load_state_dict(load_file(weights))
    return policy


def toy_decisions(
    policy: ToyPolicy, noise: NoiseModel, count: int, *, seed: int = 0, round_size: int = 8
) -> Decisions:
    """One-decision episodes in random states, sampled without an environment, in rounds of `round_size`."""
    generator = torch.Generator().manual_seed(seed)
    state = torch.empty(count, ACTION_DIM).uniform_(-1, 1, generator=generator)
    drawn = [episode_noise(seed * 100_003 + number, 0, SPEC, noise.num_elements) for number in range(count)]
    rounds = np.split(np.arange(count), range(round_size, count, round_size))
    prefixes, chains = [], []
    for rows in rounds:
        chosen = pad_to_two(rows.tolist())
        prefix = policy.encode({"agent_pos": state[chosen].numpy()}, ["toy"] * len(chosen))
        x_0 = torch.stack([drawn[row][0] for row in chosen]).to(policy.device)
        eps = torch.stack([e for row in chosen if (e := drawn[row][1]) is not None]).to(policy.device)
        chain = sample_chain(policy, prefix, x_0, noise, eps)
        assert chain.log_prob is not None
        prefixes.append(prefix[: len(rows)])
        chains.append((chain.states[: len(rows)], chain.log_prob[: len(rows)]))
    prefix = Prefix.concatenate(prefixes)
    return Decisions(
        prefix=prefix,
        states=torch.cat([states for states, _ in chains]),
        log_prob=torch.cat([log_prob for _, log_prob in chains]).clone(),
        features=policy.prefix_features(prefix),
        num_executed=torch.full((count,), SPEC.n_action_steps, device=policy.device),
        episode=np.arange(count),
        order=np.zeros(count, dtype=np.int64),
        rounds=rounds,
    )


def make_toy_envs(num_envs: int, env_id: str = "toy_env:ToyReach-v0", **env_kwargs: Any) -> VectorEnv:
    """A vector environment of toy environments in processes of their own."""
    return make_vector_env(env_id, num_envs, env_kwargs, SPEC)


def make_toy_groups(
    sizes: Sequence[int], env_id: str = "toy_env:ToyReach-v0", **env_kwargs: Any
) -> list[VectorEnv]:
    """The same in groups of these sizes."""
    return [make_toy_envs(size, env_id, **env_kwargs) for size in sizes]
