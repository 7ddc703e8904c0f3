"""A small flow policy for states without images, for tests and teaching: everything that FlowPolicy asks for, in one file.

config.json                      {"type": "flow_mlp", and the fields of MLPConfig}
model.safetensors                weights, float32
policy_statistics.safetensors    mean and std of state and action, in the environment's units
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn

from flowrl.errors import FlowRLError
from flowrl.policy.folder import (
    CONFIG,
    OPTIONAL_FILES,
    WEIGHTS,
    check_feature_statistics,
    local_folder,
    read_json,
)
from flowrl.policy.interface import ExpertDtype, FlowPolicy, FlowSpec
from flowrl.prefix import Prefix

TYPE, STATISTICS = "flow_mlp", "policy_statistics.safetensors"
STATE, ACTION = "observation.state", "action"
SMALLEST_BATCH = 16
"""Rows of the smallest batch that the network sees. A CPU's kernels round rows of batches up to 5 or so otherwise, and then
episodes would depend on the number of environments."""
_AGAIN = "copy the whole policy folder again"


@dataclasses.dataclass(frozen=True)
class MLPConfig:
    """Sizes, each at least 1.

    Attributes:
        state_dim: S, size of the observation.
        action_dim: A, size of one target.
        chunk_size: T, targets that one decision predicts.
        n_action_steps: Targets of a chunk that are executed, at most T.
        num_denoising_steps: K, Euler steps.
        hidden: Width of the two hidden layers of the velocity field.
        num_frequencies: Random frequencies of the state's encoding.
    """

    state_dim: int
    action_dim: int
    chunk_size: int = 4
    n_action_steps: int = 4
    num_denoising_steps: int = 4
    hidden: int = 128
    num_frequencies: int = 32


class FourierFeatures(nn.Module):
    """State s (B, S) -> [s, sin(s W), cos(s W)] (B, S + 2 F) with fixed random frequencies W ~ N(0, 1).

    Source: Rahimi and Recht 2007, "Random features for large-scale kernel machines".
    """

    frequencies: Tensor

    def __init__(self, state_dim: int, num_frequencies: int) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.randn(state_dim, num_frequencies))

    def forward(self, state: Tensor) -> Tensor:
        angle = state @ self.frequencies
        return torch.cat([state, angle.sin(), angle.cos()], dim=1)


class MLPFlowPolicy(FlowPolicy):
    """Velocity field v(x_t, time, state) as a multilayer perceptron. The prefix is the encoded state; the encoding is fixed.

    The whole velocity field is trained, in float32. Instructions are not read. Made by `create` or `load`.
    """

    takes_instruction, is_small = False, True

    def __init__(
        self,
        config: MLPConfig,
        module: nn.ModuleDict,
        statistics: Mapping[str, Tensor],
        files: Mapping[str, bytes],
        *,
        device: torch.device | str = "cpu",
        rename: Mapping[str, str] | None = None,
    ) -> None:
        self.config, self.device = config, torch.device(device)
        self.spec = FlowSpec(
            config.num_denoising_steps,
            config.chunk_size,
            config.n_action_steps,
            action_dim=config.action_dim,
            padded_action_dim=config.action_dim,
        )
        self.module = module.to(self.device).eval()
        self.statistics = dict(statistics)
        self.dtypes = {"policy": "float32"}
        self._files, self._rename = dict(files), dict(rename or {})

    @classmethod
    def create(
        cls,
        config: MLPConfig,
        statistics: Mapping[str, Tensor],
        *,
        seed: int = 0,
        preset: Mapping[str, Any] | None = None,
    ) -> MLPFlowPolicy:
        """A policy with random weights; the global random state is left alone.

        Args:
            config: Sizes.
            statistics: "observation.state.mean", ".std" (S,) and "action.mean", ".std" (A,), float32.
            seed: Seed of the weights.
            preset: The flags it should be trained with, see `flowrl.preset`; saved with it.

        Raises:
            FlowRLError: A size or statistic that cannot work.
        """
        _check_config(Path(CONFIG), config)
        _check_statistics(Path(STATISTICS), config, statistics)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            module = _build(config)
        text = json.dumps({"type": TYPE, **dataclasses.asdict(config)}, indent=2) + "\n"
        files = {CONFIG: text.encode(), STATISTICS: save(dict(statistics))}
        if preset is not None:
            files["preset.json"] = (json.dumps(preset, indent=2) + "\n").encode()
        return cls(config, module, statistics, files)

    @classmethod
    def load(
        cls,
        path: Path | str,
        *,
        device: torch.device | str = "cpu",
        expert_dtype: ExpertDtype = "float32",
        rename: Mapping[str, str] | None = None,
    ) -> MLPFlowPolicy:
        """Loads a folder that `save` wrote, strictly.

        Args:
            path: Policy folder.
            device: Where the network runs.
            expert_dtype: The file holds float32, so "float32" and "loaded" are the same here.
            rename: Environment name -> "agent_pos" for the state, empty for an observation that is dropped.

        Raises:
            FlowRLError: Anything missing, damaged or of another size.
        """
        folder, _ = local_folder(path)
        config = _read_config(folder)
        statistics = _read_tensors(folder / STATISTICS)
        _check_statistics(folder / STATISTICS, config, statistics)
        with torch.random.fork_rng(devices=[]):
            module = _build(config)
        _load_weights(module, folder / WEIGHTS)
        names = [CONFIG, STATISTICS, *(name for name in OPTIONAL_FILES if (folder / name).is_file())]
        files = {name: (folder / name).read_bytes() for name in names}
        return cls(config, module, statistics, files, device=device, rename=rename)

    @torch.no_grad()
    def encode(self, observation: Mapping[str, Any], tasks: Sequence[str]) -> Prefix:
        """The normalized state's Fourier features, (B, S + 2 F).

        Raises:
            FlowRLError: If the observation is not one state of size S.
        """
        state = torch.from_numpy(np.asarray(self._find_state(observation), dtype=np.float32))
        normalized = (state - self.statistics[f"{STATE}.mean"]) / self.statistics[f"{STATE}.std"]
        return Prefix({"features": _apply(self.module["encoder"], normalized.to(self.device))})

    def velocity(self, x_t: Tensor, time: Tensor, prefix: Prefix) -> Tensor:
        inputs = torch.cat([x_t.flatten(1), time[:, None], prefix.tensors["features"]], dim=1)
        return _apply(self.module["field"], inputs).view_as(x_t)

    @torch.no_grad()
    def predict_action_chunk(
        self, observation: Mapping[str, Any], tasks: Sequence[str], x_0: Tensor
    ) -> Tensor:
        """Euler steps from time 1 (x_0) to time 0, written without flowrl's sampler."""
        prefix, x_t = self.encode(observation, tasks), x_0.to(self.device)
        dt = -1.0 / self.config.num_denoising_steps
        for step in range(self.config.num_denoising_steps):
            time = torch.full((len(x_t),), 1.0 + step * dt, device=self.device)
            x_t = x_t + dt * self.velocity(x_t, time, prefix)
        return self.unnormalize(x_t)

    def normalize(self, actions: Tensor) -> Tensor:
        mean, std = (self.statistics[f"{ACTION}.{name}"].to(actions.device) for name in ("mean", "std"))
        return (actions - mean) / std

    def unnormalize(self, actions: Tensor) -> Tensor:
        return actions.cpu() * self.statistics[f"{ACTION}.std"] + self.statistics[f"{ACTION}.mean"]

    def prefix_features(self, prefix: Prefix) -> Tensor:
        return prefix.tensors["features"].detach()

    def trainable_parameters(self) -> dict[str, nn.Parameter]:
        return dict(self.module.named_parameters())

    def save(self, folder: Path | str, *, final_folder: Path | str | None = None) -> None:
        folder = Path(folder)
        for name, content in self._files.items():
            (folder / name).write_bytes(content)
        weights = {
            name: value.detach().cpu().contiguous() for name, value in self.module.state_dict().items()
        }
        (folder / WEIGHTS).write_bytes(save(weights, {"format": "pt"}))

    def _find_state(self, observation: Mapping[str, Any]) -> Any:
        """The one entry of the observation that is called agent_pos after renaming."""
        entries: dict[str, Any] = {}
        for name, value in observation.items():
            entries.update(value if isinstance(value, Mapping) else {name: value})
        kept = {self._rename.get(name, name): value for name, value in entries.items()}
        kept.pop("", None)
        if set(kept) != {"agent_pos"} or not set(self._rename) <= set(entries):
            raise FlowRLError(
                f"observations do not match: the environment gives {', '.join(sorted(entries))}, the policy takes "
                f"agent_pos alone, --rename names {', '.join(self._rename) or 'nothing'}; "
                "map the state and drop the rest with --rename (NAME=agent_pos, NAME=)"
            )
        state = kept["agent_pos"]
        if np.shape(state)[1:] != (self.config.state_dim,):
            raise FlowRLError(
                f"the state has size {np.shape(state)[1:]} in the environment, ({self.config.state_dim},) in the policy; "
                "use the environment that the policy was trained for"
            )
        return state


def _apply(module: nn.Module, inputs: Tensor) -> Tensor:
    """The module on rows (B, ...), padded by zeros to `SMALLEST_BATCH`."""
    missing = max(0, SMALLEST_BATCH - len(inputs))
    return module(nn.functional.pad(inputs, (0, 0, 0, missing)))[: len(inputs)]


def _build(config: MLPConfig) -> nn.ModuleDict:
    chunk = config.chunk_size * config.action_dim
    num_inputs = chunk + 1 + config.state_dim + 2 * config.num_frequencies
    field = nn.Sequential(
        nn.Linear(num_inputs, config.hidden),
        nn.SiLU(),
        nn.Linear(config.hidden, config.hidden),
        nn.SiLU(),
        nn.Linear(config.hidden, chunk),
    )
    encoder = FourierFeatures(config.state_dim, config.num_frequencies)
    return nn.ModuleDict({"encoder": encoder, "field": field})


def _read_config(folder: Path) -> MLPConfig:
    values = read_json(folder, CONFIG, _AGAIN)
    names = {field.name for field in dataclasses.fields(MLPConfig)}
    if values.pop("type", None) != TYPE or set(values) != names:
        raise FlowRLError(
            f"{folder / CONFIG}: must hold type {TYPE!r} and {', '.join(sorted(names))}, nothing else; {_AGAIN}"
        )
    config = MLPConfig(**values)
    _check_config(folder / CONFIG, config)
    return config


def _check_config(file: Path, config: MLPConfig) -> None:
    for name, value in dataclasses.asdict(config).items():
        if type(value) is not int or value < 1:
            raise FlowRLError(f"{file}: {name} is {value!r}; it must be a whole number of at least 1")
    if config.n_action_steps > config.chunk_size:
        raise FlowRLError(
            f"{file}: n_action_steps {config.n_action_steps} must be at most chunk_size {config.chunk_size}"
        )


def _check_statistics(file: Path, config: MLPConfig, statistics: Mapping[str, Tensor]) -> None:
    sizes = {STATE: config.state_dim, ACTION: config.action_dim}
    unknown = set(statistics) - {f"{name}.{kind}" for name in sizes for kind in ("mean", "std")}
    if unknown:
        raise FlowRLError(f"{file}: unknown statistics {', '.join(sorted(unknown))}; {_AGAIN}")
    for name, size in sizes.items():
        feature = {"type": "STATE", "shape": (size,)}
        check_feature_statistics(name, feature, file, {"STATE": "MEAN_STD"}, statistics)
        if not (statistics[f"{name}.std"] > 0).all():
            raise FlowRLError(f"{file}: {name}.std must be greater than 0; leave out what never changes")


def _read_tensors(file: Path) -> dict[str, Tensor]:
    if not file.is_file():
        raise FlowRLError(f"{file} is missing; {_AGAIN}")
    try:
        tensors = load_file(file)
    except (SafetensorError, OSError) as error:
        raise FlowRLError(f"{file} is truncated or damaged ({error}); {_AGAIN}") from error
    for name, tensor in tensors.items():
        if tensor.dtype != torch.float32:
            raise FlowRLError(f"{file}: {name} is {tensor.dtype}; float32 is needed")
    return tensors


def _load_weights(module: nn.Module, file: Path) -> None:
    stored, own = _read_tensors(file), module.state_dict()
    missing, unexpected = sorted(own.keys() - stored.keys()), sorted(stored.keys() - own.keys())
    wrong = sorted(name for name in own.keys() & stored.keys() if own[name].shape != stored[name].shape)
    if missing or unexpected or wrong:
        raise FlowRLError(
            f"{file}: missing {missing}, unexpected {unexpected}, of another shape {wrong}; "
            "use the file that belongs to this config.json"
        )
    module.load_state_dict(stored)
