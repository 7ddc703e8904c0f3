"""Layers of SmolVLA as functions of tensors, in few and large operations for a GPU; weights are arguments.

All layers of a kind therefore share one compiled function, see `flowrl.compiled`. LeRobot's arithmetic, and in bfloat16 its
roundings: one product for query, key and value, heads that share keys as rows of one product, all chunks of a prefix too.
Attention is written out in matrix products: the fused kernels that take float32 sum their gradients in a random order, and a
resumed run could not repeat an uninterrupted one.

Axes: n rows, of which R in a row belong to one of B prefixes; T tokens of width W; H heads, G of keys, each of width D;
P tokens of the prefix; T' and P' are T and P brought to a multiple of `ALIGNMENT`, as keys and values are. A `Linear` is a weight (out, in), or one with its parts, see `split_product`.

Source of the arithmetic: `VLAFlowMatching`, `SmolVLMWithExpertModel`, LeRobot 0.6.1; `SmolVLMVisionTransformer`, transformers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from flowrl.policy.attention import UNSEEN, rotary
from flowrl.policy.gelu_product import linear_gelu
from flowrl.policy.split_product import split_linear

type Linear = Tensor | tuple[Tensor, Tensor]
type Table = tuple[Tensor, Tensor]
"""Rotary cosines and signed sines, each (n or 1, 1, T, D) float32."""


def _gelu_tanh(x: Tensor) -> Tensor:
    return functional.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_pytorch_tanh": _gelu_tanh,
}
"""By the names of transformers' configs."""

ALIGNMENT = 8
"""Keys come in a multiple of this: tensor cores read and write rows of whole 16 bytes, which are 8 bfloat16 numbers or 4 float32
ones; for other rows cuBLAS takes kernels of a fraction of the speed, in float32 where TF32 is meant.
"""


class Shape(NamedTuple):
    """What is no tensor in a layer: H, G, D, R, the norm's epsilon and the activation."""

    heads: int
    kv_heads: int
    width: int
    repeats: int
    eps: float
    activation: str


class LayerWeights(NamedTuple):
    """Of a layer of the language model or the expert.

    Attributes:
        input_norm, post_norm: (W,).
        first: Query, key and value in one, ((H + 2 G) D, W); where a layer has no keys of its own, the query alone.
        out: (W, H D).
        gate_up: Gate and up in one.
        down: (W, F).
    """

    input_norm: Tensor
    first: Linear
    out: Linear
    post_norm: Tensor
    gate_up: Linear
    down: Linear


class VisionWeights(NamedTuple):
    """Of a layer of the image encoder: weight and bias of each of its modules."""

    norm1: tuple[Tensor, Tensor]
    query: tuple[Tensor, Tensor]
    key: tuple[Tensor, Tensor]
    value: tuple[Tensor, Tensor]
    out: tuple[Tensor, Tensor]
    norm2: tuple[Tensor, Tensor]
    fc1: tuple[Tensor, Tensor]
    fc2: tuple[Tensor, Tensor]


def linear(x: Tensor, weight: Linear) -> Tensor:
    return functional.linear(x, weight) if isinstance(weight, Tensor) else split_linear(x, *weight)


def dtype_of(weight: Linear) -> torch.dtype:
    return weight.dtype if isinstance(weight, Tensor) else weight[0].dtype


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last axis; in other dtypes than float32 rounded twice, as LeRobot's."""
    if x.dtype == weight.dtype == torch.float32:
        return functional.rms_norm(x, weight.shape, weight, eps)
    states = x.float()
    return weight * (states * torch.rsqrt(states.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def rotary_table(positions: Tensor, width: int) -> Table:
    """For positions (n, T)."""
    cos, sin = (part[:, None, :, 0] for part in rotary(positions, width))
    return torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)


def rotate(x: Tensor, table: Table) -> Tensor:
    """Rotary positions of (n, heads, T, D), computed in float32."""
    cos, sin = table
    states = x.float()
    turned = states.unflatten(-1, (2, -1)).flip(-2).flatten(-2)
    return (states * cos + turned * sin).to(x.dtype)


def aligned(states: Tensor) -> Tensor:
    """Keys or values (..., S, D) with zeros after them, (..., S', D)."""
    extra = -states.shape[-2] % ALIGNMENT
    return (functional.pad(states, (0, 0, 0, extra)) if extra else states).contiguous()


def bias_of(visible: Tensor) -> Tensor:
    """What is added to the scores of aligned keys, (..., S) bool -> (..., S') float32: 0 where a token is seen.

    Of keys that are none it is -inf: their weight is 0 also where a token sees nothing, and all others weigh the same.
    """
    bias = torch.zeros_like(visible, dtype=torch.float32).masked_fill(~visible, UNSEEN)
    return functional.pad(bias, (0, -visible.shape[-1] % ALIGNMENT), value=-math.inf)


def masked(scores: Tensor, bias: Tensor, shape: Shape) -> Tensor:
    """Scores, scaled, and their bias."""
    return torch.add(bias, scores, alpha=shape.width**-0.5)


def field_tables(pad_mask: Tensor, length: int, shape: Shape) -> tuple[Table, Table, Tensor, Tensor]:
    """What all layers of the expert share, from `pad_mask` (B, P).

    Returns:
        The rotary tables of the joint layers and of the cross layers. The bias of the prefix (B, 1, 1, 1, P'), and of a chunk's
        own tokens, which see those up to them, (T, T').
    """
    steps = torch.arange(length, device=pad_mask.device)
    offset = pad_mask.sum(dim=-1)[:, None, None].expand(-1, shape.repeats, 1).flatten(0, 1)
    return (
        rotary_table(offset + steps, shape.width),
        rotary_table(steps[None], shape.width),
        bias_of(pad_mask)[:, None, None, None],
        bias_of(steps[None, :] <= steps[:, None]),
    )


def field_prefix(
    keys: Tensor,
    values: Tensor,
    joint: tuple[int, ...],
    cross: tuple[int, ...],
    key_weights: Sequence[Tensor],
    value_weights: Sequence[Tensor],
    dtype: torch.dtype,
) -> tuple[Tensor | None, ...]:
    """The prefix's keys and values (B, L, G, P, D) as the expert's layers read them.

    Args:
        keys, values: The VLM's.
        joint, cross: The numbers of the VLM's layers that joint and cross layers read.
        key_weights, value_weights: Of the cross layers' own projections.
        dtype: The expert's.

    Returns:
        Keys and values of the joint layers, then of the cross layers, each (layers, B, G, P', D); keys float32. None: no such.
    """

    def projected(states: Tensor, weights: Sequence[Tensor]) -> Tensor:
        tokens = torch.stack([states[:, number].transpose(1, 2) for number in cross]).flatten(3)
        count, batch, length, _ = tokens.shape
        product = torch.bmm(tokens.flatten(1, 2).to(dtype), torch.stack(list(weights)).transpose(1, 2))
        return aligned(product.view(count, batch, length, -1, states.shape[-1]).transpose(2, 3))

    result: list[Tensor | None] = [None] * 4
    if joint:
        result[0] = aligned(torch.stack([keys[:, number] for number in joint])).float()
        own = torch.promote_types(values.dtype, dtype)
        result[1] = aligned(torch.stack([values[:, number] for number in joint])).to(own)
    if cross:
        result[2] = projected(keys, key_weights).float()
        result[3] = projected(values, value_weights)
    return tuple(result)


def joint_layer(
    hidden: Tensor,
    weights: LayerWeights,
    table: Table,
    keys: Tensor,
    values: Tensor,
    prefix_bias: Tensor,
    own_bias: Tensor,
    shape: Shape,
) -> Tensor:
    """Hidden states (n, T, W), which see the prefix and those of their chunk up to each.

    Args:
        hidden, weights: The input.
        table, prefix_bias, own_bias: See `field_tables`.
        keys, values: The prefix's, (B, G, P', D), the keys float32.
        shape: The rest.
    """
    states = _heads(hidden, weights, shape)
    (n, _, length, _), num_prefix = states.shape, keys.shape[2]
    turned, own_values = states.split([shape.heads + shape.kv_heads, shape.kv_heads], dim=1)
    query, own_keys = rotate(turned, table).split([shape.heads, shape.kv_heads], dim=1)
    rows = _rows(query, shape)  # (B, G, R, H / G T, D)
    own_keys, own_values = _own(own_keys, shape).float(), _own(own_values, shape).to(values.dtype)
    of_prefix = torch.matmul(rows.flatten(2, 3), keys.transpose(-1, -2)).view(*rows.shape[:-1], num_prefix)
    of_own = torch.matmul(rows, own_keys.transpose(-1, -2)).unflatten(3, (-1, length))
    of_own = masked(of_own, own_bias, shape).flatten(3, 4)
    probs = (
        torch.cat([masked(of_prefix, prefix_bias, shape), of_own], dim=-1).softmax(dim=-1).to(values.dtype)
    )
    prefix_probs, own_probs = probs.split([num_prefix, own_keys.shape[3]], dim=-1)
    attended = torch.matmul(prefix_probs.flatten(2, 3), values).view(rows.shape)
    attended = attended + torch.matmul(own_probs, own_values)
    return _finished(hidden, _tokens(attended, n, length), weights, shape)


def cross_layer(
    hidden: Tensor,
    weights: LayerWeights,
    table: Table,
    keys: Tensor,
    values: Tensor,
    bias: Tensor,
    shape: Shape,
) -> Tensor:
    """Hidden states (n, T, W), which see the prefix alone; arguments as in `joint_layer`."""
    query = _heads(hidden, weights, shape)
    n, _, length, _ = query.shape
    rows = _rows(rotate(query, table), shape)
    scores = masked(torch.matmul(rows.flatten(2, 3), keys.transpose(-1, -2)), bias[:, 0], shape)
    attended = torch.matmul(scores.softmax(dim=-1).to(values.dtype), values).view(rows.shape)
    return _finished(hidden, _tokens(attended, n, length), weights, shape)


def embed_chunk(
    x_t: Tensor,
    time: Tensor,
    frequencies: Tensor,
    action: tuple[Tensor, Tensor],
    first: tuple[Tensor, Tensor],
    second: tuple[Tensor, Tensor],
) -> Tensor:
    """Chunk (n, T, A) and time (n,) as tokens of the expert, (n, T, W). Frequencies (W / 2,) float64, as LeRobot has them."""
    tokens = functional.linear(x_t, *action)
    angle = frequencies * time[:, None]
    when = torch.cat([angle.sin(), angle.cos()], dim=1).to(tokens.dtype)
    # The part of the time is the same for all tokens of a chunk.
    of_action, of_time = first[0].split(tokens.shape[-1], dim=1)
    mixed = functional.linear(tokens, of_action) + functional.linear(when, of_time, first[1])[:, None]
    return functional.linear(functional.silu(mixed), *second)


def velocity_head(hidden: Tensor, norm: Tensor, eps: float, out: tuple[Tensor, Tensor]) -> Tensor:
    """Hidden states (n, T, W) -> velocity (n, T, A) float32."""
    return functional.linear(rms_norm(hidden, norm, eps).float(), *out)


def vision_layer(
    hidden: Tensor, weights: VisionWeights, heads: int, eps: tuple[float, float], activation: str
) -> Tensor:
    """Hidden states of images (N, tokens, W)."""
    width = hidden.shape[-1:]
    normed = functional.layer_norm(hidden, width, *weights.norm1, eps[0])
    states = (
        functional.linear(normed, *part).unflatten(-1, (heads, -1)).transpose(1, 2)
        for part in (weights.query, weights.key, weights.value)
    )
    attended = functional.scaled_dot_product_attention(*states).transpose(1, 2).flatten(2)
    hidden = hidden + functional.linear(attended, *weights.out)
    normed = functional.layer_norm(hidden, width, *weights.norm2, eps[1])
    if normed.is_cuda and activation == "gelu_pytorch_tanh" and normed.dtype == torch.bfloat16:
        inner = linear_gelu(normed.flatten(0, -2), *weights.fc1).unflatten(0, normed.shape[:-1])
    else:
        inner = ACTIVATIONS[activation](functional.linear(normed, *weights.fc1))
    return hidden + functional.linear(inner, *weights.fc2)


def look_up(levels: Tensor, table: Tensor) -> Tensor:
    """uint8 (B, H, W, 3) -> (B, 3, H, W) in the table's dtype; the table has 256 entries."""
    return table[levels.permute(0, 3, 1, 2).int()].contiguous()


def embed_levels(levels: Sequence[Tensor], table: Tensor, *others: Any) -> Tensor:
    """`embed_pixels` of images that are uint8 (B, H, W, 3), through a table of 256 pixel values."""
    return embed_pixels([table[image.int()] for image in levels], *others)


def embed_pixels(
    images: Sequence[Tensor], weight: Tensor, bias: Tensor, positions: Tensor, patch: int
) -> Tensor:
    """Tokens (N, tokens, W) of images, each (B, H, W, 3): a convolution whose stride is its kernel's side, as a product."""
    pixels = torch.cat(list(images)).to(weight.dtype)
    count, height, width, channels = pixels.shape
    blocks = pixels.view(count, height // patch, patch, width // patch, patch, channels)
    rows = blocks.permute(0, 1, 3, 5, 2, 4).reshape(count, -1, channels * patch * patch)
    return functional.linear(rows, weight.flatten(1), bias) + positions


def connect(
    hidden: Tensor, norm: tuple[Tensor, Tensor], eps: float, projection: Tensor, merge: int, scale: float
) -> Tensor:
    """Hidden states of square images -> tokens of the language model, one for `merge` by `merge` patches, scaled."""
    states = functional.layer_norm(hidden, hidden.shape[-1:], *norm, eps)
    count, length, width = states.shape
    side = int(length**0.5) // merge
    blocks = states.view(count, side, merge, side, merge, width).transpose(2, 3)
    return functional.linear(blocks.reshape(count, side * side, -1), projection) * scale


def language_tables(pad_mask: Tensor, block: Tensor, width: int) -> tuple[Table, Tensor]:
    """Rotary table and bias (B, 1, 1, P, P') of the language model, from its mask and blocks (B, P)."""
    order = torch.cumsum(block, dim=1)
    visible = (order[:, None, :] <= order[:, :, None]) & pad_mask[:, None, :] & pad_mask[:, :, None]
    return rotary_table(torch.cumsum(pad_mask, dim=1) - 1, width), bias_of(visible)[:, None, None]


def language_layer(
    hidden: Tensor, weights: LayerWeights, table: Table, bias: Tensor, shape: Shape
) -> tuple[Tensor, Tensor, Tensor]:
    """A layer of the language model: hidden states (B, P, W), and its keys and values (B, G, P, D)."""
    states = _heads(hidden, weights, shape)
    (n, _, length, _), heads, kv_heads = states.shape, shape.heads, shape.kv_heads
    turned = rotate(states[:, : heads + kv_heads], table)
    keys, values = turned[:, heads:], states[:, heads + kv_heads :]
    rows = turned[:, :heads].reshape(n, kv_heads, -1, shape.width).float()
    scores = torch.matmul(rows, aligned(keys).float().transpose(-1, -2)).unflatten(2, (-1, length))
    probs = masked(scores, bias, shape).flatten(2, 3).softmax(dim=-1).to(values.dtype)
    attended = (
        torch.matmul(probs, aligned(values)).view(n, heads, length, shape.width).transpose(1, 2).flatten(2)
    )
    return _finished(hidden, attended, weights, shape), keys, values


def language_states(
    hidden: Tensor, weights: LayerWeights, table: Table, shape: Shape
) -> tuple[Tensor, Tensor]:
    """Of `language_layer` the keys and values alone."""
    states = _heads(hidden, weights, shape)
    _, keys, values = states.split([shape.heads, shape.kv_heads, shape.kv_heads], dim=1)
    return rotate(keys, table), values


def _heads(hidden: Tensor, weights: LayerWeights, shape: Shape) -> Tensor:
    """The first product of the normed input, (n, heads, T, D)."""
    normed = rms_norm(hidden, weights.input_norm, shape.eps).to(dtype_of(weights.first))
    return linear(normed, weights.first).unflatten(-1, (-1, shape.width)).transpose(1, 2)


def _rows(query: Tensor, shape: Shape) -> Tensor:
    """(n, H, T, D) -> (B, G, R, H / G T, D) float32: all queries of a prefix's keys in a row."""
    parts = query.float().unflatten(0, (-1, shape.repeats)).unflatten(2, (shape.kv_heads, -1))
    return parts.transpose(1, 2).flatten(3, 4).contiguous()


def _own(states: Tensor, shape: Shape) -> Tensor:
    """(n, G, T, D) -> (B, G, R, T', D)."""
    return aligned(states.unflatten(0, (-1, shape.repeats)).transpose(1, 2))


def _tokens(attended: Tensor, n: int, length: int) -> Tensor:
    """(B, G, R, H / G T, D) -> (n, T, H D)."""
    parts = attended.unflatten(3, (-1, length))  # (B, G, R, H / G, T, D)
    return parts.permute(0, 2, 4, 1, 3, 5).reshape(n, length, -1)


def _finished(hidden: Tensor, attended: Tensor, weights: LayerWeights, shape: Shape) -> Tensor:
    """The rest of a layer, from the heads' results (n, T, H D)."""
    projected = linear(attended.to(dtype_of(weights.out)), weights.out)
    middle = (projected + hidden).to(projected.dtype)
    normed = rms_norm(middle, weights.post_norm, shape.eps)
    gate, up = linear(normed, weights.gate_up).chunk(2, dim=-1)
    output = linear(ACTIVATIONS[shape.activation](gate) * up, weights.down)
    return (output + middle).to(output.dtype)
