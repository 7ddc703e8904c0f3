"""PPO on stored denoising chains: one update loop; `loss` has its formulas."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from flowrl.breakdown import Values, break_down, element_sums
from flowrl.config import TrainConfig
from flowrl.errors import FlowRLError
from flowrl.flow.likelihood import rescore, rescore_flat
from flowrl.gradient_noise import GradientSums, NoiseScale, episode_groups
from flowrl.graphs import GraphCache
from flowrl.loss import approx_kl, clipped_loss, executed_mask, log_ratio, outside_clip
from flowrl.policy.critic import Critic
from flowrl.policy.interface import FlowPolicy
from flowrl.policy.noise import NoiseModel, gaussian_entropy
from flowrl.precision import Precision, matrix_products
from flowrl.prefix import Prefix, Rows
from flowrl.rollout import Decisions
from flowrl.threads import CpuThreads, sum_in_order

_Rest = TypeVar("_Rest")

BAD_BATCHES_IN_A_ROW = 3
CHECKED_ROUNDS = 4
CPU_PART = 16
"""Decisions in one backward pass on a CPU: 256 at once of a 2 M policy take 8 GB and 2.7 times as long (benchmarks/update.py)."""


def adapted_lr(lr: float, kl: float, target: float) -> float:
    """Learning rate whose KL should be nearer to `target`: KL grows with its square; a factor of 0.5 to 2."""
    factor = (target / kl) ** 0.5 if kl > 0 else 2.0
    return lr * min(2.0, max(0.5, factor))


@dataclass
class UpdateStats:
    """What an update reports, averaged over its minibatches (kl over those of the last epoch); None: not applicable.

    ratio_std, by_step, by_position, by_joint: see `breakdown.Breakdown`. grad_signal and episodes_needed: see
    `gradient_noise`; the latter from all iterations so far.
    """

    kl: float | None = None
    kl_decision: float | None = None
    clip_fraction: float | None = None
    pg_loss: float | None = None
    v_loss: float | None = None
    grad_norm: float | None = None
    grad_cosine: float | None = None
    grad_signal: float | None = None
    episodes_needed: float | None = None
    ratio_std: float | None = None
    by_step: Values | None = None
    by_position: Values | None = None
    by_joint: Values | None = None
    ratio_max_dev: float | None = None
    epochs_done: int = 0
    kl_stop: bool = False
    lr: float = 0.0
    skipped: int = 0


class Batch(NamedTuple):
    """What the loss reads of B decisions; see `Decisions`.

    Attributes:
        old: (B, K, F, A), the log-probabilities to compare with.
        advantage, target: (B,).
    """

    prefix: Prefix
    states: Tensor
    num_executed: Tensor
    features: Tensor
    old: Tensor
    advantage: Tensor
    target: Tensor


_COLUMNS = ("pg_loss", "v_loss", "kl", "kl_decision", "clip_fraction", "grad_norm", "bad")


class PPO:
    """Optimizer and update loop for policy, noise and critic.

    Attributes:
        optimizer: AdamW without weight decay, three groups: policy, noise, critic.
        lr: The policy's learning rate now; `kl_adapt` changes it.
        bad_in_a_row: Minibatches just before now that were skipped; counted on over iterations.
        noise_scale: The gradient's, over all iterations so far; with `grad_cosine`.
    """

    def __init__(self, policy: FlowPolicy, noise: NoiseModel, critic: Critic, config: TrainConfig) -> None:
        self.policy, self.noise, self.critic, self.config = policy, noise, critic, config
        policy.module.eval()  # dropout would score a chain by another network than the one that sampled it
        self.lr = config.lr
        in_tf32 = policy.velocity_mode == "tf32" or config.update_precision == "tf32"
        self.precision: Precision = "tf32" if in_tf32 and policy.device.type == "cuda" else "float32"
        self.groups: list[list[nn.Parameter]] = [
            list(policy.trainable_parameters().values()),
            list(noise.parameters()),
            list(critic.parameters()),
        ]
        rates = (config.lr, config.sigma_lr, config.critic_lr)
        groups = [{"params": params, "lr": rate} for params, rate in zip(self.groups, rates) if params]
        # Fused: it is the one that can skip a step by a flag on the device (`found_inf`), without waiting for it.
        self.optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
        self.bad_in_a_row = 0
        self.noise_scale = NoiseScale()
        self._threads = CpuThreads(policy)
        self._part_size = config.minibatch
        self._parameters = [parameter for group in self.groups for parameter in group]
        self._have_gradient: list[bool] = []  # of the captured loss: a replay does not call it
        self._graphs: GraphCache | None = None
        if policy.graphs is not None:
            read = [*self._parameters, *noise.buffers()]
            self._graphs = GraphCache("the update", policy.device, read)

    def update(
        self,
        decisions: Decisions,
        advantages: np.ndarray,
        returns: np.ndarray,
        iteration: int,
        on_minibatch: Callable[[int], None] = lambda count: None,
    ) -> UpdateStats:
        """One iteration's update: epochs over shuffled minibatches of decisions, the last partial one included.

        The policy and the noise stay bit-identical during the critic's warm-up and when all advantages are 0.

        Args:
            decisions: N decisions as collected.
            advantages: (N,), normalized over the whole iteration.
            returns: (N,), the critic's targets.
            iteration: Counted from 1; with the training seed it determines the order of the minibatches.
            on_minibatch: Called with the number of decisions after each minibatch.

        Raises:
            FlowRLError: three minibatches in a row had a loss or gradient that is not finite.
        """
        with CpuThreads(self.policy) as self._threads:
            return self._update(decisions, advantages, returns, iteration, on_minibatch)

    def _update(
        self,
        decisions: Decisions,
        advantages: np.ndarray,
        returns: np.ndarray,
        iteration: int,
        on_minibatch: Callable[[int], None],
    ) -> UpdateStats:
        config, device = self.config, decisions.states.device
        whole = self.policy.is_small or device.type != "cpu"  # fits into memory
        self._part_size = min(config.minibatch, config.minibatch if whole else CPU_PART, len(decisions))
        advantage = torch.as_tensor(advantages, dtype=torch.float32, device=device)
        target = torch.as_tensor(returns, dtype=torch.float32, device=device)
        train_policy = iteration > config.critic_warmup and bool(np.any(advantages))
        stats = UpdateStats(lr=self.lr if train_policy else 0.0)
        self.optimizer.param_groups[0]["lr"] = self.lr
        stats.ratio_max_dev, old = self._old_log_prob(decisions, needed=train_policy)
        if config.grad_cosine and train_policy:
            self._measure_gradient(decisions, old, advantage, stats)

        rows: list[dict[str, float]] = []
        sums: list[Tensor] = []  # one an epoch
        for epoch in range(config.epochs):
            table = []
            sums.append(torch.zeros(5, *old.shape[1:], device=device))
            for index in self._minibatches(len(decisions), iteration, epoch, device):
                row, elements = self._step(decisions, index, old, advantage, target, train_policy)
                table.append(row)
                sums[-1] += elements
                on_minibatch(len(index))
            epoch_rows = self._read(table, stats)
            rows += epoch_rows
            stats.epochs_done += 1
            if train_policy:
                stats.kl, stats.kl_decision = _mean(epoch_rows, "kl"), _mean(epoch_rows, "kl_decision")
                if stats.kl is not None and stats.kl > config.target_kl:
                    stats.kl_stop = True
                    break
        for epoch in range(config.epochs, config.epochs + config.critic_epochs):
            table = [
                self._step(decisions, index, old, advantage, target, train_policy=False)[0]
                for index in self._minibatches(len(decisions), iteration, epoch, device)
            ]
            self._read(table, stats)

        stats.v_loss = _mean(rows, "v_loss")
        if train_policy:
            for name in ("clip_fraction", "pg_loss", "grad_norm"):
                setattr(stats, name, _mean(rows, name))
            for name, value in vars(break_down(sums)).items():
                setattr(stats, name, value)
            if config.kl_adapt is not None and stats.kl is not None:
                self.lr = adapted_lr(self.lr, stats.kl, config.kl_adapt)
        return stats

    def _old_log_prob(self, decisions: Decisions, needed: bool) -> tuple[float, Tensor]:
        """The largest |ratio - 1| of chains rescored as they were sampled, and the log-probabilities to compare with.

        Those are the sampler's own if the update's kernel reproduces them bit for bit on the checked rounds; otherwise
        all are rescored by the update's kernel, or the ratios would measure the kernels.
        """
        num_rounds = len(decisions.rounds)
        chosen = sorted({round(i) for i in np.linspace(0, num_rounds - 1, min(num_rounds, CHECKED_ROUNDS))})
        max_dev, kernels_agree = torch.zeros((), device=decisions.states.device), True
        for rows in (decisions.rounds[i] for i in chosen):
            padded = np.repeat(rows, 2) if len(rows) == 1 else rows  # as in the rollout
            index = Rows.of(padded, decisions.states.device)
            stored = decisions.log_prob[index.index]
            with torch.no_grad():
                again = rescore(
                    self.policy, decisions.prefix[index], decisions.states[index.index], self.noise
                )
                deviation = ((again - stored)[: len(rows)].exp() - 1).abs().max()
                max_dev = torch.maximum(max_dev, deviation)
                if needed and kernels_agree:
                    kernels_agree = torch.equal(self._log_prob(decisions, index), stored)
        if kernels_agree:
            return float(max_dev), decisions.log_prob
        order = Rows.of(np.arange(len(decisions)), decisions.states.device)
        parts = [
            part for index in order.split(self.config.minibatch) for part in index.split(self._part_size)
        ]
        scored = self._threads.map(torch.no_grad()(lambda part: self._log_prob(decisions, part)), parts)
        return float(max_dev), torch.cat(scored)

    def _log_prob(self, decisions: Decisions, rows: Rows) -> Tensor:
        """The update's own kernel: all denoising steps of the chosen decisions in one batch, differentiable."""
        size = self._part_size if self.policy.compiled else len(rows)
        parts = [
            self._score(decisions.prefix[part], decisions.states[part.index]) for part in rows.split(size)
        ]
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def _score(self, prefix: Prefix, states: Tensor) -> Tensor:
        """`rescore_flat`. A compiled policy would be compiled anew for each size: there the last row fills all parts up to one."""
        count = len(states)
        if self.policy.compiled and count < self._part_size:
            rows = torch.arange(self._part_size, device=states.device).clamp_(max=count - 1)
            prefix, states = prefix[rows], states[rows]
        with matrix_products(self.precision):
            return rescore_flat(self.policy, prefix, states, self.noise)[:count]

    def _minibatches(
        self, num_decisions: int, iteration: int, epoch: int, device: torch.device
    ) -> Sequence[Rows]:
        """Every decision once, shuffled; a pure function of seed, iteration and epoch, so a resumed run repeats it."""
        rng = np.random.default_rng([self.config.train_seed, iteration, epoch])
        return Rows.of(rng.permutation(num_decisions), device).split(self.config.minibatch)

    def _step(
        self,
        decisions: Decisions,
        minibatch: Rows,
        old: Tensor,
        advantage: Tensor,
        target: Tensor,
        train_policy: bool,
    ) -> tuple[Tensor, Tensor]:
        """One optimizer step on one minibatch, without waiting for the device.

        Returns a row of `_COLUMNS`, and what `element_sums` says of the ratios; that is 0 for a skipped minibatch.
        Gradients are summed over parts of the minibatch, each weighted by its share of what counts, so that the result
        is the whole minibatch's mean and memory is a part's.
        """
        self.optimizer.zero_grad()
        num_elements = executed_mask(decisions.num_executed[minibatch.index], self.noise).sum()

        def batch_of(rows: Rows) -> Batch:
            index = rows.index
            values = (
                *(decisions.states, decisions.num_executed, decisions.features),
                *(old, advantage, target),
            )
            return Batch(decisions.prefix[rows], *(tensor[index] for tensor in values))

        def loss_of(rows: Rows) -> tuple[Tensor, tuple[Tensor, Tensor]]:
            return self._loss(batch_of(rows), len(rows) / len(minibatch), num_elements, train_policy)

        if train_policy and self._graphs is not None and len(minibatch) == self.config.minibatch:
            rests = [self._replay(self._graphs, batch_of(minibatch))]
        else:
            rests = self._add_gradients(loss_of, minibatch.split(self._part_size))
        total, elements = map(sum_in_order, zip(*rests))
        zero = torch.zeros((), device=old.device)
        norms = [self._clip(group, zero) for group in self.groups]
        bad = ~torch.isfinite(torch.stack([total[0] + total[1], *norms])).all()
        self.optimizer.found_inf = bad.float()
        self.optimizer.step()
        row = torch.cat([total, torch.stack([norms[0], bad.float()])])
        return row, torch.where(bad, torch.zeros_like(elements), elements)

    def _loss(
        self, batch: Batch, by_size: float, num_elements: Tensor, train_policy: bool
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """A part's share of a minibatch's loss, and of what `_step` returns.

        Args:
            batch: The part.
            by_size: Its share of the decisions.
            num_elements: (), executed ones of the minibatch.
            train_policy: Whether there is more than the critic's loss.
        """
        config, old = self.config, batch.old
        v_loss = 0.5 * (self.critic(batch.features) - batch.target).square().mean()
        loss = by_size * config.vf_coef * v_loss
        row = torch.zeros(len(_COLUMNS) - 2, device=old.device)
        sums = torch.zeros(5, *old.shape[1:], device=old.device)
        if train_policy:
            new = self._score(batch.prefix, batch.states)
            mask = executed_mask(batch.num_executed, self.noise)
            by_elements = mask.sum() / num_elements.clamp(min=1.0)
            share = by_elements if config.ratio == "element" else by_size
            pg_loss, clip_fraction = self._policy_loss(new, old, batch.advantage, mask)
            loss = loss + share * pg_loss
            if config.entropy_coef:
                entropy = gaussian_entropy(self.noise.sigma(batch.features)).mean()
                loss = loss - by_size * config.entropy_coef * entropy
            kl, kl_decision = approx_kl(new, old, mask)
            sums = self._element_sums(new.detach(), old, mask)
            shares = share * pg_loss.detach(), row[1], by_elements * kl, by_size * kl_decision
            row = torch.stack([*shares, share * clip_fraction])
        row[1] = by_size * v_loss.detach()
        return loss, (row, sums)

    def _replay(self, graphs: GraphCache, batch: Batch) -> tuple[Tensor, Tensor]:
        """Gradients of a whole minibatch as a CUDA graph: to launch its kernels takes the host longer than they run."""
        names, axes = list(batch.prefix.tensors), batch.prefix.token_axes

        def function(*tensors: Tensor) -> tuple[Tensor, ...]:
            prefix = Prefix(dict(zip(names, tensors)), axes)
            own = Batch(prefix, *tensors[len(names) :])
            num_elements = executed_mask(own.num_executed, self.noise).sum()
            with torch.enable_grad():
                loss, rest = self._loss(own, 1.0, num_elements, True)
                with matrix_products(self.precision):
                    gradients = torch.autograd.grad(loss, self._parameters, allow_unused=True)
            self._have_gradient = [gradient is not None for gradient in gradients]
            own_gradients = (gradient.contiguous() for gradient in gradients if gradient is not None)
            return *rest, *own_gradients  # contiguous as the weights are: see `sum_in_order`

        key = ("update", self.policy.velocity_mode, self.policy.compiled, *names)
        row, sums, *gradients = graphs.run(key, function, [*batch.prefix.tensors.values(), *batch[1:]])
        own = itertools.compress(self._parameters, self._have_gradient)
        for parameter, gradient in zip(own, gradients, strict=True):
            parameter.grad = gradient
        return row, sums

    def _add_gradients(
        self, loss_of: Callable[[Rows], tuple[Tensor, _Rest]], parts: Sequence[Rows]
    ) -> list[_Rest]:
        """Adds the gradients of the parts' losses, in the order of the parts; returns what else `loss_of` tells of each."""
        if self._threads.count == 1:
            rests = []
            for rows in parts:
                loss, rest = loss_of(rows)
                with matrix_products(self.precision):
                    loss.backward()
                rests.append(rest)
            return rests
        parameters = self._parameters

        def gradients_of(rows: Rows) -> tuple[tuple[Tensor | None, ...], _Rest]:
            loss, rest = loss_of(rows)
            return torch.autograd.grad(loss, parameters, allow_unused=True), rest

        results = self._threads.map(gradients_of, parts)
        for parameter, *gradients in zip(parameters, *(gradients for gradients, _ in results)):
            own = [gradient for gradient in gradients if gradient is not None]
            if own:
                parameter.grad = sum_in_order(own)
        return [rest for _, rest in results]

    def _policy_loss(
        self, new: Tensor, old: Tensor, advantage: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Clipped loss and clip fraction of log-probabilities (B, K, F, A), with the mask of their elements."""
        ratios = log_ratio(new, old, mask, self.config.ratio)
        weight = mask if self.config.ratio == "element" else torch.ones_like(ratios)
        return clipped_loss(ratios, advantage, weight, self.config.clip)

    def _element_sums(self, new: Tensor, old: Tensor, mask: Tensor) -> Tensor:
        clipped = outside_clip(log_ratio(new, old, mask, self.config.ratio), self.config.clip)
        return element_sums(log_ratio(new, old, mask, "element"), clipped, mask)

    def _clip(self, group: list[nn.Parameter], zero: Tensor) -> Tensor:
        """Clips a group's gradient and returns the norm before; 0 on the device for a group that has none now."""
        with_gradient = [parameter for parameter in group if parameter.grad is not None]
        return nn.utils.clip_grad_norm_(with_gradient, self.config.max_grad_norm) if with_gradient else zero

    def _read(self, table: Sequence[Tensor], stats: UpdateStats) -> list[dict[str, float]]:
        """An epoch's rows in one transfer, without the skipped minibatches, which are counted."""
        good = []
        for values in torch.stack(list(table)).cpu().tolist():
            row = dict(zip(_COLUMNS, values))
            self.bad_in_a_row = self.bad_in_a_row + 1 if row["bad"] else 0
            if self.bad_in_a_row >= BAD_BATCHES_IN_A_ROW:
                raise FlowRLError(
                    f"{BAD_BATCHES_IN_A_ROW} minibatches in a row had a loss or gradient that is not finite; no weight was "
                    "changed by them. Lower --lr, or look for broken observations or rewards; the last checkpoint is good"
                )
            stats.skipped += bool(row["bad"])
            good += [] if row["bad"] else [row]
        return good

    def _measure_gradient(
        self, decisions: Decisions, old: Tensor, advantage: Tensor, stats: UpdateStats
    ) -> None:
        """How much of the policy's gradient is signal, before any step; see `gradient_noise`."""
        groups = episode_groups(decisions.episode)
        if not groups:
            return
        sums = GradientSums()
        elements = executed_mask(decisions.num_executed, self.noise).sum()

        def loss_of(rows: Rows) -> tuple[Tensor, None]:
            index = rows.index
            mask = executed_mask(decisions.num_executed[index], self.noise)
            new = self._log_prob(decisions, rows)
            loss, _ = self._policy_loss(new, old[index], advantage[index], mask)
            by_size, by_elements = len(index) / len(old), mask.sum() / elements.clamp(min=1.0)
            return loss * (by_elements if self.config.ratio == "element" else by_size), None

        for group in groups:
            self.optimizer.zero_grad()
            minibatches = Rows.of(group, old.device).split(self.config.minibatch)
            parts = [rows for minibatch in minibatches for rows in minibatch.split(self._part_size)]
            self._add_gradients(loss_of, parts)
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.groups[0]]
            sums.add(len(groups) * torch.cat([gradient.flatten() for gradient in gradients]))
        self.optimizer.zero_grad()
        estimate = sums.estimate(len(np.unique(decisions.episode)))
        self.noise_scale.add(estimate)
        stats.grad_cosine, stats.grad_signal = estimate.cosine, estimate.signal_fraction
        stats.episodes_needed = self.noise_scale.episodes_needed


def _mean(rows: Sequence[dict[str, float]], name: str) -> float | None:
    return sum(row[name] for row in rows) / len(rows) if rows else None
