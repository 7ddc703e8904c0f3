"""SmolVLA in LeRobot's own operations, and updates that encode the observations again: what flowrl is compared with."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from lerobot.policies.common.vla_utils import make_att_2d_masks
from torch import Tensor
from transformers import DynamicCache

from flowrl.config import TrainConfig
from flowrl.policy.interface import VelocityField
from flowrl.policy.smolvla import SmolVLAFlowPolicy
from flowrl.ppo import PPO
from flowrl.prefix import Prefix, Rows
from flowrl.rollout import Decisions

TOKEN_AXES = {"pad_mask": 1, "keys": 3, "values": 3}


class EagerSmolVLA(SmolVLAFlowPolicy):
    """LeRobot's encoder and denoising step as they are; its inputs come from LeRobot's processors.

    Attributes:
        seen: Observations and instructions of every batch that was encoded since the list was last emptied.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seen: list[tuple[Mapping[str, Any], Sequence[str]]] = []

    def encode(self, observation: Mapping[str, Any], tasks: Sequence[str]) -> Prefix:
        self.seen.append((observation, tasks))
        return lerobot_encode(self, observation, tasks)

    def velocity_field(self, prefix: Prefix, repeats: int = 1) -> VelocityField:
        many = prefix if repeats == 1 else prefix.repeat_interleave(repeats)
        cache = cache_of(many)  # one for all denoising steps, as in LeRobot's sampler
        return lambda x_t, time: denoise_step(self, many, cache, x_t, time)


@torch.no_grad()
def lerobot_encode(policy: SmolVLAFlowPolicy, observation: Mapping[str, Any], tasks: Sequence[str]) -> Prefix:
    """The prefix by LeRobot's own forward pass, up to the end of its last layer."""
    module = policy.module
    inputs = policy.prepare(observation, tasks)
    images, masks = module.prepare_images(inputs)
    text = inputs["observation.language.tokens"], inputs["observation.language.attention_mask"]
    embedded, pad_mask, block = module.model.embed_prefix(
        images, masks, *text, state=module.prepare_state(inputs)
    )
    _, cache = module.model.vlm_with_expert.forward(
        attention_mask=make_att_2d_masks(pad_mask, block),
        position_ids=torch.cumsum(pad_mask, dim=1) - 1,
        inputs_embeds=[embedded, None],
        use_cache=True,
    )
    keys, values = (
        torch.stack([getattr(layer, name) for layer in cache.layers], dim=1) for name in ("keys", "values")
    )
    return Prefix({"pad_mask": pad_mask, "keys": keys, "values": values}, TOKEN_AXES)


def cache_of(prefix: Prefix) -> DynamicCache:
    """LeRobot's cache from stored keys and values."""
    cache = DynamicCache()
    for layer in range(prefix.tensors["keys"].shape[1]):
        cache.update(prefix.tensors["keys"][:, layer], prefix.tensors["values"][:, layer], layer)
    return cache


def denoise_step(
    policy: SmolVLAFlowPolicy, prefix: Prefix, cache: DynamicCache, x_t: Tensor, time: Tensor
) -> Tensor:
    """LeRobot's velocity; x_t (B, T, D), time (B,)."""
    return policy.module.model.denoise_step(
        prefix_pad_masks=prefix.tensors["pad_mask"], past_key_values=cache, x_t=x_t, timestep=time
    )


class EagerPPO(PPO):
    """The same update, whose old log-probabilities are the sampler's: nothing is scored before the first epoch."""

    def _old_log_prob(self, decisions: Decisions, needed: bool) -> tuple[float, Tensor]:
        return 0.0, decisions.log_prob


class ObservationPrefix:
    """Stored observations in the place of a prefix: rows that are taken are encoded anew."""

    def __init__(self, policy: EagerSmolVLA, decisions: Decisions) -> None:
        """From `policy.seen`, whose batches must be the rounds of these decisions."""
        self._policy = policy
        order = np.concatenate(decisions.rounds)
        row_of = np.argsort(order)
        batches = [
            (_rows(observation, slice(len(rows))), tasks[: len(rows)])
            for (observation, tasks), rows in zip(policy.seen, decisions.rounds, strict=True)
        ]
        self._observation = _rows(_concatenate([observation for observation, _ in batches]), row_of)
        tasks = [task for _, part in batches for task in part]
        self._tasks = [tasks[row] for row in row_of]

    def __getitem__(self, rows: Rows) -> Prefix:
        index = rows.host.numpy()
        return lerobot_encode(
            self._policy, _rows(self._observation, index), [self._tasks[row] for row in index]
        )


def eager_config(config: TrainConfig) -> TrainConfig:
    """The flags of the eager way: LeRobot's own operations, float32 products, one group of environments."""
    return dataclasses.replace(
        config, velocity="exact", compile="off", update_precision="float32", pipeline=1
    )


def _rows(observation: Mapping[str, Any], index: Any) -> dict[str, Any]:
    return {
        name: _rows(value, index) if isinstance(value, Mapping) else value[index]
        for name, value in observation.items()
    }


def _concatenate(observations: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        name: _concatenate([o[name] for o in observations])
        if isinstance(value, Mapping)
        else np.concatenate([o[name] for o in observations])
        for name, value in observations[0].items()
    }
