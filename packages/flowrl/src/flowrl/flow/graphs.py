"""Whole denoising chains as CUDA graphs: a chain is some thousand small kernels, and launching them takes longer than they run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flowrl.flow.sampler import Chain, integrate
from flowrl.policy.interface import FlowPolicy
from flowrl.policy.noise import NoiseModel
from flowrl.prefix import Prefix
from flowrl.progress import tell

MAX_GRAPHS = 12
"""Graphs that are kept, the latest used; each holds a prefix of its batch size, and all share the memory in between."""


class ChainGraphs:
    """A policy's `integrate` captured once for each batch size and noise, and replayed.

    The weights are read where they lie, so a graph follows an optimizer that changes them in place; when they have moved,
    it is captured anew. Where a capture fails, chains are computed without graphs from then on, and that is told once.
    """

    def __init__(self) -> None:
        self._graphs: dict[tuple[Any, ...], _Graph] = {}
        self._weights: list[Tensor] | None = None
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None
        self.failed = False

    def run(
        self,
        policy: FlowPolicy,
        prefix: Prefix,
        x_0: Tensor,
        noise: NoiseModel | None,
        eps: Tensor | None,
    ) -> Chain:
        """What `integrate` returns for the same arguments, in memory of its own. Called without gradients."""
        if self.failed:
            return integrate(policy, prefix, x_0, noise, eps)
        key = (
            tuple((name, tensor.shape, tensor.dtype) for name, tensor in prefix.tensors.items()),
            policy.velocity_mode,
            torch.get_float32_matmul_precision(),
            id(noise),  # a graph keeps its noise alive, so that no other gets this number
        )
        places = self._places(policy, noise)
        graph = self._graphs.pop(key, None)
        if graph is None or graph.places != places:
            try:
                with torch.cuda.device(policy.device):
                    graph = self._capture(policy, prefix, x_0, noise, eps, places)
            except RuntimeError as error:  # what torch raises for an operation that cannot be captured
                self.failed = True
                self._graphs.clear()
                reason = " ".join(str(error).split())[:200]
                tell(f"no CUDA graph of the denoising ({reason}); chains are computed step by step, slower")
                return integrate(policy, prefix, x_0, noise, eps)
        self._graphs[key] = graph
        if len(self._graphs) > MAX_GRAPHS:
            del self._graphs[next(iter(self._graphs))]
        return graph.replay(prefix, x_0, eps)

    def _places(self, policy: FlowPolicy, noise: NoiseModel | None) -> tuple[int, ...]:
        """Addresses of all tensors that a chain reads beside its inputs."""
        if self._weights is None:
            self._weights = list(policy.trainable_parameters().values())
        own = [] if noise is None else [*noise.parameters(), *noise.buffers()]
        return tuple(tensor.data_ptr() for tensor in (*self._weights, *own))

    def _capture(
        self,
        policy: FlowPolicy,
        prefix: Prefix,
        x_0: Tensor,
        noise: NoiseModel | None,
        eps: Tensor | None,
        places: tuple[int, ...],
    ) -> _Graph:
        if self._pool is None:
            self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        stream = self._stream
        assert stream is not None
        inputs = Prefix(
            {name: tensor.contiguous().clone() for name, tensor in prefix.tensors.items()}, prefix.token_axes
        )
        start, normals = x_0.contiguous().clone(), None if eps is None else eps.contiguous().clone()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # libraries make their workspaces before the capture
            integrate(policy, inputs, start, noise, normals)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
            chain = integrate(policy, inputs, start, noise, normals)
        return _Graph(graph, inputs, start, normals, chain, noise, places)


@dataclass
class _Graph:
    """A captured chain, and the memory that it reads and writes."""

    graph: torch.cuda.CUDAGraph
    prefix: Prefix
    x_0: Tensor
    eps: Tensor | None
    chain: Chain
    noise: NoiseModel | None
    places: tuple[int, ...]

    def replay(self, prefix: Prefix, x_0: Tensor, eps: Tensor | None) -> Chain:
        for name, tensor in self.prefix.tensors.items():
            tensor.copy_(prefix.tensors[name])
        self.x_0.copy_(x_0)
        if self.eps is not None and eps is not None:
            self.eps.copy_(eps)
        self.graph.replay()
        log_prob = self.chain.log_prob
        # Copied: the next replay, of any graph, writes into the same memory.
        return Chain(self.chain.states.clone(), None if log_prob is None else log_prob.clone())
