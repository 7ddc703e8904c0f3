"""Ratios along denoising steps, positions and joints, against numpy."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from flowrl.breakdown import break_down, element_sums
from flowrl.config import TrainConfig
from flowrl.loss import executed_mask, log_ratio, outside_clip
from flowrl.policy.critic import Critic
from flowrl.policy.noise import NoiseModel
from flowrl.ppo import PPO
from flowrl.prefix import Rows
from flowrl.record import scalars
from toy import SPEC, ToyPolicy, toy_decisions

SHAPE = (7, 4, 5, 2)
AXES = {"by_step": (0, 2, 3), "by_position": (0, 1, 3), "by_joint": (0, 1, 2)}


def log_ratios(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    scale = torch.tensor([0.01, 0.05, 0.2, 0.4])[:, None, None]
    return scale * torch.randn(SHAPE, generator=generator)


def test_means_along_each_axis_are_numpys():
    values, mask = log_ratios(0), torch.ones(7, 1, 5, 1)
    result = break_down([element_sums(values, outside_clip(values, 0.2), mask)])
    x = values.double().numpy()
    for name, axes in AXES.items():
        actual = getattr(result, name)
        np.testing.assert_allclose(actual["kl"], (np.exp(x) - 1 - x).mean(axes), rtol=2e-3)
        np.testing.assert_allclose(actual["ratio_std"], x.std(axes), rtol=2e-3)
        np.testing.assert_allclose(
            actual["clip_fraction"], (np.abs(np.exp(x) - 1) > 0.2).mean(axes), rtol=2e-3
        )
    assert result.ratio_std == pytest.approx(x.std(), rel=1e-3)
    assert [len(result.by_step["kl"]), len(result.by_position["kl"]), len(result.by_joint["kl"])] == [4, 5, 2]


def test_minibatches_and_parts_add_up():
    values, mask = log_ratios(0), (torch.arange(5) < torch.arange(1, 8)[:, None]).float()[:, None, :, None]
    clipped = outside_clip(values, 0.2)
    whole = element_sums(values, clipped, mask)
    parts = [element_sums(values[i], clipped[i], mask[i]) for i in (slice(0, 3), slice(3, 4), slice(4, 7))]
    torch.testing.assert_close(sum(parts), whole)


def test_targets_that_were_never_executed_have_no_value():
    values, mask = log_ratios(1), torch.ones(7, 1, 5, 1)
    mask[:, :, 3:] = 0
    result = break_down([element_sums(values, outside_clip(values, 0.2), mask)])
    assert result.by_position["kl"][3:] == [None, None]
    assert result.by_step["ratio_std"] == pytest.approx(
        values[:, :, :3].double().numpy().std(axis=(0, 2, 3)).tolist(), rel=2e-3
    )


def test_kl_is_the_last_epochs_and_clipping_that_of_all():
    first, last, mask = log_ratios(0), torch.zeros(SHAPE), torch.ones(7, 1, 5, 1)
    result = break_down([element_sums(x, outside_clip(x, 0.2), mask) for x in (first, last)])
    assert result.by_step["kl"] == [0.0] * 4 and result.ratio_std == 0.0
    expected = 0.5 * (np.abs(np.expm1(first.double().numpy())) > 0.2).mean(axis=(0, 2, 3))
    np.testing.assert_allclose(result.by_step["clip_fraction"], expected, rtol=2e-3)


@pytest.mark.parametrize("unit", ["element", "step", "chunk"])
def test_an_update_reports_what_its_scalars_are_means_of(unit):
    config = TrainConfig(minibatch=10, epochs=1, lr=1e-3, critic_warmup=0, ratio=unit, clip=0.01)
    policy, noise = ToyPolicy(), NoiseModel(SPEC, sigma_start=0.3, sigma_end=0.1)
    ppo = PPO(policy, noise, Critic(2), config)
    advantages = np.random.default_rng(0).standard_normal(20)
    stats = ppo.update(toy_decisions(policy, noise, 20), advantages, np.zeros(20), iteration=1)
    for values in (stats.by_step, stats.by_position, stats.by_joint):
        assert values is not None
        assert np.mean(values["kl"]) == pytest.approx(stats.kl, rel=2e-3)
        assert np.mean(values["clip_fraction"]) == pytest.approx(stats.clip_fraction, rel=2e-3)
        assert min(values["ratio_std"]) > 0
    assert stats.ratio_std is not None and stats.ratio_std > 0


def test_a_skipped_minibatch_counts_for_nothing():
    config = TrainConfig(minibatch=5, epochs=1, critic_warmup=0, lr=1e-3)
    policy, noise = ToyPolicy(), NoiseModel(SPEC, sigma_start=0.3, sigma_end=0.1)
    ppo = PPO(policy, noise, Critic(2), config)
    decisions = toy_decisions(policy, noise, 20)
    decisions.states[3, 2, 1, 0] = float("nan")
    decisions = replace(decisions, rounds=[np.arange(4, 20)])
    stats = ppo.update(decisions, np.random.default_rng(0).standard_normal(20), np.zeros(20), iteration=1)
    assert stats.skipped == 1 and stats.by_step is not None
    assert all(np.isfinite(values).all() for values in stats.by_step.values())


def test_ratio_units_clip_differently_on_identical_chains():
    """One change of the policy, scored once: per element the ratios are near 1, their sums over a step or chunk are not.

    The units' log-ratios are sums of the elements': sigma of a sum of n independent ones is sqrt(n) larger.
    """
    policy, noise = ToyPolicy(), NoiseModel(SPEC, sigma_start=0.3, sigma_end=0.1)
    decisions = toy_decisions(policy, noise, 400, round_size=100)
    config = TrainConfig(minibatch=100, epochs=1, lr=2e-3, critic_warmup=0)
    ppo = PPO(policy, noise, Critic(2), config)
    ppo.update(decisions, np.random.default_rng(0).standard_normal(400), np.zeros(400), iteration=1)
    with torch.no_grad():
        new = ppo._log_prob(decisions, Rows.of(range(400), decisions.states.device))
    mask = executed_mask(decisions.num_executed, noise)
    ratios = {unit: log_ratio(new, decisions.log_prob, mask, unit) for unit in ("element", "step", "chunk")}
    torch.testing.assert_close(ratios["step"], ratios["element"].sum((2, 3)))
    torch.testing.assert_close(ratios["chunk"], ratios["step"].sum(1))
    spread = {unit: float(value.std()) for unit, value in ratios.items()}
    clipped = {unit: float(outside_clip(value, 0.2).mean()) for unit, value in ratios.items()}
    assert spread["element"] < spread["step"] < spread["chunk"]
    assert clipped["element"] < clipped["step"] < clipped["chunk"]
    # A unit is kept or clipped whole: what a step's ratio clips are all 8 elements of the step.
    elements = element_sums(ratios["element"], outside_clip(ratios["step"], 0.2), mask)[4]
    assert torch.equal(elements, elements[:, :1, :1].expand_as(elements))
    # Bounds from the clip alone: |log r| of a unit that is not clipped is below log 1.25, whatever its size, so a step of
    # 8 elements may move as little as one element may.
    kept = ratios["step"][outside_clip(ratios["step"], 0.2) == 0]
    assert float(kept.abs().max()) < np.log(1.25)


def test_arrays_become_scalars_of_tensorboard():
    line = {
        "iteration": 3,
        "kl": 0.5,
        "train_success": 0.25,
        "val_success": None,
        "by_step": {"kl": [0.1, None]},
        "by_joint": None,
        "rollout_parts": {"env": 1.0},
    }
    assert dict(scalars(line)) == {"update/kl": 0.5, "train/train_success": 0.25, "by_step_kl/00": 0.1}
