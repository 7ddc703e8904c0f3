"""Timing on a CPU or a GPU, and what the machine reaches at most."""

import resource
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from flowrl.precision import matrix_products

WARM_UPS, REPEATS = 2, 15
Work = Callable[[], Any]


class Clock:
    """Times work on a device: by its events on a GPU, by the clock on a CPU.

    Attributes:
        ceilings: Operations/s of a large matrix product in each precision, and bytes/s (read and written) of a large copy.

    Args:
        device: Where the work runs.
        seconds: After so long nothing more is timed.
    """

    def __init__(self, device: torch.device, seconds: float) -> None:
        self.device, self.deadline = device, time.monotonic() + seconds
        self.ceilings = self._ceilings()

    def alternate(self, ways: Mapping[str, Work]) -> tuple[dict[str, float], float]:
        """Median time of each way [ms], and the peak of memory [MB], of all of them."""
        if time.monotonic() > self.deadline:
            raise TimeoutError("the time given by --seconds was over")
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        times: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(WARM_UPS + REPEATS):
            for name, work in ways.items():
                elapsed = self.time(work)
                if number >= WARM_UPS:
                    times[name].append(elapsed)
            if time.monotonic() > self.deadline and number > WARM_UPS:
                break
        if self.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self.device) / 2**20
        else:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        return {name: float(np.median(values)) for name, values in times.items()}, peak

    def time(self, work: Work) -> float:
        """[ms]"""
        if self.device.type == "cpu":
            start = time.perf_counter()
            work()
            return 1e3 * (time.perf_counter() - start)
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(self.device)
        first.record()
        work()
        last.record()
        torch.cuda.synchronize(self.device)
        return first.elapsed_time(last)

    def floor(self, flops: float, num_bytes: float, dtype: str) -> float:
        """The larger of the times that the operations and the bytes take at best [ms]."""
        rate = self.ceilings.get(f"{dtype}_flops", self.ceilings["float32_flops"])
        return 1e3 * max(flops / rate, num_bytes / self.ceilings["bytes"])

    def _ceilings(self) -> dict[str, float]:
        """Operations/s of a large matrix product in each precision, and bytes/s (read and written) of a large copy."""
        on_gpu = self.device.type == "cuda"
        side = 8192 if on_gpu else 1024
        ceilings = {}
        for name, dtype, precision in (
            ("float32", torch.float32, "float32"),
            ("tf32", torch.float32, "tf32"),
            ("bfloat16", torch.bfloat16, "float32"),
        ):
            if not on_gpu and name != "float32":
                continue
            a, b = (torch.randn(side, side, device=self.device).to(dtype) for _ in range(2))
            with matrix_products(precision):  # type: ignore[arg-type]
                times = [self.time(lambda a=a, b=b: a @ b) for _ in range(WARM_UPS + REPEATS)]  # type: ignore[misc]
            ceilings[f"{name}_flops"] = 2 * side**3 / (1e-3 * float(np.median(times[WARM_UPS:])))
        if on_gpu:
            ceilings["split_flops"] = ceilings["bfloat16_flops"] / 3
        source = torch.randn(2**28 if on_gpu else 2**24, device=self.device)
        target = torch.empty_like(source)
        times = [self.time(lambda: target.copy_(source)) for _ in range(WARM_UPS + REPEATS)]
        ceilings["bytes"] = 2 * source.numel() * 4 / (1e-3 * float(np.median(times[WARM_UPS:])))
        return ceilings


class DeviceTimes:
    """Time of a GPU between the start and the end of each encoding, and from there to the end of the denoising.

    The host runs ahead of the GPU, so that its own clock tells only the sum of both. A context manager: meanwhile the
    policy's `encode` and `unnormalize` set marks.

    Args:
        policy: A `FlowPolicy`; on a CPU nothing is marked.
    """

    def __init__(self, policy: Any) -> None:
        self._policy, self._events = policy, {"encode": [], "denoise": []}

    def __enter__(self) -> "DeviceTimes":
        if self._policy.device.type != "cuda":
            return self
        policy, encode, unnormalize = self._policy, self._policy.encode, self._policy.unnormalize
        last: list[torch.cuda.Event] = []

        def timed_encode(observation: Any, tasks: Any) -> Any:
            start = self._mark()
            prefix = encode(observation, tasks)
            last[:] = [self._mark()]
            self._events["encode"].append((start, last[0]))
            return prefix

        def timed_unnormalize(actions: Any) -> Any:
            self._events["denoise"].append((last[0], self._mark()))
            return unnormalize(actions)

        policy.encode, policy.unnormalize = timed_encode, timed_unnormalize
        return self

    def __exit__(self, *error: object) -> None:
        for name in ("encode", "unnormalize"):
            self._policy.__dict__.pop(name, None)

    def seconds(self) -> dict[str, float]:
        """Sums, by name; none without a GPU."""
        if self._policy.device.type != "cuda":
            return {}
        torch.cuda.synchronize(self._policy.device)
        return {
            f"gpu_{name}_s": 1e-3 * sum(start.elapsed_time(end) for start, end in events)
            for name, events in self._events.items()
        }

    def _mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._policy.device))
        return event
