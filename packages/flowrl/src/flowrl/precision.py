"""Precision of float32 matrix products on a GPU."""

import contextlib
from collections.abc import Iterator
from typing import Literal

import torch

Precision = Literal["float32", "tf32"]


@contextlib.contextmanager
def matrix_products(precision: Precision) -> Iterator[None]:
    """Within it, float32 products run in float32, or in TF32 (10 bits of mantissa, many times as fast). A CPU has no TF32.

    The setting is the process's: a backward pass belongs inside too.
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
