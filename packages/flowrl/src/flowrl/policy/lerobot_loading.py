"""Building one of LeRobot's policies from its folder: strictly, without network, in the dtypes of the file."""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from draccus.utils import DraccusException
from lerobot.configs import PreTrainedConfig
from lerobot.policies.factory import get_policy_class, make_pre_post_processors
from lerobot.utils.constants import OBS_IMAGES, OBS_STATE
from safetensors.torch import load_file
from torch import Tensor, nn

from flowrl.errors import FlowRLError
from flowrl.policy.folder import CONFIG, PolicyFolder


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """LeRobot prints and warns while it builds and loads; what is wrong is told by flowrl's own checks."""
    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        root.setLevel(level)


def read_config(
    folder: PolicyFolder, device: torch.device, kind: str, unsupported: Mapping[str, Callable[[Any], bool]]
) -> Any:
    """LeRobot's config object of a folder, for `device`, without compilation.

    Args:
        folder: The folder.
        device: Where the network will run.
        kind: The `type` that config.json must have.
        unsupported: What a policy of this kind may ask for and flowrl cannot do, by name: whether a config does.

    Raises:
        FlowRLError: another type, a field that this LeRobot does not know, or something unsupported.
    """
    if folder.config.get("type") != kind:
        raise FlowRLError(
            f"{folder.path} is a {folder.config.get('type')!r} policy; this adapter takes {kind}"
        )
    try:
        config: Any = PreTrainedConfig.from_pretrained(str(folder.path))
    except (DraccusException, ValueError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise FlowRLError(f"{folder.path / CONFIG} does not fit this LeRobot version: {reason}") from error
    shared = {
        "rtc_config": lambda config: config.rtc_config is not None and config.rtc_config.enabled,
        "n_obs_steps>1": lambda config: config.n_obs_steps != 1,
    }
    for name, is_used in {**unsupported, **shared}.items():
        if is_used(config):
            raise FlowRLError(
                f"{folder.path / CONFIG} uses {name}, which flowrl does not support; train without it"
            )
    if config.action_feature is None:
        raise FlowRLError(f"{folder.path / CONFIG} has no output feature 'action'")
    config.compile_model = False
    config.device = str(device)
    return config


def build_module(folder: PolicyFolder, config: Any) -> Any:
    """LeRobot's policy of a config; its weights are random."""
    with quiet(), torch.random.fork_rng(devices=[]):  # it draws random weights that the file replaces
        try:
            return get_policy_class(config.type)(config)
        except (OSError, ValueError, KeyError, AttributeError, RuntimeError) as error:
            reason = " ".join(str(error).split())[:300]
            raise FlowRLError(
                f"LeRobot cannot build the policy from {folder.path / CONFIG} and {folder.vlm} ({reason}); "
                "copy the whole policy folder again"
            ) from error


def load_weights(
    module: nn.Module,
    file: Path,
    recast: Sequence[str],
    rename: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] | None = None,
) -> dict[str, torch.dtype]:
    """Loads strictly, every tensor of `recast` in the dtype of the file. Returns the file's dtypes.

    Args:
        module: The policy.
        file: Its weights.
        recast: Beginnings of names. LeRobot's constructor chooses dtypes by itself; these get the file's before the
            values are copied.
        rename: For files with names of an earlier version: the tensors under the present names.

    Raises:
        FlowRLError: a weight is missing, unexpected, or of another shape.
    """
    own = module.state_dict()
    tensors: Mapping[str, Tensor] = load_file(file)
    if rename is not None and not tensors.keys() <= own.keys():
        tensors = rename(tensors)
    stored = set(tensors)
    present = {own[name].data_ptr() for name in stored & own.keys()}
    missing = sorted(name for name in own.keys() - stored if own[name].data_ptr() not in present)
    unexpected = sorted(stored - own.keys())
    if missing or unexpected:
        remedy = "use the file that belongs to this config.json"
        if any(name.startswith(("normalize_", "unnormalize_")) for name in unexpected):
            remedy = "this is an old LeRobot checkpoint: convert it by lerobot.processor.migrate_policy_normalization"
        raise FlowRLError(f"{file}: missing {_some(missing)}, unexpected {_some(unexpected)}; {remedy}")
    wrong = sorted(name for name in stored if tensors[name].shape != own[name].shape)
    if wrong:
        raise FlowRLError(
            f"{file}: wrong shapes, {wrong[0]} is {tuple(tensors[wrong[0]].shape)} instead of "
            f"{tuple(own[wrong[0]].shape)}, {len(wrong)} in all; use the file that belongs to this config.json"
        )
    dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
    named = dict(module.named_parameters())
    for name, dtype in dtypes.items():
        if name in named and name.startswith(tuple(recast)):
            named[name].data = named[name].data.to(dtype)
    module.load_state_dict(tensors, strict=False)
    return dtypes


def load_processors(
    folder: PolicyFolder, config: Any, device: torch.device, rename: Mapping[str, str]
) -> tuple[Any, Any]:
    """LeRobot's processors of a folder, with its own tokenizer, for `device`, and with cameras and state renamed."""
    saved: Mapping[str, str] = next(
        (
            step["config"]["rename_map"]
            for step in folder.preprocessor["steps"]
            if step.get("registry_name") == "rename_observations_processor"
        ),
        {},
    )
    rename_map = {**saved, **{_feature_name(old): _feature_name(new) for old, new in rename.items()}}
    return make_pre_post_processors(
        policy_cfg=config,
        pretrained_path=str(folder.path),
        preprocessor_overrides={
            "tokenizer_processor": {"tokenizer_name": str(folder.vlm)},
            "device_processor": {"device": str(device)},
            "rename_observations_processor": {"rename_map": rename_map},
        },
    )


def _some(names: Sequence[str], limit: int = 5) -> str:
    if not names:
        return "none"
    return f"{len(names)} keys ({', '.join(names[:limit])}{', ...' if len(names) > limit else ''})"


def _feature_name(name: str) -> str:
    if not name or name.startswith("observation."):
        return name
    return OBS_STATE if name == "agent_pos" else f"{OBS_IMAGES}.{name}"
