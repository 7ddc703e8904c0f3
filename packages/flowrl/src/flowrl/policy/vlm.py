"""SmolVLA's language model run on an embedded prefix in LeRobot's own operations, for `exact`; see `expert`.

LeRobot runs the last layer to its end, of which only keys and values are read; this does not.

Source of the arithmetic: `SmolVLMWithExpertModel.forward`, LeRobot 0.6.1.
"""

from __future__ import annotations

from typing import Any

import torch
from lerobot.policies.common.vla_utils import make_att_2d_masks
from torch import Tensor

from flowrl.policy.attention import Attention, layer_input, prepared_layer, projections, rotary


def keys_and_values(network: Any, hidden: Tensor, pad_mask: Tensor, block: Tensor) -> tuple[Tensor, Tensor]:
    """The language model's keys and values (B, L, H, P, head_dim) in its dtype; of the last layer nothing else is computed.

    Args:
        network: LeRobot's `SmolVLMWithExpertModel`.
        hidden: (B, P, W), the embedded prefix.
        pad_mask: (B, P) bool, its valid tokens.
        block: (B, P) bool, True where a token and those after it are not seen by the ones before.
    """
    head_dim = network.vlm.config.text_config.head_dim
    context = Attention(
        network.num_attention_heads,
        network.num_key_value_heads,
        head_dim,
        repeats=1,
        table=rotary(torch.cumsum(pad_mask, dim=1) - 1, head_dim),
        visible=make_att_2d_masks(pad_mask, block)[:, None],
    )
    keys, values = [], []
    layers = network.get_vlm_model().text_model.layers[: network.num_vlm_layers]
    for number, layer in enumerate(layers, 1):
        project = projections(layer.self_attn, context)

        def attend(normed: Tensor, project: Any = project) -> Tensor:
            query, key, value = project(normed)
            keys.append(key.transpose(1, 2))
            values.append(value.transpose(1, 2))
            return context.attend(query, context.keys(key), context.values(value))

        if number < len(layers):
            hidden = prepared_layer(layer, attend)(hidden)
        else:
            _, key, value = project(layer_input(layer, hidden))
            keys.append(key.transpose(1, 2))
            values.append(value.transpose(1, 2))
    return torch.stack(keys, dim=1), torch.stack(values, dim=1)
