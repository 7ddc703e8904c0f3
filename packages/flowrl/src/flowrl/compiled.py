"""Functions of tensors compiled by `torch.compile`: on a GPU their elementwise work takes a few kernels instead of many."""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import warnings
from collections.abc import Callable
from typing import Any, Literal

import torch

from flowrl.errors import FlowRLError
from flowrl.progress import tell

Compile = Literal["auto", "on", "off"]
MIN_PARAMETERS = 100_000_000
"""Policies that `auto` compiles: smaller ones gain less than the compilation takes."""
MAX_VARIANTS = 256
"""Of one function: shapes, dtypes, precisions, with and without gradients. torch's own limit is 8."""
OPTIONS: dict[str, bool] = {
    "deterministic": True,  # no choice among kernels by their time, which would make two runs differ
    "emulate_precision_casts": True,  # rounds to bfloat16 where the operations one by one do
    "pattern_matcher": False,  # it removes conversions to bfloat16 and back, which are roundings
}
"""Of the compiler Inductor."""
BACKWARD: dict[str, bool] = {
    "force_non_lazy_backward_lowering": True,  # with the forward pass: it fails there, or not at all
    # torch 2.11 writes over a saved tensor that it is done with, also where another one that it is not done with is a view of it.
    "donated_buffer": False,
}
"""Of the backward pass."""


class Compiler:
    """Calls functions of tensors, compiled or as they are.

    A compiled function is compiled anew for other shapes, dtypes and arguments that are no tensors. One whose compilation fails is
    called as it is from then on, and that is told once.

    Args:
        enabled: Whether to compile.
        backend: Of `torch.compile`.
    """

    def __init__(self, enabled: bool, backend: Any = "inductor") -> None:
        self.enabled, self._backend = enabled, backend
        self.failed: set[Callable[..., Any]] = set()

    def __call__(self, function: Callable[..., Any], *args: Any) -> Any:
        """`function(*args)`. The function is one of a module, and reads nothing beside its arguments."""
        if not self.enabled or function in self.failed:
            return function(*args)
        try:
            with (
                torch._dynamo.config.patch(
                    recompile_limit=MAX_VARIANTS, accumulated_recompile_limit=MAX_VARIANTS
                ),
                torch._functorch.config.patch(**BACKWARD),
            ):
                return _compiled(function, self._backend)(*args)
        except (torch._dynamo.exc.TorchDynamoException, torch._dynamo.exc.FailOnRecompileLimitHit) as error:
            self.failed.add(function)
            reason = " ".join(str(error).split())[:200]
            tell(f"torch.compile failed on {function.__name__} ({reason}); it runs without, slower")
            return function(*args)


@functools.cache
def _compiled(function: Callable[..., Any], backend: Any) -> Callable[..., Any]:
    warnings.filterwarnings("ignore", "TensorFloat32 tensor cores", UserWarning)  # float32 is meant
    options: Any = OPTIONS if backend == "inductor" else None
    return torch.compile(function, backend=backend, fullgraph=True, dynamic=False, options=options)


def choose_compiler(choice: str, mode: str, device: torch.device, num_parameters: int) -> Compiler:
    """What --compile asks for.

    Args:
        choice: "on"; "off"; or "auto": on a GPU, for policies of at least `MIN_PARAMETERS`, where Triton and a C compiler are.
        mode: Of the velocity; "exact" is never compiled.
        device: The policy's.
        num_parameters: Its size.

    Raises:
        FlowRLError: Another choice, or "on" with "exact".
    """
    if choice not in ("auto", "on", "off"):
        raise FlowRLError(f"--compile {choice!r}: must be auto, on, off")
    if mode == "exact":
        if choice == "on":
            raise FlowRLError(
                "--compile on: the exact velocity is never compiled; give --velocity fused, split or tf32"
            )
        return Compiler(False)
    if choice == "auto":
        wanted = device.type == "cuda" and num_parameters >= MIN_PARAMETERS
        missing = _missing() if wanted else None
        if missing:
            tell(f"--compile auto: {missing} is not there, so that the layers run as they are, slower")
        return Compiler(wanted and not missing)
    return Compiler(choice == "on")


def _missing() -> str | None:
    """What compiling for a GPU lacks on this machine."""
    if importlib.util.find_spec("triton") is None:
        return "Triton"
    if not any(shutil.which(name) for name in (os.environ.get("CC", ""), "cc", "gcc", "clang") if name):
        return "a C compiler (cc, gcc or clang)"
    return None
