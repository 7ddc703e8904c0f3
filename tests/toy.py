"""A toy flow policy for tests: the velocity field is a small MLP, the prefix is the state itself."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from flowrl.policy.interface import FlowPolicy, FlowSpec
from flowrl.prefix import Prefix
from flowrl.vector_env import make_vector_env
from gymnasium.vector import VectorEnv
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
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


def make_toy_envs(num_envs: int, env_id: str = "toy_env:ToyReach-v0", **env_kwargs: Any) -> VectorEnv:
    """A vector environment of toy environments in processes of their own."""
    return make_vector_env(env_id, num_envs, env_kwargs)
