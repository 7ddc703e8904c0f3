"""Transformer layers of SmolVLA's language model and action expert in LeRobot's own operations, from its modules; see `expert`.

Source of the arithmetic: `SmolVLMWithExpertModel`, LeRobot 0.6.1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

VelocityMode = Literal["exact", "fused", "split", "tf32"]
MAX_WAVELENGTH = 10_000
"""Of the rotary positions; LeRobot's `apply_rope`."""
UNSEEN = torch.finfo(torch.float32).min
"""Added to a score, as LeRobot puts it in its place. Not -inf: a padding token that sees nothing would become NaN, and what it is multiplied by 0 with too."""


class Attention:
    """Attention with rotary positions, and what all layers of one kind share of it.

    Attributes:
        num_heads, num_kv_heads, head_dim: H, G and their width.
        repeats: R.
        table: Rotary cosines and sines, each (B R or 1, T, 1, head_dim).
        bias: (n, 1, T or 1, S) float32, 0 where a query sees a token, else `UNSEEN`.
    """

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        repeats: int,
        table: tuple[Tensor, Tensor],
        visible: Tensor,
    ) -> None:
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.group = num_heads // num_kv_heads
        self.repeats = repeats
        self.bias = torch.zeros_like(visible, dtype=torch.float32).masked_fill_(~visible, UNSEEN)
        cos, sin = table
        self.table = torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)

    def rotate(self, states: Tensor) -> Tensor:
        """Rotary positions of (n, T, heads, head_dim); float32 inside, in the dtype given."""
        cos, sin = self.table
        x = states.float()
        turned = x.roll(self.head_dim // 2, dims=-1)
        return (x * cos).add_(turned.mul_(sin)).to(states.dtype)  # rounds each product, as LeRobot does

    def keys(self, keys: Tensor) -> Tensor:
        """(n, S, G, head_dim) -> as `attend` takes them, (n, H, head_dim, S) float32."""
        return self._expand(keys).float().permute(0, 2, 3, 1)

    def values(self, values: Tensor) -> Tensor:
        """(n, S, G, head_dim) -> (n, H, S, head_dim)."""
        return self._expand(values).transpose(1, 2)

    def attend(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Attention in float32, (n, T, H head_dim) in the dtype of the values.

        Args:
            query: (n, T, H, head_dim), rotated.
            keys, values: What the methods of those names returned; a chunk of `repeats` may stand in T.
        """
        n, length, num_heads, width = query.shape
        rows = query.float().transpose(1, 2)  # (n, H, T, head_dim)
        # Scaled and masked in one pass: a score added to 0 or to the lowest number leaves LeRobot's bits.
        scores = torch.add(self.bias, torch.matmul(rows, keys), alpha=width**-0.5)
        probs = scores.softmax(dim=-1).to(values.dtype)
        return torch.matmul(probs, values).permute(0, 2, 1, 3).reshape(n, length, num_heads * width)

    def _expand(self, states: Tensor) -> Tensor:
        n, length, _, width = states.shape
        return states[:, :, :, None, :].expand(-1, -1, -1, self.group, -1).reshape(n, length, -1, width)


def prepared_layer(layer: Any, attention: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A layer as a function of its input (n, T, W).

    Args:
        layer: Its module.
        attention: From the normed input to the heads' results (n, T, H head_dim).
    """
    projection = layer.self_attn.o_proj

    def run(hidden: Tensor) -> Tensor:
        # The sums are in place, as LeRobot's: with bfloat16 weights the result is bfloat16.
        attended = projection(attention(layer_input(layer, hidden)).to(projection.weight.dtype))
        attended += hidden
        output = layer.mlp(layer.post_attention_layernorm(attended))
        output += attended
        return output

    return run


def layer_input(layer: Any, hidden: Tensor) -> Tensor:
    """What a layer's attention reads: normed, in the dtype of its weights."""
    return layer.input_layernorm(hidden).to(layer.self_attn.q_proj.weight.dtype)


def projections(module: Any, context: Attention) -> Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]:
    """Query, key and value of (n, T, W), each (n, T, heads, head_dim), the first two rotated."""

    def run(hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, keys, values = (
            part(hidden).view(*hidden.shape[:2], -1, context.head_dim)
            for part in (module.q_proj, module.k_proj, module.v_proj)
        )
        return context.rotate(query), context.rotate(keys), values

    return run


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
