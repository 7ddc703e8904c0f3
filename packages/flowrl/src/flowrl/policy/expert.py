"""SmolVLA's action expert run from LeRobot's weights, with what the noisy chunk does not change computed once per prefix.

LeRobot's `denoise_step` makes masks, positions, rotary tables, expanded heads, and the cross-attention's keys and values of
the prefix anew in each of the K steps. An `ExpertField` makes them when it is built, and a step is then the layers alone.

- `exact`: LeRobot's operations on the same shapes, so that the velocity equals `denoise_step` bit for bit on a CPU.
- `fused`: fewer and larger operations, for a GPU: one product for query, key and value, heads that share keys as rows of one
  product, fused norms. Attention is written out in matrix products: the fused kernels that take float32 sum their gradients
  in a random order, and a resumed run could not repeat an uninterrupted one.

Source of the arithmetic: `VLAFlowMatching.denoise_step` and `SmolVLMWithExpertModel`, LeRobot 0.6.1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

VelocityMode = Literal["exact", "fused"]
_MAX_WAVELENGTH = 10_000  # of the rotary positions; LeRobot's `apply_rope`


class ExpertField:
    """The velocity at any (x_t, time) for one batch of prefixes; differentiable in the expert's weights.

    Built anew after an update: it holds products of the weights.

    Args:
        model: LeRobot's `VLAFlowMatching`.
        pad_mask: (B, P) bool, the valid tokens of the prefix.
        keys, values: (B, L, H, P, head_dim), the VLM's, after the rotary embedding.
        repeats: R, how many chunks in a row each prefix serves.
        mode: "exact" or "fused".
    """

    def __init__(
        self, model: Any, pad_mask: Tensor, keys: Tensor, values: Tensor, *, repeats: int, mode: VelocityMode
    ) -> None:
        self._model, self._fused = model, mode == "fused"
        network = model.vlm_with_expert
        chunk_size, device = model.config.chunk_size, pad_mask.device
        head_dim = network.vlm.config.text_config.head_dim
        steps = torch.arange(chunk_size, device=device)
        offset = _repeat(pad_mask.sum(dim=-1)[:, None], repeats)
        causal = steps[None, :] <= steps[:, None]
        prefix_mask = _repeat(pad_mask, repeats)[:, None, :].expand(-1, chunk_size, -1)
        whole_mask = torch.cat([prefix_mask, causal.expand(len(prefix_mask), -1, -1)], dim=2)
        shared = (network.num_attention_heads, network.num_key_value_heads, head_dim, repeats, self._fused)
        joint = _Context(*shared, _rotary(offset + steps, head_dim), whole_mask[:, None])
        cross = _Context(*shared, _rotary(steps[None, :], head_dim), pad_mask[:, None, None, :])

        self._layers: list[tuple[Any, Callable[[Tensor], Tensor]]] = []
        for index, layer in enumerate(_expert_layers(network)):
            if layer is None:
                continue
            parts = layer.self_attn, keys[:, index], values[:, index]
            attention = (
                _JointAttention(*parts, joint)
                if _is_joint(network, index)
                else _CrossAttention(*parts, cross)
            )
            self._layers.append((layer, attention))

        # In float64, as LeRobot has it.
        width = network.expert_hidden_size
        fraction = torch.linspace(0.0, 1.0, width // 2, dtype=torch.float64, device=device)
        shortest, longest = model.config.min_period, model.config.max_period
        self._frequencies = 1.0 / (shortest * (longest / shortest) ** fraction) * 2 * math.pi

    def __call__(self, x_t: Tensor, time: Tensor) -> Tensor:
        """Velocity (B R, T, D) float32 at x_t (B R, T, D) float32 and time (B R,) float32."""
        hidden = self._embed(x_t, time)
        for layer, attention in self._layers:
            hidden = self._layer(layer, attention, hidden)
        normed = self._norm(self._model.vlm_with_expert.lm_expert.norm, hidden)
        return self._model.action_out_proj(normed.float())

    def _layer(self, layer: Any, attention: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
        # The sums are in place, as LeRobot's: with a bfloat16 expert the result is bfloat16.
        projection = layer.self_attn.o_proj
        normed = self._norm(layer.input_layernorm, hidden).to(layer.self_attn.q_proj.weight.dtype)
        attended = projection(attention(normed).to(projection.weight.dtype))
        attended += hidden
        output = layer.mlp(self._norm(layer.post_attention_layernorm, attended))
        output += attended
        return output

    def _embed(self, x_t: Tensor, time: Tensor) -> Tensor:
        """Chunk and time as tokens of the expert, (B R, T, W)."""
        model = self._model
        action = model.action_in_proj(x_t)
        angle = self._frequencies[None, :] * time[:, None]
        when = torch.cat([angle.sin(), angle.cos()], dim=1).to(action.dtype)
        first = model.action_time_mlp_in
        if self._fused:  # the part of the time is the same for all tokens of a chunk
            of_action, of_time = first.weight.split(action.shape[-1], dim=1)
            mixed = (
                functional.linear(action, of_action) + functional.linear(when, of_time, first.bias)[:, None]
            )
        else:
            mixed = first(torch.cat([action, when[:, None, :].expand_as(action)], dim=2))
        return model.action_time_mlp_out(functional.silu(mixed))

    def _norm(self, norm: Any, hidden: Tensor) -> Tensor:
        if self._fused and norm.weight.dtype == hidden.dtype:
            return functional.rms_norm(hidden, norm.weight.shape, norm.weight, norm.variance_epsilon)
        return norm(hidden)


class _Context:
    """What all layers of one kind share.

    Attributes:
        num_heads, num_kv_heads, head_dim: H, G and their width.
        repeats: R.
        fused: Whether the fused operations run.
        table: Rotary cosines and sines, each (B R or 1, T, 1, head_dim / 2).
        hidden: (n, 1, T or 1, S) bool, True where a query does not see a token; for the eager attention.
        bias: The same as 0 and -inf for the fused attention, a row for every query of a key's heads.
    """

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        repeats: int,
        fused: bool,
        table: tuple[Tensor, Tensor],
        visible: Tensor,
    ) -> None:
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.group = num_heads // num_kv_heads
        self.repeats, self.fused = repeats, fused
        self.hidden = ~visible
        cos, sin = table
        if fused:
            rows = self.group if visible.shape[2] > 1 else 1
            zeros = torch.zeros_like(visible, dtype=torch.float32)
            self.bias = zeros.masked_fill_(self.hidden, -math.inf).repeat(1, 1, rows, 1)
            cos, sin = torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)
        self.table = cos, sin

    def rotate(self, states: Tensor) -> Tensor:
        """Rotary positions of (n, T, heads, head_dim); float32 inside, in the dtype given."""
        cos, sin = self.table
        x = states.float()
        if self.fused:
            turned = torch.addcmul(x * cos, x.roll(self.head_dim // 2, dims=-1), sin)
        else:
            x1, x2 = x.split(self.head_dim // 2, dim=-1)
            turned = torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], dim=-1)
        return turned.to(states.dtype)

    def keys(self, keys: Tensor) -> Tensor:
        """(n, S, G, head_dim) -> as `attend` takes them: eager (n, H, head_dim, S), fused (n, G, head_dim, S), float32."""
        if self.fused:
            return keys.permute(0, 2, 3, 1).float()
        return self._expand(keys).float().permute(0, 2, 3, 1)

    def values(self, values: Tensor) -> Tensor:
        """(n, S, G, head_dim) -> eager (n, H, S, head_dim), fused (n, G, S, head_dim)."""
        return (values if self.fused else self._expand(values)).transpose(1, 2)

    def attend(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Attention in float32, (n, T, H head_dim) in the dtype of the values.

        Args:
            query: (n, T, H, head_dim), rotated; fused: scaled.
            keys, values: What the methods of those names returned; a chunk of `repeats` may stand in T.
        """
        n, length, num_heads, width = query.shape
        rows = query.float().transpose(1, 2)  # (n, H, T, head_dim)
        if self.fused:
            rows = rows.reshape(n, self.num_kv_heads, self.group * length, width)
            scores = torch.matmul(rows, keys)
            scores += self.bias
        else:
            scores = torch.matmul(rows, keys)
            scores *= width**-0.5
            scores = scores.masked_fill_(self.hidden, torch.finfo(torch.float32).min)
        probs = scores.softmax(dim=-1).to(values.dtype)
        attended = torch.matmul(probs, values).view(n, num_heads, length, width)
        return attended.permute(0, 2, 1, 3).reshape(n, length, num_heads * width)

    def _expand(self, states: Tensor) -> Tensor:
        n, length, _, width = states.shape
        return states[:, :, :, None, :].expand(-1, -1, -1, self.group, -1).reshape(n, length, -1, width)


class _CrossAttention:
    """Attention to the prefix alone, through the layer's own projections of the VLM's keys and values.

    All R chunks of a prefix are queries of one product.
    """

    def __init__(self, module: Any, keys: Tensor, values: Tensor, context: _Context) -> None:
        self._module, self._context = module, context
        self._keys = _settled(context.keys(self._project(module.k_proj, keys)))
        self._values = _settled(context.values(self._project(module.v_proj, values)))
        self._query = _scaled_query(module, context)

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

    def __init__(self, module: Any, keys: Tensor, values: Tensor, context: _Context) -> None:
        self._module, self._context = module, context
        repeats = context.repeats
        self._keys = _repeat(_settled(context.keys(keys.transpose(1, 2))), repeats)
        self._values = _repeat(_settled(context.values(values.transpose(1, 2))), repeats)
        self._query = _scaled_query(module, context)
        self._all: Callable[[Tensor], Tensor] | None = None
        parts = module.q_proj, module.k_proj, module.v_proj
        if context.fused and all(part.bias is None for part in parts):
            scale = context.head_dim**-0.5
            weight = torch.cat([parts[0].weight * scale, parts[1].weight, parts[2].weight])
            self._all = lambda hidden: functional.linear(hidden, weight)

    def __call__(self, hidden: Tensor) -> Tensor:
        context, module = self._context, self._module
        n, length, _ = hidden.shape
        shape = n, length, -1, context.head_dim
        num_heads, num_kv = context.num_heads, context.num_kv_heads
        if self._all is not None:
            states = self._all(hidden).view(shape)
            turned = context.rotate(states[:, :, : num_heads + num_kv])
            query, keys = turned.split([num_heads, num_kv], dim=2)
            values = states[:, :, num_heads + num_kv :]
        else:
            query = context.rotate(self._query(hidden).view(shape))
            keys = context.rotate(module.k_proj(hidden).view(shape))
            values = module.v_proj(hidden).view(shape)
        return context.attend(
            query,
            torch.cat([self._keys, context.keys(keys)], dim=3),
            torch.cat([self._values, context.values(values)], dim=2),
        )


def _scaled_query(module: Any, context: _Context) -> Callable[[Tensor], Tensor]:
    """The query's projection; fused with the scale of the scores in it."""
    projection = module.q_proj
    if not context.fused:
        return projection
    scale = context.head_dim**-0.5
    weight = projection.weight * scale
    bias = None if projection.bias is None else projection.bias * scale
    return lambda hidden: functional.linear(hidden, weight, bias)


def _settled(states: Tensor) -> Tensor:
    """In memory as matmul would lay it out at every step; of a batch of one it takes a view, whose products round otherwise."""
    n, heads, rows, columns = states.shape
    return states.reshape(n * heads, rows, columns).view(n, heads, rows, columns)


def _repeat(states: Tensor, repeats: int) -> Tensor:
    """Every row `repeats` times in a row; `repeat_interleave` may wait for the device."""
    return states if repeats == 1 else states[:, None].expand(-1, repeats, *states.shape[1:]).flatten(0, 1)


def _rotary(positions: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines (n, T, 1, head_dim / 2) float32 of positions (n, T)."""
    half = head_dim // 2
    exponents = (2.0 / head_dim) * torch.arange(half, dtype=torch.float32, device=positions.device)
    radians = positions[..., None].float() / (_MAX_WAVELENGTH**exponents)[None, None, :]
    radians = radians[..., None, :]
    return radians.cos(), radians.sin()


def _expert_layers(network: Any) -> list[Any]:
    """The expert's layer at each of the VLM's; None where the expert, with fewer layers, has none."""
    every = network.num_vlm_layers // network.num_expert_layers
    return [
        network.lm_expert.layers[index // every] if index % every == 0 else None
        for index in range(network.num_vlm_layers)
    ]


def _is_joint(network: Any, index: int) -> bool:
    every = network.self_attn_every_n_layers
    return "cross" not in network.attention_mode or (every > 0 and index % every == 0)
