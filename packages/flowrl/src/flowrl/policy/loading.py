"""Opening any policy folder: its config.json names the kind of policy, and that the class that loads it."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path

import torch

from flowrl.checkpoint import check_sampler, resolve_checkpoint
from flowrl.errors import FlowRLError
from flowrl.policy.folder import CONFIG, local_folder, read_json
from flowrl.policy.interface import ExpertDtype, FlowPolicy

ADAPTERS = {
    "flow_mlp": "flowrl.policy.mlp:MLPFlowPolicy",
    "pi0": "flowrl.policy.pi0:PI0FlowPolicy",
    "pi05": "flowrl.policy.pi0:PI05FlowPolicy",
    "smolvla": "flowrl.policy.smolvla:SmolVLAFlowPolicy",
}
"""Value of "type" in config.json -> module:class. Imported when it is needed, since LeRobot takes seconds to import."""


def load_policy(
    path: Path | str,
    *,
    device: torch.device | str = "cpu",
    expert_dtype: ExpertDtype = "float32",
    rename: Mapping[str, str] | None = None,
) -> FlowPolicy:
    """Loads a policy folder, a checkpoint, or a hub id, strictly.

    Args:
        path: Policy folder or checkpoint (no network traffic), or hub id.
        device: Where the network runs.
        expert_dtype: "float32" for the trained weights, or "loaded" for the dtype of their file.
        rename: Environment name -> policy name of cameras and state; an empty target drops a camera.

    Raises:
        FlowRLError: On anything missing, damaged or unsupported, for example a type that is not in `ADAPTERS`; or a
            checkpoint that would sample in another way than it was trained.
    """
    path = resolve_checkpoint(path)
    folder, _ = local_folder(path)
    config = read_json(folder, CONFIG, "copy the whole policy folder again")
    kind = config.get("type")
    if kind not in ADAPTERS:
        raise FlowRLError(
            f"{folder / CONFIG}: type {kind!r} is no policy that flowrl knows; it takes {', '.join(ADAPTERS)}"
        )
    module, _, name = ADAPTERS[kind].partition(":")
    adapter = getattr(importlib.import_module(module), name)
    policy: FlowPolicy = adapter.load(path, device=device, expert_dtype=expert_dtype, rename=rename)
    check_sampler(folder, policy)
    return policy
