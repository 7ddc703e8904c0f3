"""The loss by hand, and the update loop on stored chains of the toy policy."""

import copy
import math
from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest
import torch

from flowrl.config import TrainConfig
from flowrl.errors import FlowRLError
from flowrl.flow.sampler import episode_noise, sample_chain
from flowrl.flow.schedule import geometric_schedule
from flowrl.loss import approx_kl, clipped_loss, executed_mask, log_ratio, masked_mean
from flowrl.policy.critic import Critic
from flowrl.policy.interface import FlowSpec
from flowrl.policy.noise import NoiseModel
from flowrl.policy.smolvla import SmolVLAFlowPolicy
from flowrl.ppo import PPO, adapted_lr
from flowrl.prefix import HostPrefix, Prefix, Rows
from flowrl.rollout import Decisions
from toy import SPEC, ToyPolicy, toy_decisions

CONFIG = TrainConfig(
    minibatch=7, epochs=2, lr=1e-3, critic_warmup=0, target_kl=10.0, sigma_start=0.3, sigma_end=0.1
)


def learner(config=CONFIG, **noise_settings) -> PPO:
    policy = ToyPolicy()
    noise = NoiseModel(SPEC, sigma_start=0.3, sigma_end=0.1, **noise_settings)
    torch.manual_seed(0)
    return PPO(policy, noise, Critic(2), config)


def parameters(ppo: PPO) -> dict[str, torch.Tensor]:
    modules = {"policy": ppo.policy.module, "noise": ppo.noise, "critic": ppo.critic}
    return {
        f"{name}.{key}": p.detach().clone()
        for name, m in modules.items()
        for key, p in m.state_dict().items()
    }


def changed(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> set[str]:
    return {name for name in before if not torch.equal(before[name], after[name])}


def random_signal(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    advantages = rng.standard_normal(count)
    return (advantages - advantages.mean()) / advantages.std(), rng.standard_normal(count)


# -- pure functions ---------------------------------------------------------------------------------------------------


def test_clipped_loss_by_hand():
    # ratios 1.5, 0.5, 1.1 with clip 0.2:
    #   A = +1: min(1.5, 1.2) = 1.2   min(0.5, 0.8) = 0.5    min(1.1, 1.1) = 1.1
    #   A = -2: min(-3, -2.4) = -3    min(-1, -1.6) = -1.6   min(-2.2, -2.2) = -2.2
    ratios = torch.tensor([1.5, 0.5, 1.1]).log().expand(2, 3)
    loss, clip_fraction = clipped_loss(ratios, torch.tensor([1.0, -2.0]), torch.ones(2, 3), clip=0.2)
    assert float(loss) == pytest.approx(-(1.2 + 0.5 + 1.1 - 3.0 - 1.6 - 2.2) / 6)
    assert float(clip_fraction) == pytest.approx(4 / 6)


def test_log_ratio_of_a_step_is_the_sum_over_its_elements_and_of_a_chunk_over_all():
    old, new = torch.zeros(1, 2, 2, 1), torch.tensor([[[[0.1], [0.2]], [[0.3], [0.4]]]])
    mask = torch.ones(1, 1, 2, 1)
    assert torch.equal(log_ratio(new, old, mask, "element"), new)
    torch.testing.assert_close(log_ratio(new, old, mask, "step"), torch.tensor([[0.3, 0.7]]))
    torch.testing.assert_close(log_ratio(new, old, mask, "chunk"), torch.tensor([1.0]))
    mask[0, 0, 1] = 0.0
    torch.testing.assert_close(log_ratio(new, old, mask, "step"), torch.tensor([[0.1, 0.3]]))
    torch.testing.assert_close(log_ratio(new, old, mask, "chunk"), torch.tensor([0.4]))


def test_log_ratio_is_clamped_so_that_the_loss_stays_finite():
    ratios = log_ratio(
        torch.tensor([[[[500.0]]]]), torch.zeros(1, 1, 1, 1), torch.ones(1, 1, 1, 1), "element"
    )
    assert float(ratios) == 20.0
    loss, _ = clipped_loss(ratios, torch.tensor([-1.0]), torch.ones(1, 1, 1, 1), 0.2)
    assert math.isfinite(float(loss))


def test_kl_estimate_by_hand_per_element_and_per_decision():
    # log-ratios 0.1 and -0.2: k3 = e^0.1 - 1 - 0.1 = 0.0051709 and e^-0.2 - 1 + 0.2 = 0.0187308
    new = torch.tensor([[[[0.1]], [[-0.2]]], [[[0.0]], [[0.0]]]])
    kl, kl_decision = approx_kl(new, torch.zeros_like(new), torch.ones(2, 1, 1, 1))
    assert float(kl) == pytest.approx((0.0051709 + 0.0187308) / 4, abs=1e-6)
    assert float(kl_decision) == pytest.approx((0.0051709 + 0.0187308) / 2, abs=1e-6)


def test_kl_estimate_approaches_that_of_two_gaussians():
    old, new = torch.distributions.Normal(0.0, 0.5), torch.distributions.Normal(0.05, 0.5)
    x = old.sample((20_000, 1, 1, 1))
    kl, _ = approx_kl(new.log_prob(x), old.log_prob(x), torch.ones(20_000, 1, 1, 1))
    assert float(kl) == pytest.approx(float(torch.distributions.kl_divergence(old, new)), rel=0.1)


def test_a_shift_of_a_hundredth_keeps_every_units_loss_finite():
    """10 steps of 50 x 6 values at the default schedule, means .01 off: 5 sigma at the last step, thousands of nats a chunk."""
    spec = FlowSpec(10, 50, 50, 6, 6)
    noise = NoiseModel(spec)
    generator = torch.Generator().manual_seed(0)
    mean = torch.randn(2, 10, 50, 6, generator=generator)
    eps = torch.randn(2, 10, 50, 6, generator=generator)
    x_next = torch.stack([noise.perturb(mean[:, k], k, eps[:, k]) for k in range(10)], dim=1)
    old, new = noise.log_prob(x_next, mean), noise.log_prob(x_next, mean + 0.01)
    sigma = noise.sigma()[None, :, None, :].double()
    shifted = torch.distributions.Normal(mean.double() + 0.01, sigma).log_prob(x_next.double())
    torch.testing.assert_close(new.double(), shifted, rtol=1e-4, atol=2e-3)
    mask = torch.ones(2, 1, 50, 1)
    assert float((new - old).sum(dim=(1, 2, 3)).abs().min()) > 1000
    for unit in ("element", "step", "chunk"):
        loss, _ = clipped_loss(
            log_ratio(new, old, mask, unit), torch.tensor([1.0, -1.0]), torch.ones(()), 0.2
        )
        assert torch.isfinite(loss), unit


def test_masked_mean_of_nothing_is_0():
    assert float(masked_mean(torch.ones(2, 3), torch.zeros(2, 1))) == 0.0


def test_targets_that_never_ran_do_not_count_in_the_white_basis_and_do_in_cosine_modes():
    num_executed = torch.tensor([4, 1])
    white = executed_mask(num_executed, NoiseModel(SPEC, sigma_start=0.3, sigma_end=0.1))
    assert white[:, 0, :, 0].tolist() == [[1, 1, 1, 1], [1, 0, 0, 0]]
    cosine = executed_mask(
        num_executed, NoiseModel(SPEC, sigma_start=0.3, sigma_end=0.1, basis="dct", num_modes=2)
    )
    assert cosine[:, 0, :, 0].tolist() == [[1, 1], [1, 1]]


def test_adapted_learning_rate_moves_by_a_factor_of_a_half_to_two():
    assert adapted_lr(1e-4, kl=1e-3, target=1e-3) == pytest.approx(1e-4)
    assert adapted_lr(1e-4, kl=2e-3, target=1e-3) == pytest.approx(1e-4 / 2**0.5)
    assert adapted_lr(1e-4, kl=1.0, target=1e-3) == pytest.approx(5e-5)
    assert (
        adapted_lr(1e-4, kl=1e-9, target=1e-3) == adapted_lr(1e-4, kl=0.0, target=1e-3) == pytest.approx(2e-4)
    )


# -- the update -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [{}, {"basis": "dct", "num_modes": 2}, {"learn_sigma": True}, {"kind": "head", "num_features": 2},
     {"kind": "flow-sde"}, {"kind": "flow-sde", "basis": "dct", "num_modes": 2}],
)  # fmt: skip
def test_unchanged_policy_has_ratio_1_bit_for_bit(settings):
    ppo = learner(**settings)
    decisions = toy_decisions(ppo.policy, ppo.noise, 20, round_size=3)
    stats = ppo.update(decisions, *random_signal(20), iteration=1)
    assert stats.ratio_max_dev == 0.0


def test_first_minibatch_of_any_size_has_ratio_1_within_1e_3():
    """One epoch of one step each: the KL of minibatches of another composition than sampled is rounding."""
    for minibatch in (1, 2, 5, 20):
        ppo = learner(TrainConfig(minibatch=minibatch, epochs=1, lr=0.0, critic_warmup=0))
        decisions = toy_decisions(ppo.policy, ppo.noise, 20, round_size=3)
        stats = ppo.update(decisions, *random_signal(20), iteration=1)
        assert stats.kl is not None and stats.kl < 1e-6 and stats.clip_fraction == 0.0


@pytest.mark.parametrize("unit", ["element", "step", "chunk"])
def test_update_changes_policy_and_critic_only_where_it_should(unit):
    ppo = learner(TrainConfig(minibatch=7, lr=1e-3, critic_warmup=0, target_kl=10.0, ratio=unit))
    before = parameters(ppo)
    stats = ppo.update(toy_decisions(ppo.policy, ppo.noise, 20), *random_signal(20), iteration=1)
    names = changed(before, parameters(ppo))
    assert names == {name for name in before if name.startswith(("policy.field.", "critic."))}
    assert (
        stats.kl is not None and stats.kl > 0 and stats.clip_fraction is not None and stats.epochs_done == 2
    )
    assert stats.kl_decision == pytest.approx(stats.kl * 4 * 4 * 2, rel=0.05)


@pytest.mark.parametrize("unit", ["element", "step", "chunk"])
def test_a_minibatch_in_parts_is_the_minibatch(unit, monkeypatch):
    """Parts of 3 and all 20 at once: the same weights and statistics, also with targets that were never executed."""
    results = []
    for part in (3, 1000):
        monkeypatch.setattr("flowrl.ppo.CPU_PART", part)
        config = TrainConfig(
            minibatch=20, lr=1e-3, critic_warmup=0, target_kl=10.0, ratio=unit, grad_cosine=True
        )
        ppo = learner(config)
        decisions = toy_decisions(ppo.policy, ppo.noise, 20)
        decisions = replace(decisions, num_executed=torch.arange(20) % SPEC.n_action_steps + 1)
        stats = ppo.update(decisions, *random_signal(20), iteration=1)
        results.append((parameters(ppo), stats))
    (parts, part_stats), (whole, whole_stats) = results
    for name, value in whole.items():
        torch.testing.assert_close(parts[name], value, rtol=1e-4, atol=2e-6)
    for name in ("pg_loss", "v_loss", "kl", "kl_decision", "clip_fraction", "grad_norm", "grad_cosine"):
        assert getattr(part_stats, name) == pytest.approx(getattr(whole_stats, name), rel=1e-3, abs=1e-6), (
            name
        )


@pytest.mark.parametrize("settings", [{"learn_sigma": True}, {"kind": "head", "num_features": 2}])
def test_the_entropy_bonus_raises_trained_noise_and_leaves_the_policy_alone(settings):
    """Without a signal in the advantages the noise moves by the bonus alone: up."""
    means = []
    for coefficient in (0.0, 1.0):
        config = TrainConfig(
            minibatch=20, lr=0.0, sigma_lr=1e-2, critic_warmup=0, target_kl=1e9, entropy_coef=coefficient
        )
        ppo = learner(config, **settings)
        decisions = toy_decisions(ppo.policy, ppo.noise, 20)
        before = parameters(ppo)
        start = float(ppo.noise.sigma(decisions.features).detach().mean())
        ppo.update(decisions, np.full(20, 1e-9), np.zeros(20), iteration=1)
        means.append(float(ppo.noise.sigma(decisions.features).detach().mean()) / start)
        assert not any(name.startswith("policy.") for name in changed(before, parameters(ppo)))
    assert means[1] > 1.001 and means[1] > means[0]


def test_the_gradient_of_the_bonus_is_that_of_the_mean_entropy():
    """For sigma = s exp(c (sigmoid(p + raw) - sigmoid(p))) the mean entropy's gradient is c sigmoid'(p + raw) / (K A)."""
    config = TrainConfig(minibatch=20, epochs=1, lr=0.0, sigma_lr=0.0, critic_warmup=0, entropy_coef=0.5)
    gradients = []
    for coefficient in (0.0, 0.5):
        ppo = learner(replace(config, entropy_coef=coefficient, max_grad_norm=1e9), learn_sigma=True)
        ppo.update(toy_decisions(ppo.policy, ppo.noise, 20), *random_signal(20), iteration=1)
        gradients.append(ppo.noise.sizes.raw_sigma.grad.clone())
    low, high = 0.5 * 0.1, 1.5 * 0.3
    sizes = torch.tensor(geometric_schedule(0.3, 0.1, 4))
    position = (sizes / low).log() / math.log(high / low)
    expected = -0.5 * math.log(high / low) * position * (1 - position) / (4 * 2)
    torch.testing.assert_close(
        gradients[1] - gradients[0], expected[:, None].expand(4, 2), rtol=1e-3, atol=1e-6
    )


def test_a_noise_head_is_trained_with_the_policy():
    ppo = learner(kind="head", num_features=2)
    before = parameters(ppo)
    ppo.update(toy_decisions(ppo.policy, ppo.noise, 20), *random_signal(20), iteration=1)
    assert "noise.sizes.output.weight" in changed(before, parameters(ppo))


def test_dropout_in_the_network_leaves_the_ratio_at_1():
    ppo = learner()
    field = ppo.policy.module["field"]
    field[1] = torch.nn.Sequential(field[1], torch.nn.Dropout(0.5))
    ppo.policy.module.train()
    ppo = PPO(ppo.policy, ppo.noise, ppo.critic, replace(CONFIG, lr=0.0))
    decisions = toy_decisions(ppo.policy, ppo.noise, 20, round_size=3)
    stats = ppo.update(decisions, *random_signal(20), iteration=1)
    assert stats.ratio_max_dev == 0.0 and stats.kl is not None and stats.kl < 1e-6


def test_nothing_is_clipped_before_the_first_step_and_something_after():
    """One epoch of one minibatch is scored before its own step, so its clip fraction says nothing."""
    fractions = []
    for epochs in (1, 4):
        config = TrainConfig(minibatch=20, epochs=epochs, lr=3e-2, critic_warmup=0, target_kl=1e9)
        ppo = learner(config)
        stats = ppo.update(toy_decisions(ppo.policy, ppo.noise, 20), *random_signal(20), iteration=1)
        fractions.append(stats.clip_fraction)
    assert fractions[0] == 0.0 and fractions[1] > 0.01


def test_the_first_success_after_long_failure_costs_a_bounded_value_loss():
    """Returns of success lie in [0, 1] and values start near 0: half a squared error of at most about 1/2 a success."""
    ppo = learner(TrainConfig(minibatch=20, critic_warmup=100, critic_lr=1e-2))
    decisions = toy_decisions(ppo.policy, ppo.noise, 20)
    for iteration in range(1, 11):
        ppo.update(decisions, np.zeros(20), np.zeros(20), iteration)
    returns = np.zeros(20)
    returns[7] = 1.0
    stats = ppo.update(decisions, np.zeros(20), returns, iteration=11)
    assert stats.v_loss is not None and 0 < stats.v_loss < 1.5 * 0.5 / 20


def test_learned_sigma_is_trained():
    ppo = learner(learn_sigma=True)
    before = parameters(ppo)
    ppo.update(toy_decisions(ppo.policy, ppo.noise, 20), *random_signal(20), iteration=1)
    assert "noise.sizes.raw_sigma" in changed(before, parameters(ppo))


@pytest.mark.parametrize(("iteration", "advantages"), [(1, None), (2, np.zeros(20))])
def test_warm_up_and_equal_rewards_leave_policy_and_noise_bit_identical(iteration, advantages):
    config = TrainConfig(minibatch=7, lr=1e-2, critic_warmup=1, learn_sigma=True)
    ppo = learner(config, learn_sigma=True)
    before = parameters(ppo)
    signal, returns = random_signal(20)
    stats = ppo.update(
        toy_decisions(ppo.policy, ppo.noise, 20),
        signal if advantages is None else advantages,
        returns,
        iteration,
    )
    assert changed(before, parameters(ppo)) == {name for name in before if name.startswith("critic.")}
    assert stats.lr == 0.0 and stats.kl is None and stats.pg_loss is None and stats.v_loss is not None


def test_every_decision_is_used_once_an_epoch_in_another_order():
    ppo = learner()
    epochs = [
        torch.cat([rows.index for rows in ppo._minibatches(20, 1, epoch, torch.device("cpu"))])
        for epoch in range(2)
    ]
    assert [len(batch) for batch in ppo._minibatches(20, 1, 0, torch.device("cpu"))] == [7, 7, 6]
    assert sorted(epochs[0].tolist()) == sorted(epochs[1].tolist()) == list(range(20))
    assert epochs[0].tolist() != epochs[1].tolist()


class Watched(HostPrefix):
    """Notes what its rows are chosen by."""

    asked: ClassVar[list[type]] = []

    def __getitem__(self, index):
        self.asked.append(type(index))
        return super().__getitem__(index)


def test_prefixes_in_host_memory_give_the_same_update_and_are_never_chosen_by_a_device_index():
    signal, returns = random_signal(20)
    updated = []
    for kind in (Prefix, Watched):
        ppo = learner(replace(CONFIG, grad_cosine=True, critic_epochs=1))
        decisions = toy_decisions(ppo.policy, ppo.noise, 20)
        decisions.log_prob = decisions.log_prob + 1e-7  # other kernels: the old ones are scored anew
        decisions.prefix = kind(decisions.prefix.tensors)
        ppo.update(decisions, signal, returns, iteration=2)
        updated.append(parameters(ppo))
    assert all(torch.equal(updated[0][name], value) for name, value in updated[1].items())
    assert len(Watched.asked) > 20 and set(Watched.asked) == {Rows}


@pytest.mark.parametrize("count", [1, 8])
def test_remainder_of_one_decision_is_finite(count):
    ppo = learner()
    rng = np.random.default_rng(0)
    stats = ppo.update(
        toy_decisions(ppo.policy, ppo.noise, count),
        rng.standard_normal(count),
        rng.standard_normal(count),
        iteration=1,
    )
    assert stats.skipped == 0 and all(torch.isfinite(p).all() for p in parameters(ppo).values())


def test_update_is_repeatable_bit_for_bit():
    results = []
    for _ in range(2):
        ppo = learner()
        ppo.update(toy_decisions(ppo.policy, ppo.noise, 20), *random_signal(20), iteration=1)
        results.append(parameters(ppo))
    assert changed(*results) == set()


def test_kl_above_its_target_stops_after_the_epoch():
    ppo = learner(TrainConfig(minibatch=5, epochs=6, lr=3e-2, critic_warmup=0, target_kl=1e-4))
    stats = ppo.update(toy_decisions(ppo.policy, ppo.noise, 20), *random_signal(20), iteration=1)
    assert stats.kl_stop and stats.epochs_done < 6 and stats.kl is not None and stats.kl > 1e-4


def test_minibatch_with_nan_changes_nothing_and_is_counted():
    ppo = learner(TrainConfig(minibatch=20, epochs=1, lr=1e-2, critic_warmup=0))
    good = toy_decisions(ppo.policy, ppo.noise, 20)
    ppo.update(good, *random_signal(20), iteration=1)
    before, state = parameters(ppo), copy.deepcopy(ppo.optimizer.state_dict()["state"])
    advantages, returns = random_signal(20)
    returns[3] = float("nan")
    stats = ppo.update(good, advantages, returns, iteration=2)
    assert stats.skipped == 1 and stats.pg_loss is None
    assert changed(before, parameters(ppo)) == set()
    for index, values in ppo.optimizer.state_dict()["state"].items():
        assert all(torch.equal(values[name], state[index][name]) for name in values)


def test_three_minibatches_in_a_row_with_nan_stop_the_run():
    ppo = learner(TrainConfig(minibatch=5, epochs=1, critic_warmup=0))
    decisions = toy_decisions(ppo.policy, ppo.noise, 20)
    advantages, returns = random_signal(20)
    returns[:] = float("inf")
    with pytest.raises(FlowRLError, match="3 minibatches in a row"):
        ppo.update(decisions, advantages, returns, iteration=1)


def test_single_bad_decision_costs_one_minibatch_of_an_epoch():
    ppo = learner(TrainConfig(minibatch=5, epochs=2, critic_warmup=0))
    decisions = toy_decisions(ppo.policy, ppo.noise, 20)
    decisions.states[3, 2, 1, 0] = float("nan")
    decisions.rounds = [np.arange(4, 20)]
    before = parameters(ppo)
    stats = ppo.update(decisions, *random_signal(20), iteration=1)
    assert stats.skipped == 2
    after = parameters(ppo)
    assert changed(before, after) and all(torch.isfinite(value).all() for value in after.values())


def test_critic_epochs_train_the_critic_alone():
    advantages, returns = random_signal(20)
    plain, extra = learner(), learner(TrainConfig(**{**CONFIG.__dict__, "critic_epochs": 5}))
    for ppo in (plain, extra):
        ppo.update(toy_decisions(ppo.policy, ppo.noise, 20), advantages, returns, iteration=1)
    differing = changed(parameters(plain), parameters(extra))
    assert differing and all(name.startswith("critic.") for name in differing)


def test_learning_rate_is_steered_to_the_kl_target():
    config = TrainConfig(minibatch=20, epochs=4, lr=1e-6, critic_warmup=0, kl_adapt=1e-3, target_kl=10.0)
    ppo = learner(config)
    decisions = toy_decisions(ppo.policy, ppo.noise, 20)
    first = ppo.update(decisions, *random_signal(20), iteration=1)
    second = ppo.update(decisions, *random_signal(20), iteration=2)
    assert first.lr == 1e-6 and second.lr == 2e-6
    assert ppo.optimizer.param_groups[0]["lr"] == 2e-6


def test_kernels_that_differ_make_the_update_rescore_the_old_log_probabilities():
    """Chains stored with slightly wrong log-probabilities stand for a sampler with other kernels."""
    ppo = learner(TrainConfig(minibatch=20, epochs=1, lr=0.0, critic_warmup=0))
    decisions = toy_decisions(ppo.policy, ppo.noise, 20)
    decisions.log_prob += 0.5
    stats = ppo.update(decisions, *random_signal(20), iteration=1)
    assert stats.ratio_max_dev == pytest.approx(1 - math.exp(-0.5), rel=1e-3)
    assert stats.kl is not None and stats.kl < 1e-6


def test_gradient_cosine_of_equal_halves_is_1():
    ppo = learner(TrainConfig(minibatch=5, epochs=1, lr=1e-4, critic_warmup=0, grad_cosine=True))
    half = toy_decisions(ppo.policy, ppo.noise, 10)
    decisions = toy_decisions(ppo.policy, ppo.noise, 20)
    order = torch.arange(10).repeat_interleave(2)
    decisions.prefix, decisions.states = half.prefix[order], half.states[order]
    decisions.log_prob, decisions.features = half.log_prob[order], half.features[order]
    advantages, _ = random_signal(10)
    stats = ppo.update(decisions, np.repeat(advantages, 2), np.zeros(20), iteration=1)
    assert stats.grad_cosine == pytest.approx(1.0, abs=1e-4)


def test_an_expert_in_bfloat16_has_ratio_1_in_batches_of_another_size(base_folder, make_observation, tasks):
    """Sampled in rounds of 4, updated in minibatches of 3: densities stay float32, and the update's own kernel is compared."""
    policy = SmolVLAFlowPolicy.load(base_folder)
    policy.module.model.vlm_with_expert.lm_expert.bfloat16()
    noise = NoiseModel(policy.spec)
    prefix = policy.encode(make_observation(8), tasks(8))
    drawn = [episode_noise(number, 0, policy.spec, noise.num_elements) for number in range(8)]
    x_0, eps = (torch.stack(part) for part in zip(*drawn))
    rounds = [np.arange(0, 4), np.arange(4, 8)]
    chains = [sample_chain(policy, prefix[rows], x_0[rows], noise, eps[rows]) for rows in rounds]
    features = policy.prefix_features(prefix)
    decisions = Decisions(
        prefix=prefix,
        states=torch.cat([chain.states for chain in chains]),
        log_prob=torch.cat([chain.log_prob for chain in chains]),
        features=features,
        num_executed=torch.full((8,), policy.spec.n_action_steps),
        episode=np.arange(8),
        order=np.zeros(8, dtype=np.int64),
        rounds=rounds,
    )
    assert decisions.log_prob.dtype == torch.float32
    config = TrainConfig(minibatch=3, epochs=1, lr=0.0, critic_warmup=0)
    stats = PPO(policy, noise, Critic(features.shape[1]), config).update(decisions, *random_signal(8), 1)
    assert stats.ratio_max_dev == 0.0 and stats.kl is not None and stats.kl < 1e-6
