"""A policy's work on a CPU in several threads: torch's own threads are as before, and nothing is lost or reordered."""

import threading

import pytest
import torch

import flowrl.threads
from flowrl.threads import CpuThreads, sum_in_order
from toy import ToyPolicy


@pytest.fixture(autouse=True)
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def test_each_thread_has_one_of_torch_and_its_number_comes_back():
    together = threading.Barrier(3, timeout=20)  # passed only by three at once

    def work(number: int) -> tuple[int, int]:
        together.wait()
        return number, torch.get_num_threads()

    with CpuThreads(ToyPolicy()) as threads:
        assert threads.count == 3 and torch.get_num_threads() == 1
        assert threads.map(work, range(3)) == [(0, 1), (1, 1), (2, 1)]
    assert torch.get_num_threads() == 3


def test_first_error_is_raised_and_the_number_of_threads_comes_back():
    def work(number: int) -> int:
        if number >= 2:
            raise ValueError(f"part {number}")
        return number

    with pytest.raises(ValueError, match="part 2"), CpuThreads(ToyPolicy()) as threads:
        threads.map(work, range(9))
    assert torch.get_num_threads() == 3


@pytest.mark.parametrize(
    ("batch", "sizes"),
    [(1, [1]), (2, [2]), (3, [3]), (4, [2, 2]), (5, [2, 3]), (6, [2, 2, 2]), (20, [6, 7, 7])],
)
def test_slices_cover_a_batch_and_none_is_a_single_row(batch, sizes):
    slices = CpuThreads(ToyPolicy()).slices(batch)
    assert [len(range(batch)[part]) for part in slices] == sizes
    assert [row for part in slices for row in range(batch)[part]] == list(range(batch))


def test_where_parts_do_not_help_torch_keeps_its_threads(monkeypatch):
    small, compiled = ToyPolicy(), ToyPolicy()
    small.is_small = True
    monkeypatch.setattr(type(compiled), "compiled", property(lambda self: self is compiled))
    on_gpu = ToyPolicy()
    on_gpu.device = torch.device("cuda")
    monkeypatch.setattr(flowrl.threads, "MAX_PARAMETERS", 10**6)
    large = ToyPolicy()
    large.module["field"].append(torch.nn.Linear(1000, 1001))
    for policy in (small, compiled, on_gpu, large):
        with CpuThreads(policy) as threads:
            assert threads.count == 1 and torch.get_num_threads() == 3
            assert threads.slices(8) == [slice(0, 8)]
            ran_in = threads.map(lambda _: threading.current_thread(), [0, 1])
            assert ran_in == [threading.main_thread()] * 2


def test_sum_is_that_of_backward_passes_in_order():
    parameter = torch.zeros(100, requires_grad=True)
    parts = [torch.randn(100, generator=torch.Generator().manual_seed(n)) * 10**n for n in range(4)]
    for part in parts:
        (parameter * part).sum().backward()
    total = sum_in_order(parts)
    assert torch.equal(total, parameter.grad)
    total.zero_()
    assert parts[0].any()  # not written over


def test_sum_of_gradients_that_lie_in_another_order_steps_as_backward_passes_do():
    gradient = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)).t()
    weights = [torch.nn.Parameter(torch.zeros(3, 4)) for _ in range(2)]
    weights[0].grad = sum_in_order([gradient])
    (weights[1] * gradient).sum().backward()
    for weight in weights:
        torch.optim.AdamW([weight], lr=0.1, fused=True).step()
    assert torch.equal(*weights)
    assert torch.equal(weights[0].sign(), -gradient.sign())
