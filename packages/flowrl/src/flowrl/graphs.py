"""Computations of many small kernels as CUDA graphs: launching the kernels one by one takes longer than they run."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flowrl.progress import tell

MAX_GRAPHS = 12
"""Graphs of one cache, the latest used; each keeps its inputs, and all share the memory in between."""


class GraphCache:
    """Captures a function of tensors once for each key and shape, and replays it.

    Other tensors that the function reads, the weights, are read where they lie: a graph follows an optimizer that changes
    them in place. When they have moved, the function is captured anew. Where a capture fails, the function is called
    directly from then on, and that is told once.

    Args:
        what: What the function computes, for that line.
        device: The GPU.
        weights: The tensors that the function reads beside its inputs.
    """

    def __init__(self, what: str, device: torch.device, weights: Sequence[Tensor]) -> None:
        self.what, self.device, self.weights = what, device, list(weights)
        self.failed = False
        self._graphs: dict[Hashable, _Graph] = {}
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None

    @torch.no_grad()
    def run(
        self,
        key: Hashable,
        function: Callable[..., tuple[Tensor, ...]],
        inputs: Sequence[Tensor],
        weights: Sequence[Tensor] = (),
    ) -> tuple[Tensor, ...]:
        """`function(*inputs)` in memory of its own, without gradients but for those that it takes itself. It must not wait for the device.

        Args:
            key: With the shapes and dtypes of the inputs it determines what the function does.
            function: The function.
            inputs: Its arguments, on the device.
            weights: Further tensors that it reads.
        """
        if self.failed:
            return function(*inputs)
        key = (key, torch.get_float32_matmul_precision(), *((t.shape, t.dtype) for t in inputs))
        places = tuple(tensor.data_ptr() for tensor in (*self.weights, *weights))
        graph = self._graphs.pop(key, None)
        if graph is None or graph.places != places:
            try:
                with torch.cuda.device(self.device):
                    graph = self._capture(function, inputs, places)
            except RuntimeError as error:  # what torch raises for an operation that cannot be captured
                self.failed = True
                self._graphs.clear()
                reason = " ".join(str(error).split())[:200]
                tell(f"no CUDA graph of {self.what} ({reason}); it runs without, slower")
                return function(*inputs)
        self._graphs[key] = graph
        if len(self._graphs) > MAX_GRAPHS:
            del self._graphs[next(iter(self._graphs))]
        return graph.replay(inputs)

    def _capture(
        self, function: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Tensor], places: tuple[int, ...]
    ) -> _Graph:
        if self._stream is None:
            self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        stream = self._stream
        static = [tensor.contiguous().clone() for tensor in inputs]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # libraries make their workspaces before the capture
            function(*static)
        torch.cuda.current_stream().wait_stream(stream)
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            with (
                without_collection(),
                torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"),
            ):
                outputs = function(*static)
        finally:
            torch.cuda.set_stream(current)  # a capture that fails leaves its own
        return _Graph(graph, static, outputs, places, function)


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Collects garbage, and then none within: graphs that are found unused there, of a policy before, would break the capture off."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@dataclass
class _Graph:
    """A captured function, and the memory that it reads and writes. The function keeps what it reads alive."""

    graph: torch.cuda.CUDAGraph
    inputs: Sequence[Tensor]
    outputs: tuple[Tensor, ...]
    places: tuple[int, ...]
    function: Callable[..., tuple[Tensor, ...]]

    def replay(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        for own, tensor in zip(self.inputs, inputs):
            own.copy_(tensor)
        self.graph.replay()
        # Copied: the next replay, of any graph, writes into the same memory.
        return tuple(output.clone() for output in self.outputs)
