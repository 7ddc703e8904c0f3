"""Work of a policy on a CPU in several threads of Python, each with one of torch's.

The operations of a small policy are too short to be shared: torch's own threads wait for each other after every one, and do so
spinning, which takes a core from a simulator, or, where no core is free, slows all of them down many times. Parts of a batch share
nothing. The results are those of one thread, to the bit.
"""

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Self, TypeVar

import torch
from torch import Tensor

from flowrl.policy.interface import FlowPolicy

Item = TypeVar("Item")
Result = TypeVar("Result")

MAX_PARAMETERS = 20_000_000
"""Trainable ones of a policy that is worked on in parts; a larger one's products are large enough for torch's own threads."""


class CpuThreads:
    """As many threads as torch had; within the context torch has one in each. One where parts would not help: as if it were not there.

    Parts do not help on a GPU, with policies that take whole minibatches or are large, and with compiled ones, since
    torch.compile is not made for several threads.

    Args:
        policy: Whose work it is.

    Attributes:
        count: Number of threads.
    """

    def __init__(self, policy: FlowPolicy) -> None:
        self.count = torch.get_num_threads() if _in_parts(policy) else 1
        self._pool: ThreadPoolExecutor | None = None

    def __enter__(self) -> Self:
        if self.count > 1:
            torch.set_num_threads(1)
            # torch's number belongs to the thread that sets it.
            self._pool = ThreadPoolExecutor(self.count, initializer=torch.set_num_threads, initargs=(1,))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None
            torch.set_num_threads(self.count)

    def map(self, function: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
        """The function of each item, in their order. The first error, in that order, is raised; what had not begun is left out.

        Whether gradients are enabled is a thread's own: the function has to say it.
        """
        if self._pool is None or len(items) == 1:
            return [function(item) for item in items]
        return list(self._pool.map(function, items))

    def slices(self, batch: int) -> list[slice]:
        """Rows of a batch for each thread, at least two: a batch of one runs other kernels, with other rounding."""
        count = max(1, min(self.count, batch // 2))
        ends = [batch * number // count for number in range(count + 1)]
        return [slice(*pair) for pair in itertools.pairwise(ends)]


def sum_in_order(tensors: Sequence[Tensor]) -> Tensor:
    """The sum from the first to the last, a contiguous tensor of its own: what .grad is after as many backward passes.

    torch's fused AdamW takes a gradient's memory as if it lay in the weight's order, also where it does not.
    """
    total = tensors[0].clone(memory_format=torch.contiguous_format)
    for tensor in tensors[1:]:
        total += tensor
    return total


def _in_parts(policy: FlowPolicy) -> bool:
    if policy.device.type != "cpu" or policy.is_small or policy.compiled:
        return False
    return sum(parameter.numel() for parameter in policy.trainable_parameters().values()) <= MAX_PARAMETERS
