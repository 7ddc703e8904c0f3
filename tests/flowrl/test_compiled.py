"""Compiled layers against the same functions as they are. The code generators are left out: they are slow, and a GPU's is another."""

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from flowrl import compiled
from flowrl.compiled import Compiler, choose_compiler
from flowrl.errors import FlowRLError
from flowrl.policy.fused_vlm import FusedVLM
from flowrl.policy.smolvla import SmolVLAFlowPolicy
from flowrl.precision import matrix_products

STEPS = 10


def compile_with(policy, mode, backend):
    """`choose_velocity` with another backend."""
    policy.choose_velocity(mode, "off")
    policy._compiler = Compiler(True, backend)
    policy._fused_vlm = FusedVLM(policy.module.model, policy._unit_interval, policy._compiler)


@pytest.mark.parametrize("mode", ["fused", "split"])
def test_compiled_layers_are_the_same_and_all_layers_of_a_kind_share_one(base_folder, make_observation, mode):
    policy, counter = SmolVLAFlowPolicy.load(base_folder), CompileCounterWithBackend("aot_eager")
    weights = list(policy.trainable_parameters().values())
    x_t, time = torch.randn(2 * STEPS, 50, 6), torch.rand(2 * STEPS)

    def work():
        prefix = policy.encode(make_observation(2), ["Pick fast.", "Pick very fast."])
        with torch.no_grad():
            sampled = policy.velocity_field(prefix)(x_t[:2], time[:2])
        v_t = policy.velocity_field(prefix, STEPS)(x_t, time)
        gradients = torch.autograd.grad(v_t.square().mean(), weights)
        return [*prefix.tensors.values(), sampled, v_t, *gradients]

    policy.choose_velocity(mode, "off")
    expected = work()
    compile_with(policy, mode, counter)
    for _ in range(2):
        for value, other in zip(work(), expected):
            assert value.dtype == other.dtype
            torch.testing.assert_close(value, other, rtol=1e-4, atol=1e-5)
    # Images: look-up, patches, layer, connector. Text: tables, layer, last layer.
    # Expert, without gradients and with: tables and prefix in one each; chunk, joint and cross layer, velocity; parts of weights.
    in_prefix, in_field = 7, 6
    parts = 6 if mode == "split" else 0  # a shape each
    assert in_prefix + 2 * in_field <= counter.frame_count <= in_prefix + 2 * (in_field + parts)
    assert policy.compiled


def test_another_precision_is_compiled_anew():
    counter = CompileCounterWithBackend("eager")
    call, x = Compiler(True, counter), torch.randn(3, 3)
    for precision in ("float32", "tf32", "float32", "tf32"):
        with matrix_products(precision):
            assert torch.allclose(call(squared, x), x @ x)
    assert counter.frame_count == 2


def squared(x: Tensor) -> Tensor:
    return x @ x


def test_what_cannot_be_compiled_runs_without_and_says_so_once(capsys):
    def broken(graph, inputs):
        raise OSError("no compiler\nanywhere")

    call, x = Compiler(True, broken), torch.randn(3, 3)
    for _ in range(2):
        assert torch.equal(call(squared, x), x @ x)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and call.failed == {squared}
    assert "torch.compile failed on squared" in lines[0] and "no compiler anywhere" in lines[0]


@pytest.mark.parametrize(
    ("choice", "device", "size", "missing", "expected"),
    [
        ("auto", "cuda", 450, None, True),
        ("auto", "cuda", 2, None, False),
        ("auto", "cpu", 450, None, False),
        ("auto", "cuda", 450, "Triton", False),
        ("on", "cpu", 2, "Triton", True),
        ("off", "cuda", 450, None, False),
    ],
)
def test_large_policies_on_a_gpu_are_compiled(monkeypatch, capsys, choice, device, size, missing, expected):
    monkeypatch.setattr(compiled, "_missing", lambda: missing)
    compiler = choose_compiler(choice, "fused", torch.device(device), size * 1_000_000)
    assert compiler.enabled == expected
    told = "Triton is not there" in capsys.readouterr().err
    assert told == (choice == "auto" and missing is not None)


def test_a_choice_that_cannot_be_is_refused_in_one_line(policy):
    with pytest.raises(FlowRLError, match="--compile 'yes': must be auto, on, off"):
        policy.choose_velocity("exact", "yes")
    with pytest.raises(FlowRLError, match="--compile on: the exact velocity is never compiled"):
        policy.choose_velocity("auto", "on")
    assert policy.velocity_mode == "exact" and not policy.compiled


def test_a_missing_compiler_is_found_out(monkeypatch):
    monkeypatch.setattr(compiled.shutil, "which", lambda name: None)
    assert compiled._missing() in ("Triton", "a C compiler (cc, gcc or clang)")
