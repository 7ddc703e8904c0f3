"""SmolVLA's action expert run from LeRobot's weights, with what the noisy chunk does not change computed once per prefix.

LeRobot's `denoise_step` makes masks, positions, rotary tables, expanded heads, and the cross-attention's keys and values of
the prefix anew in each of the K steps. An `ExpertField` makes them when it is built, and a step is then the layers alone.

- `exact`: LeRobot's operations on the same shapes, so that the velocity equals `denoise_step` bit for bit on a CPU. This file.
- `fused`: fewer and larger operations, for a GPU, which may be compiled (`flowrl.compiled`); see `fused_expert` and `layers`.
- `split`: fused, with the layers' linear products in three bfloat16 ones, see `split_product`.
- `tf32`: fused, with float32 products, those of attention too, in TF32: 10 bits of mantissa, on the newest GPUs at several
  times the rate. Sampler and update alike.

Source of the arithmetic: `VLAFlowMatching.denoise_step` and `SmolVLMWithExpertModel`, LeRobot 0.6.1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from flowrl.policy.attention import Attention, prepared_layer, projections, rotary, settled


class ExpertField:
    """The velocity at any (x_t, time) for one batch of prefixes; differentiable in the expert's weights.

    Built anew after an update: it holds products of the weights.

    Args:
        model: LeRobot's `VLAFlowMatching`.
        pad_mask: (B, P) bool, the valid tokens of the prefix.
        keys, values: (B, L, H, P, head_dim), the VLM's, after the rotary embedding.
        repeats: R, how many chunks in a row each prefix serves.
    """

    def __init__(self, model: Any, pad_mask: Tensor, keys: Tensor, values: Tensor, *, repeats: int) -> None:
        self._model = model
        network = model.vlm_with_expert
        chunk_size, device = model.config.chunk_size, pad_mask.device
        head_dim = network.vlm.config.text_config.head_dim
        steps = torch.arange(chunk_size, device=device)
        offset = _repeat(pad_mask.sum(dim=-1)[:, None], repeats)
        causal = steps[None, :] <= steps[:, None]
        prefix_mask = _repeat(pad_mask, repeats)[:, None, :].expand(-1, chunk_size, -1)
        whole_mask = torch.cat([prefix_mask, causal.expand(len(prefix_mask), -1, -1)], dim=2)
        shared = (network.num_attention_heads, network.num_key_value_heads, head_dim, repeats)
        joint = Attention(*shared, rotary(offset + steps, head_dim), whole_mask[:, None])
        cross = Attention(*shared, rotary(steps[None, :], head_dim), pad_mask[:, None, None, :])

        self._layers: list[Callable[[Tensor], Tensor]] = []
        for index, layer in enumerate(expert_layers(network)):
            if layer is None:
                continue
            parts = layer.self_attn, keys[:, index], values[:, index]
            attention: Callable[[Tensor], Tensor] = (
                _JointAttention(*parts, joint) if is_joint(network, index) else _CrossAttention(*parts, cross)
            )
            self._layers.append(prepared_layer(layer, attention))

        self._frequencies = time_frequencies(model, device)

    def __call__(self, x_t: Tensor, time: Tensor) -> Tensor:
        """Velocity (B R, T, D) float32 at x_t (B R, T, D) float32 and time (B R,) float32."""
        hidden = self._embed(x_t, time)
        for layer in self._layers:
            hidden = layer(hidden)
        normed = self._model.vlm_with_expert.lm_expert.norm(hidden)
        return self._model.action_out_proj(normed.float())

    def _embed(self, x_t: Tensor, time: Tensor) -> Tensor:
        """Chunk and time as tokens of the expert, (B R, T, W)."""
        model = self._model
        action = model.action_in_proj(x_t)
        angle = self._frequencies[None, :] * time[:, None]
        when = torch.cat([angle.sin(), angle.cos()], dim=1).to(action.dtype)
        mixed = model.action_time_mlp_in(torch.cat([action, when[:, None, :].expand_as(action)], dim=2))
        return model.action_time_mlp_out(functional.silu(mixed))


class _CrossAttention:
    """Attention to the prefix alone, through the layer's own projections of the VLM's keys and values.

    All R chunks of a prefix are queries of one product.
    """

    def __init__(self, module: Any, keys: Tensor, values: Tensor, context: Attention) -> None:
        self._context = context
        self._keys = settled(context.keys(self._project(module.k_proj, keys)))
        self._values = settled(context.values(self._project(module.v_proj, values)))
        self._query = module.q_proj

    def __call__(self, hidden: Tensor) -> Tensor:
        context, (n, length, _) = self._context, hidden.shape
        query = self._query(hidden).view(n, length, context.num_heads, context.head_dim)
        query = context.rotate(query).view(len(self._keys), context.repeats * length, *query.shape[2:])
        return context.attend(query, self._keys, self._values).view(n, length, -1)

    def _project(self, projection: nn.Linear, states: Tensor) -> Tensor:
        tokens = states.transpose(1, 2).to(projection.weight.dtype)
        projected = projection(tokens.reshape(*tokens.shape[:2], -1))
        return projected.view(*tokens.shape[:2], -1, self._context.head_dim)


class _JointAttention:
    """Attention to the prefix and to the chunk's own tokens up to each, with the VLM's keys and values as they are."""

    def __init__(self, module: Any, keys: Tensor, values: Tensor, context: Attention) -> None:
        self._context = context
        self._keys = settled(context.keys(keys.transpose(1, 2)))
        self._values = settled(context.values(values.transpose(1, 2)))
        self._projections = projections(module, context)

    def __call__(self, hidden: Tensor) -> Tensor:
        context = self._context
        query, keys, values = self._projections(hidden)
        return context.attend(
            query,
            self._after(self._keys, context.keys(keys), axis=-1),
            self._after(self._values, context.values(values), axis=-2),
        )

    def _after(self, prefix: Tensor, own: Tensor, axis: int) -> Tensor:
        """The prefix's states (B, ...) and, along `axis`, a chunk's (B R, ...): (B R, ...)."""
        repeats = self._context.repeats
        shared = prefix[:, None].expand(-1, repeats, *prefix.shape[1:])
        return torch.cat([shared, own.unflatten(0, (-1, repeats))], dim=axis).flatten(0, 1)


def _repeat(states: Tensor, repeats: int) -> Tensor:
    """Every row `repeats` times in a row; `repeat_interleave` may wait for the device."""
    return states if repeats == 1 else states[:, None].expand(-1, repeats, *states.shape[1:]).flatten(0, 1)


def time_frequencies(model: Any, device: torch.device) -> Tensor:
    """Of the embedding of the time, (W / 2,) float64, as LeRobot has them."""
    fraction = torch.linspace(
        0.0, 1.0, model.vlm_with_expert.expert_hidden_size // 2, dtype=torch.float64, device=device
    )
    shortest, longest = model.config.min_period, model.config.max_period
    return 1.0 / (shortest * (longest / shortest) ** fraction) * 2 * math.pi


def expert_layers(network: Any) -> list[Any]:
    """The expert's layer at each of the VLM's; None where the expert, with fewer layers, has none."""
    every = network.num_vlm_layers // network.num_expert_layers
    return [
        network.lm_expert.layers[index // every] if index % every == 0 else None
        for index in range(network.num_vlm_layers)
    ]


def is_joint(network: Any, index: int) -> bool:
    """Whether the expert's layer there sees its own chunk too, not the prefix alone."""
    every = network.self_attn_every_n_layers
    return "cross" not in network.attention_mode or (every > 0 and index % every == 0)
