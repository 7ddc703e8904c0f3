"""Training: the loop, and the run that it works on."""

import dataclasses
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium.vector.utils import create_empty_array

from flowrl.average import WeightAverage
from flowrl.checkpoint import TrainingState, changed_noise, read_meta, save_checkpoint
from flowrl.config import TrainConfig, check_config, parse_env_kwargs, parse_rename
from flowrl.device import prepare_torch
from flowrl.errors import FlowRLError
from flowrl.exploration import describe_noise_tax, make_noise, measure_noise_tax
from flowrl.facts import control_rate
from flowrl.finite import check_advantages
from flowrl.gae import estimate_interleaved, normalize_advantages
from flowrl.gain import Validation, describe_collapse, gain
from flowrl.gradient_noise import NoiseScale
from flowrl.lock import run_lock
from flowrl.metrics import explained_variance, spread
from flowrl.policy.critic import Critic
from flowrl.policy.interface import FlowPolicy
from flowrl.policy.loading import load_policy
from flowrl.policy.noise import gaussian_entropy
from flowrl.ppo import PPO
from flowrl.progress import Progress, tell
from flowrl.randomness import random_state, restore_random_state, seed_all
from flowrl.record import Record, check_unused, describe_line, describe_machine, empty_line, read_log
from flowrl.resume import changed, newest_state, read_args, recorded_config, run_folder, settled_config
from flowrl.rollout import Rollout, collect
from flowrl.scenes import check_disjoint, fixed_scenes, training_scenes
from flowrl.stop import StopRequest
from flowrl.validate import episode_records, log_metrics_of, summary, validate, validation_bound
from flowrl.vector_env import check_spaces, close_vector_env, find_spec, make_vector_envs, resolve_env_kwargs

LoadPolicy = Callable[..., FlowPolicy]


def train(
    config: TrainConfig, load: LoadPolicy = load_policy, preset: Mapping[str, Any] | None = None
) -> Path:
    """Trains and returns the run's folder. On SIGINT or SIGTERM the current step is finished and saved.

    A rollout that is interrupted is dropped: its scenes have trained nothing, and count as unused. With `config.resume`
    the run in `config.out` goes on from its newest checkpoint; what it did after that is repeated.

    Args:
        config: All flags, presets applied. Of a resumed run all, too; see `resume.recorded_config`.
        load: Makes the policy: `load(path, device=..., expert_dtype=..., rename=...)`.
        preset: What the policy's preset had set, for the record.

    Raises:
        FlowRLError: bad input, failing environment, or a diverged update.
    """
    out = run_folder(config)
    with StopRequest() as stop, run_lock(out), Run(config, load, preset or {}) as run:
        run.measure_noise_tax(stop)
        if run.pending is not None:
            run.complete(run.pending, stop)
        while run.iteration < config.iterations and not stop.requested:
            rollout = run.collect(run.iteration + 1, stop)
            if rollout.interrupted:
                break
            line = run.learn(run.iteration + 1, rollout)
            del rollout  # its decisions fill the device's memory
            run.complete(line, stop)
        run.save_last()
        tell(f"{'stopped' if stop.requested else 'done'} after iteration {run.iteration}: {run.out}")
    return run.out


class Run:
    """Policy, environments, optimizer and record of one training run; a context manager.

    Attributes:
        iteration: The last one whose update is done; 0 is the start.
        pending: The log line of `iteration` while it is not complete: at the start, or when its validation was cut off.
        next_index: Index of the first training scene that was never used.
        best_bound, best_iteration: Lower bound of the best validation so far, see `validation_bound`, and where; None and -1
            before.
        random: The random generators as `iteration` left them.
        start: The validation before the first update; None until it is done.
    """

    def __init__(self, config: TrainConfig, load: LoadPolicy, preset: Mapping[str, Any]) -> None:
        check_config(config)
        device = prepare_torch(config.device, config.torch_threads)
        self.out = run_folder(config)
        state: TrainingState | None = None
        if config.resume:
            config = settled_config(config)
            state = newest_state(self.out)
            log = read_log(self.out, 0 if state is None else state.meta["iteration"] + 1)
        else:
            check_unused(self.out)
        self.config = config
        self.policy = load(
            config.policy if state is None else str(state.folder),
            device=device,
            expert_dtype="loaded" if config.expert_bf16 else "float32",
            rename=parse_rename(config.rename),
        )
        self.policy.choose_velocity(config.velocity, config.compile)
        spec = find_spec(config.env_id)
        self.env_kwargs = parse_env_kwargs(config.env_kwargs)
        kwargs = resolve_env_kwargs(spec, self.env_kwargs, config.seconds, self.policy.spec)
        self.vec_envs = make_vector_envs(config.env_id, config.envs, kwargs, self.policy, config.pipeline)
        self.failed, self.log_metrics = False, log_metrics_of(self.vec_envs[0])
        self.iteration, self.next_index, self.best_iteration = 0, 0, -1
        self.best_bound: float | None = None
        self.start: Validation | None = None
        self.pending: dict[str, Any] | None = empty_line(0, self.log_metrics)
        self._last_is_current = False
        try:
            check_spaces(self.vec_envs[0], self.policy.spec)
            if "index" not in self.vec_envs[0].metadata.get("reset_options", ()):
                check_disjoint(config)
            self._build_learner(device)
            if config.resume:
                if state is not None:
                    self._restore(state)
                    if not state.meta["validated"]:
                        self.pending = empty_line(0, self.log_metrics) | json.loads(log.pop())
                self._resume_record(state, log, device)
                self._mend_best()
            else:
                environment = {
                    "id": config.env_id,
                    "kwargs": {**spec.kwargs, **kwargs},
                    "reward_weights": self.vec_envs[0].metadata.get("reward_weights"),
                }
                args = {
                    "flags": dataclasses.asdict(config),
                    "preset": dict(preset),
                    "environment": environment,
                }
                self.record = Record(self.out, args | describe_machine(device, config.env_id))
        except FlowRLError:
            close_vector_env(self.vec_envs, failed=True)
            raise

    def _build_learner(self, device: torch.device) -> None:
        config = self.config
        blank = create_empty_array(self.vec_envs[0].single_observation_space, n=2, fn=np.zeros)
        features = self.policy.prefix_features(self.policy.encode(blank, ["task"] * 2))
        self.noise = make_noise(config, self.policy, features.shape[1])
        if not config.resume and (other := changed_noise(config.policy, self.noise)):
            parts = ", ".join(f"{name} {now} (was {stored})" for name, (stored, now) in other.items())
            tell(f"exploration noise other than {config.policy} was trained with: {parts}")
        seed_all(config.train_seed)
        self.critic = Critic(features.shape[1]).to(device)
        self.ppo = PPO(self.policy, self.noise, self.critic, config)
        self.average = WeightAverage(self.policy.trainable_parameters(), config.average_decay)
        self.random = random_state(device)

    def _restore(self, state: TrainingState) -> None:
        """Everything that the checkpoint's iteration left, but the policy's frozen part, which was loaded from it."""
        state.restore_module("noise", self.noise)
        state.restore_module("critic", self.critic)
        state.restore_optimizer("ppo", self.ppo.optimizer)
        self.average.restore(state)
        meta = state.meta
        self.iteration, self.next_index = meta["iteration"], meta["next_index"]
        self.best_bound, self.best_iteration = meta["best_bound"], meta["best_iteration"]
        self.ppo.lr, self.ppo.bad_in_a_row = meta["lr"], meta["bad_in_a_row"]
        self.ppo.noise_scale = NoiseScale(**meta.get("gradient_noise", {}))
        self.start = Validation.restore(state.group("start"))
        self.pending = None
        restore_random_state(state.group("random"), meta["random"], self.policy.device)
        self.random = random_state(self.policy.device)
        self._last_is_current = state.folder.name == "last"

    def _resume_record(self, state: TrainingState | None, log: list[str], device: torch.device) -> None:
        """Cuts the log back to the lines of the checkpoint, and adds this start to args.json."""
        args = read_args(self.out)
        now = {
            "from_iteration": self.iteration,
            "changed": changed(recorded_config(str(self.out)), self.config),
            **describe_machine(device, self.config.env_id),
        }
        args["resumptions"] = [*args.get("resumptions", []), now]
        self.record = Record(self.out, args, log)
        place = (
            f"{state.folder.name}, iteration {self.iteration}" if state else "its start, without a checkpoint"
        )
        tell(f"resuming {self.out} from {place}")

    def _mend_best(self) -> None:
        """Writes best/ when the run was killed between the checkpoint of its best iteration and that copy of it."""
        if self.best_iteration == self.iteration:
            meta = read_meta(self.out / "best")
            if meta is None or meta["iteration"] != self.iteration:
                self.save("best")

    def collect(self, iteration: int, stop: StopRequest) -> Rollout:
        """The iteration's training episodes, with exploration noise, on scenes that were never used."""
        config = self.config
        with Progress(f"iteration {iteration}: episodes", config.episodes, "episode") as progress:
            try:
                return collect(
                    self.policy,
                    self.vec_envs,
                    training_scenes(config.train_seed, self.next_index, config.episodes),
                    self.noise,
                    early_stop=config.early_stop,
                    keep_decisions=True,
                    keep_final_features=config.bootstrap_truncated,
                    default_task=config.task,
                    offload=config.offload,
                    on_episode=lambda _: progress.advance(),
                    should_stop=lambda: stop.requested,
                )
            except FlowRLError:
                if not stop.requested:
                    raise
                self.failed = True  # the signal went to the whole process group and ended the workers too
                return Rollout([], None, {}, 0.0, 0, interrupted=True)

    def learn(self, iteration: int, rollout: Rollout) -> dict[str, Any]:
        """Advantages and update; returns the iteration's line of the log, still without validation.

        Raises:
            FlowRLError: rewards, advantages or losses that are not finite; the first two have changed nothing.
        """
        start = time.perf_counter()
        config, decisions = self.config, rollout.decisions
        assert decisions is not None
        records = episode_records(rollout)
        with torch.no_grad():
            values = self.critic(decisions.features).cpu().numpy()
            final_values = {
                episode.number: float(self.critic(episode.final_features[None]))
                for episode in rollout.episodes
                if episode.final_features is not None
            }
        rewards = {e.number: config.reward_scale * np.array(e.rewards) for e in rollout.episodes}
        advantages, returns = estimate_interleaved(
            decisions.episode, decisions.order, values, rewards, final_values, config.gamma, config.lam
        )
        check_advantages(advantages, decisions.episode, rollout.episodes)
        with Progress(
            f"iteration {iteration}: update", config.epochs * len(decisions), "decision"
        ) as progress:
            stats = self.ppo.update(
                decisions, normalize_advantages(advantages), returns, iteration, progress.advance
            )
        self.average.update(iteration)
        self.next_index += config.episodes
        self.iteration = iteration
        sigma = self.noise.sigma(decisions.features).detach()
        fields = {f"train_{name}": value for name, value in summary(records, self.log_metrics).items()}
        return (
            empty_line(iteration, self.log_metrics)
            | fields
            | dataclasses.asdict(stats)
            | spread("advantage", advantages)
            | spread("return", returns)
            | {
                "decisions": len(decisions),
                "explained_variance": explained_variance(values, returns),
                "sigma_mean": float(sigma.mean()),
                "entropy": float(gaussian_entropy(sigma).mean()),
                "rollout_s": round(rollout.wall_s, 3),
                "rollout_parts": rollout.parts(),
                "update_s": round(time.perf_counter() - start, 3),
            }
        )

    def complete(self, line: dict[str, Any], stop: StopRequest) -> None:
        """What follows an update: validation when it is due, the log, and checkpoints, in an order that survives a kill.

        The log goes first: a checkpoint's iteration always has its line. best/ goes last: it never holds an iteration
        that the run has no other checkpoint of, and so is not ahead of the run when that is resumed.

        Args:
            line: The iteration's line of the log, without the validation.
            stop: When a signal to the whole process group has ended the workers, the iteration is saved without its
                validation, which a resumed run makes up for.
        """
        config, iteration = self.config, self.iteration
        self.random = random_state(self.policy.device)
        self.pending, self._last_is_current = line, False
        improved = False
        if iteration % config.val_every == 0:
            records, seconds = self.validate(stop)
            if records is not None:
                self.pending = None
                fields = summary(records, self.log_metrics) | {"seconds": seconds}
                line = line | {f"val_{name}": value for name, value in fields.items()}
                line |= self._compare_with_start(Validation.of(records))
                bound = validation_bound(records)
                if self.best_bound is None or bound >= self.best_bound:
                    self.best_bound, self.best_iteration, improved = bound, iteration, True
        else:
            self.pending = None
        self.record.log(line)
        tell(describe_line(line))
        if line["val_collapse"]:
            tell(describe_collapse(line, self.out, self.best_iteration))
        if self.pending is not None:
            return
        self.random = random_state(self.policy.device)
        scheduled = iteration > 0 and iteration % config.save_every == 0
        if scheduled:
            self.save(f"iter_{iteration:04d}")
        if scheduled or improved:
            self.save_last()
        if improved:
            self.save("best")

    def _compare_with_start(self, now: Validation) -> dict[str, Any]:
        """The gain for the log; of the start itself, and without one (resumed from an earlier flowrl), there is none."""
        if self.iteration == 0:
            self.start = now
        return gain(self.start, now) if self.start is not None and self.iteration > 0 else {}

    def measure_noise_tax(self, stop: StopRequest) -> None:
        """What the noise costs in success, told and kept in args.json; once, before the first update."""
        config = self.config
        if config.noise_tax_episodes == 0 or "noise_tax" in self.record.args:
            return
        scenes = fixed_scenes(config.val_seed, config.noise_tax_episodes)
        try:
            tax = measure_noise_tax(self.policy, self.vec_envs, scenes, self.noise, config.task)
        except FlowRLError:
            if not stop.requested:
                raise
            self.failed = True
            return
        self.record.amend("noise_tax", tax)
        tell(describe_noise_tax(tax))

    def validate(self, stop: StopRequest) -> tuple[list[dict[str, Any]] | None, float]:
        """Noise-free episodes on the fixed scenes, with the averaged weights, and seconds; None when a stop has ended the workers."""
        start = time.perf_counter()
        try:
            with self.average.applied():
                records = validate(
                    self.policy,
                    self.vec_envs,
                    fixed_scenes(self.config.val_seed, self.config.val_episodes),
                    label=f"iteration {self.iteration}: validation",
                    default_task=self.config.task,
                )
        except FlowRLError:
            if not stop.requested:
                raise
            self.failed = True
            return None, 0.0
        return records, round(time.perf_counter() - start, 3)

    def save_last(self) -> None:
        """Writes last/, unless it holds this state already."""
        if not self._last_is_current:
            self.save("last")
        self._last_is_current = True

    def save(self, name: str) -> None:
        """Writes the checkpoint `name` of `iteration`."""
        tensors = {f"random.{generator}": state for generator, state in self.random.tensors.items()}
        tensors |= self.average.tensors()
        if self.start is not None:
            tensors |= {f"start.{name}": values for name, values in self.start.tensors().items()}
        with self.average.applied():
            save_checkpoint(
                self.out / name,
                self.policy,
                noise=self.noise,
                critic=self.critic,
                optimizers={"ppo": self.ppo.optimizer},
                tensors=tensors,
                meta={
                    "iteration": self.iteration,
                    "validated": self.pending is None,
                    "next_index": self.next_index,
                    "best_bound": self.best_bound,
                    "best_iteration": self.best_iteration,
                    "lr": self.ppo.lr,
                    "bad_in_a_row": self.ppo.bad_in_a_row,
                    "gradient_noise": dataclasses.asdict(self.ppo.noise_scale),
                    "random": self.random.values,
                    "env_kwargs": self.env_kwargs,
                    "control_rate": control_rate(self.vec_envs[0]),
                    "flags": dataclasses.asdict(self.config),
                },
            )

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        self.record.close()
        close_vector_env(self.vec_envs, failed=self.failed or error is not None)
