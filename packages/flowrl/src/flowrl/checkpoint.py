"""Checkpoints: a LeRobot policy folder, plus what training needs to go on, written atomically and without pickle.

    config.json, model.safetensors, policy_*.json, policy_*.safetensors, vlm/   LeRobot's own, loads unchanged
    flowrl.json          sampler, dtypes, versions, optimizer settings, the caller's record
    flowrl.safetensors   critic, sigma, optimizer moments, the caller's tensors

A checkpoint is written into a hidden folder beside its target and renamed. An old one of the same name is first renamed
to `.<name>.old`; a reader that finds the target missing takes that one, so a complete checkpoint can be reached at every
moment, whenever the writer is killed.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from flowrl.errors import FlowRLError
from flowrl.policy.critic import Critic
from flowrl.policy.folder import CONFIG, PREPROCESSOR, TOKENIZER, VLM, replace_paths
from flowrl.policy.interface import FlowPolicy
from flowrl.policy.noise import NoiseModel
from flowrl.progress import tell

RECORD, STATE = "flowrl.json", "flowrl.safetensors"
_FORMAT = 1
_WITHOUT_IT = "a run whose damaged checkpoint is removed resumes from the one before"
_PACKAGES = ("flowrl", "lerobot", "torch", "transformers", "safetensors", "gymnasium", "numpy")


@dataclass(frozen=True)
class TrainingState:
    """What `save_checkpoint` stored beside the policy.

    Attributes:
        meta: The caller's record (iteration, scene indices, ...).
        sampler: Settings of the noise model and the denoising; empty if none was saved.
        tensors: All stored tensors by name, on the CPU.
        optimizers: Parameter groups and plain values of each optimizer.
        folder: Where it was read from.
    """

    meta: Mapping[str, Any]
    sampler: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    optimizers: Mapping[str, Any]
    folder: Path

    def restore_module(self, name: str, module: nn.Module) -> None:
        """Loads the module saved as `name` ("critic", "noise"), strictly.

        Raises:
            FlowRLError: If it was not saved, or has other tensors or shapes.
        """
        stored, own = self.group(name), module.state_dict()
        if {k: v.shape for k, v in stored.items()} != {k: v.shape for k, v in own.items()}:
            raise FlowRLError(
                f"{self.folder / STATE} holds {name} with {_shapes(stored)}, this run has {_shapes(own)}; "
                "resume with the settings of the saved run"
            )
        module.load_state_dict(stored)

    def restore_optimizer(self, name: str, optimizer: torch.optim.Optimizer) -> None:
        """Loads moments, step counts and settings of the optimizer saved as `name`.

        Raises:
            FlowRLError: If it was not saved, or was made for other parameters.
        """
        if name not in self.optimizers:
            raise FlowRLError(
                f"{self.folder / RECORD} has no optimizer {name!r}; it has {sorted(self.optimizers)}"
            )
        record = self.optimizers[name]
        sizes = [len(group["params"]) for group in record["param_groups"]]
        own = optimizer.state_dict()["param_groups"]
        if sizes != [len(group["params"]) for group in own]:
            raise FlowRLError(
                f"optimizer {name!r} in {self.folder} has {sizes} parameters per group, this run "
                f"{[len(group['params']) for group in own]}; resume with the settings of the saved run"
            )
        state: dict[int, dict[str, Any]] = {
            int(index): dict(values) for index, values in record["values"].items()
        }
        for key, tensor in self.group(f"optimizer.{name}").items():
            index, _, field = key.partition(".")
            state.setdefault(int(index), {})[field] = tensor
        groups = [
            {
                key: tuple(value) if isinstance(own_group.get(key), tuple) else value
                for key, value in group.items()
            }
            for group, own_group in zip(record["param_groups"], own)
        ]
        optimizer.load_state_dict({"state": state, "param_groups": groups})

    def group(self, name: str) -> dict[str, Tensor]:
        """The stored tensors whose names start with `<name>.`, without that prefix."""
        prefix = f"{name}."
        return {
            key.removeprefix(prefix): value for key, value in self.tensors.items() if key.startswith(prefix)
        }


def save_checkpoint(
    folder: Path | str,
    policy: FlowPolicy,
    *,
    noise: NoiseModel | None = None,
    critic: Critic | None = None,
    optimizers: Mapping[str, torch.optim.Optimizer] | None = None,
    tensors: Mapping[str, Tensor] | None = None,
    meta: Mapping[str, Any] | None = None,
) -> Path:
    """Writes a checkpoint atomically; a checkpoint already there is replaced.

    Args:
        folder: Target; its parent is created.
        policy: The policy.
        noise, critic: Saved as modules "noise" and "critic".
        optimizers: Optimizers by name.
        tensors: Further tensors (random states, statistics), saved as they are.
        meta: A JSON record of the caller.

    Returns:
        The folder.

    Raises:
        FlowRLError: If the target is a file or no checkpoint, or cannot be written; whatever was there stays.
    """
    folder = Path(folder)
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir()) and not _is_checkpoint(folder)):
        raise FlowRLError(f"{folder} exists and is no flowrl checkpoint; choose another place or remove it")
    stored, optimizer_records = _collect_tensors(noise, critic, optimizers or {}, tensors or {})
    record = {
        "format": _FORMAT,
        "meta": dict(meta or {}),
        "sampler": _sampler_record(policy, noise),
        "dtypes": getattr(policy, "dtypes", {}),
        "velocity": policy.velocity_mode,
        "compiled": policy.compiled,
        "versions": {name: _version(name) for name in _PACKAGES},
        "optimizers": optimizer_records,
    }
    text = json.dumps(record, indent=2, allow_nan=False) + "\n"
    temporary = folder.parent / f".{folder.name}.tmp-{os.getpid()}"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _clean_up(folder)
        temporary.mkdir()
        policy.save(temporary, final_folder=folder)
        save_file(stored, temporary / STATE, {"format": "pt"})
        (temporary / RECORD).write_text(text)
        _sync_tree(temporary)
        _put_in_place(temporary, folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise FlowRLError(
            f"checkpoint {folder} could not be written ({error}); free space or fix the rights, the one before is intact"
        ) from error
    return folder


def resolve_checkpoint(path: Path | str) -> Path:
    """The folder to read: `path`, or the one that a killed writer had put aside under `.<name>.old`."""
    path = Path(path)
    aside = _aside(path)
    return aside if not path.exists() and aside.is_dir() else path


def load_training_state(path: Path | str) -> TrainingState:
    """Reads what `save_checkpoint` stored beside the policy.

    Raises:
        FlowRLError: If a file is missing or damaged, or comes from a newer version.
    """
    folder = resolve_checkpoint(path)
    record = _read_record(folder)
    try:
        tensors = load_file(folder / STATE)
    except (SafetensorError, OSError) as error:
        raise FlowRLError(f"{folder} is damaged ({error}); {_WITHOUT_IT}") from error
    return TrainingState(record["meta"], record["sampler"], tensors, record["optimizers"], folder)


def check_sampler(folder: Path, policy: FlowPolicy) -> None:
    """A checkpoint's policy samples as its flowrl.json says it did when it was saved. A dtype that differs is told.

    Raises:
        FlowRLError: config.json gives another number of denoising steps, or other sizes; or flowrl.json is damaged.
    """
    if not (folder / RECORD).is_file():
        return
    record = _read_record(folder)
    for name, value in _sampler_record(policy, None).items():
        stored = record["sampler"].get(name, value)
        if stored != value:
            raise FlowRLError(
                f"{folder}: {CONFIG} gives {name} {value}, and {RECORD} {stored}, with which it was trained; "
                f"set it back in {CONFIG}, or remove {RECORD} and {STATE} for a policy of its own"
            )
    own = getattr(policy, "dtypes", {})
    for part, stored in record.get("dtypes", {}).items():
        if part in own and own[part] != stored:
            tell(f"{folder}: the {part} runs in {own[part]}; it was saved from {stored}")


def changed_noise(path: Path | str, noise: NoiseModel) -> dict[str, tuple[Any, Any]]:
    """Settings of the exploration noise that differ from those a checkpoint was trained with: name -> (stored, now)."""
    folder = resolve_checkpoint(path)
    if not (folder / RECORD).is_file():
        return {}
    stored = _read_record(folder)["sampler"]
    return {
        name: (stored[name], value)
        for name, value in noise.settings().items()
        if name in stored and stored[name] != value
    }


def read_meta(path: Path | str) -> Mapping[str, Any] | None:
    """The caller's record in a checkpoint, without its tensors; None where there is no checkpoint.

    Raises:
        FlowRLError: If a file is missing or damaged, or comes from a newer version.
    """
    folder = resolve_checkpoint(path)
    return _read_record(folder)["meta"] if folder.is_dir() else None


def list_checkpoints(out: Path) -> list[Path]:
    """The checkpoints in a run's folder, also those that a killed writer had put aside: `out/last`, `out/iter_0005`, ..."""
    matches = [re.fullmatch(r"\.?(last|best|iter_\d+)(\.old)?", path.name) for path in out.iterdir()]
    return [out / name for name in sorted({match[1] for match in matches if match})]


def _read_record(folder: Path) -> dict[str, Any]:
    for name in (RECORD, STATE):
        if not (folder / name).is_file():
            raise FlowRLError(
                f"{folder / name} is missing; this folder is no flowrl checkpoint to resume from. {_WITHOUT_IT}"
            )
    try:
        record = json.loads((folder / RECORD).read_text())
    except (ValueError, OSError) as error:
        raise FlowRLError(f"{folder} is damaged ({error}); {_WITHOUT_IT}") from error
    found = record.get("format") if isinstance(record, dict) else None
    if found != _FORMAT:
        raise FlowRLError(f"{folder / RECORD} has format {found}, this flowrl reads {_FORMAT}; update flowrl")
    return record


def relocate(folder: Path | str, vlm_path: str | None = None) -> str:
    """Points LeRobot's references to the VLM folder to where it lies now.

    flowrl itself never needs this; LeRobot's own tools do after a policy folder has moved.

    Args:
        folder: Policy folder with a `vlm` subfolder.
        vlm_path: What to write, e.g. a path relative to the repository's root; the present absolute path by default.

    Returns:
        The path written.

    Raises:
        FlowRLError: If the folder is no policy folder or brings no VLM.
    """
    folder = Path(folder)
    for name in (CONFIG, PREPROCESSOR, f"{VLM}/{TOKENIZER}"):
        if not (folder / name).is_file():
            raise FlowRLError(
                f"{folder / name} is missing; give a policy folder that brings its VLM in {VLM}/"
            )
    path = vlm_path or str((folder / VLM).absolute())
    names = (CONFIG, PREPROCESSOR)
    for name, content in replace_paths({name: (folder / name).read_bytes() for name in names}, path).items():
        temporary = folder / f".{name}.tmp"
        temporary.write_bytes(content)
        temporary.replace(folder / name)
    return path


def _collect_tensors(
    noise: NoiseModel | None,
    critic: Critic | None,
    optimizers: Mapping[str, torch.optim.Optimizer],
    tensors: Mapping[str, Tensor],
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """All tensors by name, each a copy of its own on the CPU (so none share memory), and the optimizers' plain values."""
    named: dict[str, Tensor] = dict(tensors)
    for name, module in (("noise", noise), ("critic", critic)):
        if module is not None:
            named.update({f"{name}.{key}": value for key, value in module.state_dict().items()})
    records = {}
    for name, optimizer in optimizers.items():
        state = optimizer.state_dict()
        values: dict[str, dict[str, Any]] = {}
        for index, fields in state["state"].items():
            for field, value in fields.items():
                if isinstance(value, Tensor):
                    named[f"optimizer.{name}.{index}.{field}"] = value
                else:
                    values.setdefault(str(index), {})[field] = value
        records[name] = {"param_groups": state["param_groups"], "values": values}
    return {key: value.detach().to("cpu", copy=True).contiguous() for key, value in named.items()}, records


def _sampler_record(policy: FlowPolicy, noise: NoiseModel | None) -> dict[str, Any]:
    spec = policy.spec
    record: dict[str, Any] = {
        "num_denoising_steps": spec.num_denoising_steps,
        "chunk_size": spec.chunk_size,
        "n_action_steps": spec.n_action_steps,
        "action_dim": spec.action_dim,
        "padded_action_dim": spec.padded_action_dim,
    }
    if noise is not None:
        record |= noise.settings()
        if not noise.needs_features:
            record["sigma"] = noise.sigma().detach().tolist()
    return record


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _aside(folder: Path) -> Path:
    return folder.parent / f".{folder.name}.old"


def _is_checkpoint(folder: Path) -> bool:
    return all((folder / name).is_file() for name in (RECORD, STATE))


def _clean_up(folder: Path) -> None:
    """Removes what a killed writer left, and takes a checkpoint put aside back into its place."""
    aside = _aside(folder)
    if aside.is_dir():
        if folder.exists():
            shutil.rmtree(aside)
        else:
            aside.rename(folder)
    for stale in folder.parent.glob(f".{folder.name}.tmp-*"):
        shutil.rmtree(stale)


def _put_in_place(temporary: Path, folder: Path) -> None:
    aside = _aside(folder)
    if folder.exists():
        folder.rename(aside)
    temporary.rename(folder)
    _sync(folder.parent)
    if aside.exists():
        shutil.rmtree(aside)


def _sync_tree(folder: Path) -> None:
    for directory, _, files in folder.walk():
        for file in files:
            _sync(directory / file)
        _sync(directory)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _shapes(tensors: Mapping[str, Tensor]) -> str:
    return "{" + ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in tensors.items()) + "}"
