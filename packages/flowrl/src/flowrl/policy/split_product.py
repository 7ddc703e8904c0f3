"""Float32 matrix products in three bfloat16 products, for GPUs whose bfloat16 units are many times as fast as float32.

x = x_h + x_l with x_h = bf16(x), x_l = bf16(x - x_h), and w alike: x w = x_h w_h + x_h w_l + x_l w_h, summed in float32 as one
product of three times the length. What is left out is 2^-16 of the result, between float32 (2^-24) and TF32 (2^-11).

Source: Henry, Tang, Heinecke 2019, "Leveraging the bfloat16 artificial intelligence datatype for higher-precision
computations" (arXiv 1904.06376), eq. 2 with two terms.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def product(weight: Tensor, bias: Tensor | None, split: bool) -> Callable[[Tensor], Tensor]:
    """x (..., in) -> x weight^T + bias (..., out), with weight (out, in).

    Args:
        weight: The weight; with `split` its parts are made here, once.
        bias: The bias, or None.
        split: Three bfloat16 products. Not where TF32 is allowed, nor for weights of other dtypes.
    """
    if not split or weight.dtype != torch.float32 or torch.get_float32_matmul_precision() != "highest":
        return lambda x: functional.linear(x, weight, bias)
    parts = _second(weight.detach()).T

    def linear(x: Tensor) -> Tensor:
        result = _SplitLinear.apply(x.flatten(0, -2), weight, parts).view(*x.shape[:-1], -1)
        return result if bias is None else result + bias

    return linear


class _SplitLinear(torch.autograd.Function):
    """x (n, in), weight (out, in), its parts (3 in, out) -> (n, out), float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, parts: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _multiply(_first(x), parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        (gradient,), (x, weight) = gradients, ctx.saved_tensors
        of_x = _multiply(_first(gradient), _second(weight.T).T)
        of_weight = _multiply(_first(gradient.T), _second(x.T).T)
        return of_x, of_weight, None


def _first(x: Tensor) -> Tensor:
    """(n, k) -> [x_h, x_h, x_l] (n, 3 k) bfloat16."""
    return _parts(x, low=2)


def _second(w: Tensor) -> Tensor:
    """(m, k) -> [w_h, w_l, w_h] (m, 3 k) bfloat16."""
    return _parts(w, low=1)


def _parts(x: Tensor, low: int) -> Tensor:
    parts = x.new_empty(x.shape[0], 3, x.shape[1], dtype=torch.bfloat16)
    parts.copy_(x[:, None])
    torch.sub(x, parts[:, 0], out=parts[:, low])
    return parts.flatten(1)


def _multiply(a: Tensor, b: Tensor) -> Tensor:
    """Product of bfloat16 matrices with sums and result in float32."""
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()
