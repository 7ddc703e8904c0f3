"""Float32 matrix products in three bfloat16 products, for GPUs whose bfloat16 units are many times as fast as float32.

x = x_h + x_l with x_h = bf16(x), x_l = bf16(x - x_h), and w alike: x w = x_h w_h + x_h w_l + x_l w_h, summed in float32 as one
product of three times the length. What is left out is 2^-16 of the result, between float32 (2^-24) and TF32 (2^-11).

Source: Henry, Tang, Heinecke 2019, "Leveraging the bfloat16 artificial intelligence datatype for higher-precision
computations" (arXiv 1904.06376), eq. 2 with two terms.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def weight_parts(weight: Tensor) -> Tensor:
    """A weight (out, in) -> what `split_linear` takes beside it, (out, 3 in) bfloat16. It follows no later change."""
    return _parts(weight.detach(), low=1)


def split_linear(x: Tensor, weight: Tensor, parts: Tensor) -> Tensor:
    """x (..., in), a weight (out, in) and its parts -> x weight^T (..., out); all float32 but the parts."""
    return _SplitLinear.apply(x.flatten(0, -2), weight, parts).view(*x.shape[:-1], -1)


class _SplitLinear(torch.autograd.Function):
    """x (n, in), weight (out, in), its parts (out, 3 in) -> (n, out), float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, parts: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _multiply(_parts(x, low=2), parts.T)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        (gradient,), (x, weight) = gradients, ctx.saved_tensors
        of_x = _multiply(_parts(gradient, low=2), _parts(weight.T, low=1).T)
        of_weight = _multiply(_parts(gradient.T, low=2), _parts(x.T, low=1).T)
        return of_x, of_weight, None


def _parts(x: Tensor, low: int) -> Tensor:
    """(n, k) -> [x_h, x_h, x_l] (n, 3 k) bfloat16 with low 2, [x_h, x_l, x_h] with low 1."""
    if not torch.compiler.is_compiling():  # in two passes
        parts = x.new_empty(x.shape[0], 3, x.shape[1], dtype=torch.bfloat16)
        parts.copy_(x[:, None])
        torch.sub(x, parts[:, 0], out=parts[:, low])
        return parts.flatten(1)
    high = _rounded(x)
    each = [high.to(torch.bfloat16)] * 3
    each[low] = (x - high).to(torch.bfloat16)
    return torch.cat(each, dim=1)


def _rounded(x: Tensor) -> Tensor:
    """The nearest bfloat16 numbers, as float32; by their bits, since a compiler may take two conversions for none."""
    bits = x.view(torch.int32)
    return ((bits + (0x7FFF + ((bits >> 16) & 1))) & -0x10000).view(torch.float32)


def _multiply(a: Tensor, b: Tensor) -> Tensor:
    """Product of bfloat16 matrices with sums and result in float32."""
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()
