"""A saved policy as LeRobot alone loads and runs it, to compare with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lerobot.configs import PreTrainedConfig
from lerobot.envs.utils import preprocess_observation
from lerobot.policies.factory import get_policy_class, make_pre_post_processors
from torch import Tensor

from flowrl.policy.lerobot_loading import quiet


@torch.no_grad()
def reload_with_lerobot(
    folder: Path | str,
    observation: Mapping[str, Any],
    tasks: Sequence[str],
    x_0: Tensor,
    *,
    device: torch.device,
    rename_map: Mapping[str, str],
) -> tuple[dict[str, Tensor], Tensor]:
    """State dict of the module, and the chunk (B, T, A) in the environment's units, on the CPU.

    Args:
        folder: Policy folder.
        observation, tasks, x_0: As in `FlowPolicy.predict_action_chunk`.
        device: Where the network runs.
        rename_map: LeRobot's feature names in the environment -> in the policy; an empty target drops a camera.
    """
    config: Any = PreTrainedConfig.from_pretrained(str(folder))
    config.device = str(device)
    with quiet():
        module: Any = get_policy_class(config.type).from_pretrained(folder, config=config, strict=True)
    preprocessor, postprocessor = make_pre_post_processors(
        module.config,
        pretrained_path=str(folder),
        preprocessor_overrides={
            "device_processor": {"device": str(device)},
            "rename_observations_processor": {"rename_map": dict(rename_map)},
        },
    )
    batch: dict[str, Any] = preprocess_observation(dict(observation))
    batch = {name: value for name, value in batch.items() if rename_map.get(name, name)}
    batch["task"] = list(tasks)
    chunk = module.predict_action_chunk(preprocessor(batch), noise=x_0.to(device))
    return module.state_dict(), postprocessor(chunk)
