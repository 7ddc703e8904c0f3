"""The moving average of the weights: its numbers, and that it alone is what a run validates and saves."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from flowrl.average import WeightAverage
from flowrl.checkpoint import load_training_state
from flowrl.config import EvalConfig, TrainConfig, check_config
from flowrl.errors import FlowRLError
from flowrl.evaluate import evaluate
from flowrl.facts import describe_weights, other_rate
from flowrl.train import train
from toy import load_toy

CONFIG = TrainConfig(
    policy="none",
    env_id="toy_inline:ToyInline-v0",
    iterations=4,
    envs=3,
    episodes=8,
    val_episodes=5,
    lr=1e-3,
    sigma_start=0.4,
    sigma_end=0.1,
    target_kl=1.0,
    minibatch=8,
    average_decay=0.9,
    device="cpu",
    torch_threads=1,
)


def load(path, *, device, expert_dtype, rename):
    return load_toy(path, device=device)


def walk(
    decay: float, iterations: int, dtype: torch.dtype = torch.float32
) -> tuple[WeightAverage, nn.Parameter, list]:
    """A parameter that walks at random, its average, and where it was."""
    rng = np.random.default_rng(3)
    weight = nn.Parameter(torch.tensor(rng.normal(size=4), dtype=dtype))
    average = WeightAverage({"w": weight}, decay)
    places = [weight.detach().double().numpy().copy()]
    for iteration in range(1, iterations + 1):
        with torch.no_grad():
            weight.add_(torch.tensor(rng.normal(size=4), dtype=dtype))
        average.update(iteration)
        places.append(weight.detach().double().numpy().copy())
    return average, weight, places


def test_average_is_the_exponential_one_with_a_short_memory_at_first():
    average, weight, places = walk(0.8, 60)
    expected = places[0]
    for n, place in enumerate(places[1:], 1):
        decay = min(0.8, (1 + n) / (10 + n))
        expected = decay * expected + (1 - decay) * place
    with average.applied():
        np.testing.assert_allclose(weight.detach().numpy(), expected, rtol=1e-5, atol=1e-6)


def test_weights_are_back_bit_for_bit_after_use_and_after_an_error():
    average, weight, _ = walk(0.9, 5)
    before = weight.detach().clone()
    with pytest.raises(RuntimeError, match="inside"), average.applied():
        assert not torch.equal(weight, before)
        raise RuntimeError("inside")
    assert torch.equal(weight, before)


def test_weights_that_do_not_move_are_their_own_average():
    weight = nn.Parameter(torch.randn(5, generator=torch.Generator().manual_seed(0)))
    average = WeightAverage({"w": weight}, 0.95)
    for iteration in range(1, 20):
        average.update(iteration)
    before = weight.detach().clone()
    with average.applied():
        assert torch.equal(weight, before)


def test_decay_0_keeps_nothing():
    average, weight, places = walk(0.0, 3)
    assert average.tensors() == {}
    with average.applied():
        np.testing.assert_array_equal(weight.detach().double().numpy(), places[-1])


def test_average_of_low_precision_weights_is_stored_in_float32():
    average, _, _ = walk(0.9, 10, torch.bfloat16)
    stored = average.tensors()
    assert stored["weights.w"].dtype == torch.bfloat16
    assert stored["average.w"].dtype == torch.float32


def test_average_of_noisy_descent_is_nearer_to_the_minimum_than_the_weights():
    rng = np.random.default_rng(0)
    weight = nn.Parameter(torch.full((64,), 3.0, dtype=torch.float32))
    average = WeightAverage({"w": weight}, 0.95)
    for iteration in range(1, 301):
        with torch.no_grad():
            weight.sub_(0.1 * (weight + torch.tensor(rng.normal(size=64) * 4, dtype=torch.float32)))
        average.update(iteration)
    own = float(weight.detach().square().mean())
    with average.applied():
        assert float(weight.detach().square().mean()) < 0.6 * own


def test_a_run_saves_the_average_as_its_policy_and_the_weights_beside_it(tmp_path):
    train(replace(CONFIG, out=str(tmp_path / "plain"), average_decay=0.0), load)
    train(replace(CONFIG, out=str(tmp_path / "averaged")), load)
    folders = {name: tmp_path / name / "last" for name in ("plain", "averaged")}
    plain = load_file(folders["plain"] / "model.safetensors")
    policy = load_file(folders["averaged"] / "model.safetensors")
    state = load_file(folders["averaged"] / "flowrl.safetensors")
    weights = {
        name.removeprefix("weights."): value for name, value in state.items() if name.startswith("weights.")
    }
    assert weights and set(weights) <= set(plain)
    assert all(
        torch.equal(weights[name], plain[name]) for name in weights
    )  # averaging does not change the training
    assert any(not torch.equal(policy[name], plain[name]) for name in weights)
    assert not any(name.startswith("weights.") for name in load_file(folders["plain"] / "flowrl.safetensors"))


@pytest.mark.parametrize("decay", [1.0, -0.1, float("nan")])
def test_a_decay_that_cannot_work_is_refused(decay):
    with pytest.raises(FlowRLError, match=r"--average-decay .*must"):
        check_config(replace(CONFIG, average_decay=decay))


def test_an_evaluation_names_the_weights_and_another_control_rate(tmp_path, capfd):
    for name, decay in (("plain", 0.0), ("averaged", 0.95)):
        config = replace(CONFIG, out=str(tmp_path / name), average_decay=decay, iterations=1)
        checkpoint = train(config, load) / "last"
        out = tmp_path / f"eval-{name}"
        config = EvalConfig(
            policy=str(checkpoint), env_id=CONFIG.env_id, episodes=2, out=str(out), device="cpu"
        )
        capfd.readouterr()
        evaluate(config, load)
        weights = json.loads((out / "eval_results.json").read_text())["weights"]
        assert weights == ("average, decay 0.95" if decay else "as trained")
        told = capfd.readouterr().err
        assert f"{checkpoint} ({weights})" in told and "targets a second" not in told
    assert load_training_state(checkpoint).meta["control_rate"] == 30
    assert "trained at 30 targets a second, this environment has 10" in other_rate(str(checkpoint), 10.0)
    assert other_rate(str(checkpoint), 30.0) == other_rate(str(checkpoint), None) == ""
    assert other_rate("user/name", 10.0) == "" and describe_weights("user/name") == "as trained"
