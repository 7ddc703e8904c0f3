"""Transformer layers of SmolVLA's language model and action expert, from LeRobot's modules, in two ways; see `expert`.

Source of the arithmetic: `SmolVLMWithExpertModel`, LeRobot 0.6.1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from flowrl.policy.split_product import product

VelocityMode = Literal["exact", "fused", "split"]
MAX_WAVELENGTH = 10_000
"""Of the rotary positions; LeRobot's `apply_rope`."""
_UNSEEN = torch.finfo(torch.float32).min
"""Added to a score, as LeRobot puts it in its place. Not -inf: a padding token that sees nothing would become NaN, and what it is multiplied by 0 with too."""


class Attention:
    """Attention with rotary positions, and what all layers of one kind share of it.

    Attributes:
        num_heads, num_kv_heads, head_dim: H, G and their width.
        repeats: R.
        fused, split: Whether the fused operations run, and whether products are split.
        table: Rotary cosines and sines, each (B R or 1, T, 1, head_dim / 2).
        bias: (n, 1, T or 1, S) float32, 0 where a query sees a token, else `_UNSEEN`; fused with a row for every query of a
            key's heads.
    """

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        repeats: int,
        mode: VelocityMode,
        table: tuple[Tensor, Tensor],
        visible: Tensor,
    ) -> None:
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.group = num_heads // num_kv_heads
        self.repeats, self.fused, self.split = repeats, mode != "exact", mode == "split"
        rows = self.group if self.fused and visible.shape[2] > 1 else 1
        zeros = torch.zeros_like(visible, dtype=torch.float32)
        self.bias = zeros.masked_fill_(~visible, _UNSEEN).repeat(1, 1, rows, 1)
        cos, sin = table
        self.table = torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)

    def rotate(self, states: Tensor) -> Tensor:
        """Rotary positions of (n, T, heads, head_dim); float32 inside, in the dtype given."""
        cos, sin = self.table
        x = states.float()
        turned = x.roll(self.head_dim // 2, dims=-1)
        if self.fused:
            return torch.addcmul(x * cos, turned, sin).to(states.dtype)
        return (x * cos).add_(turned.mul_(sin)).to(states.dtype)  # rounds each product, as LeRobot does

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
            query: (n, T, H, head_dim), rotated.
            keys, values: What the methods of those names returned; a chunk of `repeats` may stand in T.
        """
        n, length, num_heads, width = query.shape
        rows = query.float().transpose(1, 2)  # (n, H, T, head_dim)
        if self.fused:
            rows = rows.reshape(n, self.num_kv_heads, self.group * length, width)
        # Scaled and masked in one pass: a score added to 0 or to the lowest number leaves LeRobot's bits.
        scores = torch.add(self.bias, torch.matmul(rows, keys), alpha=width**-0.5)
        probs = scores.softmax(dim=-1).to(values.dtype)
        attended = torch.matmul(probs, values).view(n, num_heads, length, width)
        return attended.permute(0, 2, 1, 3).reshape(n, length, num_heads * width)

    def _expand(self, states: Tensor) -> Tensor:
        n, length, _, width = states.shape
        return states[:, :, :, None, :].expand(-1, -1, -1, self.group, -1).reshape(n, length, -1, width)


def prepared_layer(
    layer: Any, attention: Callable[[Tensor], Tensor], mode: VelocityMode
) -> Callable[[Tensor], Tensor]:
    """A layer as a function of its input (n, T, W).

    Args:
        layer: Its module.
        attention: From the normed input to the heads' results (n, T, H head_dim).
        mode: How it is computed.
    """
    fused, split = mode != "exact", mode == "split"
    projection, mlp = layer.self_attn.o_proj, layer.mlp
    project = product(projection.weight, projection.bias, split=True) if split else projection
    transform = _split_mlp(mlp) if split and mlp.gate_proj.bias is None else mlp

    def run(hidden: Tensor) -> Tensor:
        # The sums are in place, as LeRobot's: with bfloat16 weights the result is bfloat16.
        attended = project(attention(layer_input(layer, hidden, fused)).to(projection.weight.dtype))
        attended += hidden
        output = transform(normalized(layer.post_attention_layernorm, attended, fused))
        output += attended
        return output

    return run


def _split_mlp(mlp: Any) -> Callable[[Tensor], Tensor]:
    both = product(torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]), None, split=True)
    down = product(mlp.down_proj.weight, mlp.down_proj.bias, split=True)

    def run(hidden: Tensor) -> Tensor:
        gate, up = both(hidden).chunk(2, dim=-1)
        return down(mlp.act_fn(gate) * up)

    return run


def layer_input(layer: Any, hidden: Tensor, fused: bool) -> Tensor:
    """What a layer's attention reads: normed, in the dtype of its weights."""
    return normalized(layer.input_layernorm, hidden, fused).to(layer.self_attn.q_proj.weight.dtype)


def normalized(norm: Any, hidden: Tensor, fused: bool) -> Tensor:
    """Root-mean-square norm over the last axis. In bfloat16 the fused one rounds once where LeRobot rounds twice."""
    if fused and norm.weight.dtype == hidden.dtype == torch.float32:
        return functional.rms_norm(hidden, norm.weight.shape, norm.weight, norm.variance_epsilon)
    return norm(hidden)


def projections(module: Any, context: Attention) -> Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]:
    """Query, key and value of (n, T, W), each (n, T, heads, head_dim), the first two rotated; fused in one product."""
    num_heads, num_kv, head_dim = context.num_heads, context.num_kv_heads, context.head_dim
    parts = module.q_proj, module.k_proj, module.v_proj
    if context.fused and all(part.bias is None for part in parts):
        weight = torch.cat([part.weight for part in parts])
        linear = product(weight, None, context.split)

        def together(hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            states = linear(hidden).view(*hidden.shape[:2], -1, head_dim)
            turned = context.rotate(states[:, :, : num_heads + num_kv])
            query, keys = turned.split([num_heads, num_kv], dim=2)
            return query, keys, states[:, :, num_heads + num_kv :]

        return together
    each = [projected(part, context) for part in parts]

    def singly(hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, keys, values = (part(hidden).view(*hidden.shape[:2], -1, head_dim) for part in each)
        return context.rotate(query), context.rotate(keys), values

    return singly


def projected(projection: Any, context: Attention) -> Callable[[Tensor], Tensor]:
    """A projection of (n, T, W), split where the context says so."""
    return product(projection.weight, projection.bias, split=True) if context.split else projection


def settled(states: Tensor) -> Tensor:
    """In memory as matmul would lay it out at every step; of a batch of one it takes a view, whose products round otherwise."""
    n, heads, rows, columns = states.shape
    return states.reshape(n * heads, rows, columns).view(n, heads, rows, columns)


def rotary(positions: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines (n, T, 1, head_dim / 2) float32 of positions (n, T)."""
    half = head_dim // 2
    exponents = (2.0 / head_dim) * torch.arange(half, dtype=torch.float32, device=positions.device)
    radians = positions[..., None].float() / (MAX_WAVELENGTH**exponents)[None, None, :]
    radians = radians[..., None, :]
    return radians.cos(), radians.sin()
