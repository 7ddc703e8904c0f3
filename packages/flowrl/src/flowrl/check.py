"""flowrl-check: before a training run, that what is trained is what is measured.

1. Same as eval: without noise, training's path repeats flowrl-eval exactly.
2. Noise: what exploration costs, and that it has the size asked for.
3. Likelihood: stored chains rescored have the ratio 1.
4. Update: one PPO step changes the intended weights alone.
5. Reload: a checkpoint gives the same policy again.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from gymnasium.vector import VectorEnv

from flowrl.action_ranges import (
    JointRange,
    describe_ranges,
    executed_targets,
    joint_ranges,
    warn_of_ranges,
)
from flowrl.checks import (
    CheckResult,
    Row,
    compare_records,
    distinct_starts,
    likelihood,
    reload,
    same_chunks,
    update,
)
from flowrl.config import (
    CheckConfig,
    EvalConfig,
    TrainConfig,
    check_config,
    parse_env_kwargs,
    parse_rename,
    parse_schedules,
)
from flowrl.device import prepare_torch
from flowrl.episode import Episode
from flowrl.evaluate import policy_name, run_fast, run_plain
from flowrl.exploration import make_noise
from flowrl.flow.sampler import episode_noise
from flowrl.noise_checks import asked_sizes, noise_cost, noise_size_error
from flowrl.noise_flags import noise_flags
from flowrl.plain import reset_scene, stack_observations
from flowrl.policy.critic import Critic
from flowrl.policy.interface import FlowPolicy
from flowrl.policy.loading import load_policy
from flowrl.policy.noise import NoiseModel
from flowrl.progress import Progress, tell
from flowrl.record import describe_machine, write_json, writing
from flowrl.rollout import Decisions, collect
from flowrl.scenes import fixed_scenes
from flowrl.train import LoadPolicy
from flowrl.validate import validate
from flowrl.vector_env import (
    check_spaces,
    close_vector_env,
    find_spec,
    group_sizes,
    make_single_env,
    make_vector_envs,
    resolve_env_kwargs,
)


def check(
    config: CheckConfig, train_config: TrainConfig | None = None, load: LoadPolicy = load_policy
) -> list[CheckResult]:
    """Runs the five checks and writes check.md and check.json; returns their results.

    Args:
        config: All flags, presets applied.
        train_config: How the policy would be trained (its preset applied): learning rate, minibatch, dtype, seed. The noise is
            the one of `config`.
        load: Makes the policy: `load(path, device=..., expert_dtype=..., rename=...)`.

    Raises:
        FlowRLError: bad input or failing environment.
    """
    check_config(config)
    train_config = dataclasses.replace(train_config or TrainConfig(), **noise_flags(config))
    session = _Session(config, train_config, load)
    results = [session.same_as_eval()]
    with session:
        results += [*session.noise_and_likelihood(), *session.update_and_reload()]
    session.write(results)
    return results


class _Session:
    """The policy as it would be trained, its environments and scenes; a context manager around the environments."""

    def __init__(self, config: CheckConfig, train_config: TrainConfig, load: LoadPolicy) -> None:
        self.config, self.train_config, self.load = config, train_config, load
        self.device = prepare_torch(config.device, config.torch_threads)
        self.expert_dtype = "loaded" if train_config.expert_bf16 else "float32"
        self.policy = self.load_as(self.expert_dtype)
        spec = find_spec(config.env_id)
        kwargs = parse_env_kwargs(config.env_kwargs)
        self.kwargs = resolve_env_kwargs(spec, kwargs, config.seconds, self.policy.spec)
        self.environment = {"id": config.env_id, "kwargs": {**spec.kwargs, **self.kwargs}}
        self.scenes = fixed_scenes(config.seed, config.same_episodes)
        self.out = Path(config.out or Path("outputs/check") / policy_name(config.policy))
        self.vec_envs: list[VectorEnv] = []

    def __enter__(self) -> "_Session":
        episodes = max(self.config.same_episodes, self.config.noise_episodes)
        count, pipeline = min(self.config.workers, episodes), self.train_config.pipeline
        self.vec_envs = make_vector_envs(self.config.env_id, count, self.kwargs, self.policy, pipeline)
        check_spaces(self.vec_envs[0], self.policy.spec)
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        close_vector_env(self.vec_envs, failed=error is not None)

    def load_as(self, expert_dtype: str, path: str | None = None) -> FlowPolicy:
        rename = parse_rename(self.config.rename)
        policy = self.load(
            path or self.config.policy, device=self.device, expert_dtype=expert_dtype, rename=rename
        )
        policy.choose_velocity(self.config.velocity, self.config.compile)
        return policy

    def same_as_eval(self) -> CheckResult:
        """Records of flowrl-eval, plain, against those of the batched path and of training's, one scene at a time."""
        config = self.config

        episodes: list[Episode] = []
        ranges: list[JointRange] = []

        def run(
            how: Callable[..., Any], policy: FlowPolicy, what: str, *workers: int
        ) -> list[dict[str, Any]]:
            episodes.clear()
            records, facts = how(
                policy, config.env_id, self.kwargs, self.scenes, *workers,
                label=f"same as eval: {what}", default_task=config.task, on_episode=episodes.append,
            )  # fmt: skip
            ranges[:] = joint_ranges(executed_targets(episodes), facts.low, facts.high)
            return records

        loaded, pipeline = self.load_as("loaded"), EvalConfig.pipeline
        for policy in (loaded, self.policy):  # other ways of the velocity round otherwise; their row is (d)
            policy.choose_velocity("exact")
        plain = run(run_plain, loaded, "plain, expert as loaded")
        batched = run(run_fast, loaded, "--fast", config.workers, pipeline)
        single = run(run_fast, loaded, "training's path, expert as loaded", 1, 1)
        plain_float32 = run(run_plain, self.policy, f"plain, expert in {self.expert_dtype}")
        single_float32 = run(run_fast, self.policy, f"training's path, expert in {self.expert_dtype}", 1, 1)
        size = group_sizes(min(config.workers, len(self.scenes)), pipeline, self.device)[0]
        on_cpu = self.device.type == "cpu"
        rows = [
            compare_records(f"(a) --fast, batches of {size}", plain, batched, required=on_cpu or size == 1),
            compare_records("(b) training's path, expert as loaded", plain, single),
            compare_records(
                f"(c) training's path, expert in {self.expert_dtype}", plain_float32, single_float32
            ),
            distinct_starts(self._starts(), self._starts()),
        ]
        self.policy.choose_velocity(config.velocity, config.compile)
        if self.policy.velocity_mode != "exact":
            rows.append(same_chunks(self.policy, *self._first_batch))
        details = {
            "plain": plain,
            "--fast": batched,
            "expert as loaded": single,
            "float32": single_float32,
            "action ranges": ranges,
            "remarks": [describe_ranges(ranges), *warn_of_ranges(ranges)],
        }
        return CheckResult("Same as eval", rows, details)

    def noise_and_likelihood(self) -> list[CheckResult]:
        """Both need chains that were collected with the noises."""
        config, own = self.config, self.own_noise()
        default = self._noise(TrainConfig())
        likelihood_rows = likelihood(_describe(default), self.policy, self.collect(default), default)
        self.decisions = self.collect(own)
        if own.settings() != default.settings():
            likelihood_rows += likelihood(_describe(own), self.policy, self.decisions, own)

        candidates = {f"{_describe(own)}, the policy's own": self.train_config}
        for start, end in parse_schedules(config.schedules):
            other = dataclasses.replace(
                self.train_config, noise_kind="geometric", learn_sigma=False, sigma_start=start, sigma_end=end
            )
            if other != self.train_config:
                candidates[_describe(self._noise(other))] = other
        none = self._validate(None)
        rows = [noise_cost("none", none, none, None)]
        for name, flags in candidates.items():
            noise, asked = self._noise(flags), asked_sizes(flags, self.policy.spec.num_denoising_steps)
            error = noise_size_error(self.policy, self.decisions, noise, asked)
            rows.append(noise_cost(name, none, self._validate(noise), error))
        return [
            CheckResult("Noise", rows, {"scenes": config.noise_episodes, "seed": config.noise_seed}),
            CheckResult("Likelihood", likelihood_rows, {"expert": self.expert_dtype}),
        ]

    def update_and_reload(self) -> list[CheckResult]:
        """Changes the policy: these come last."""
        observation, tasks, x_0 = self._first_batch
        noise = self.own_noise()
        torch.manual_seed(self.train_config.train_seed)
        critic = Critic(self.decisions.features.shape[1]).to(self.device)
        updated, ppo = update(
            self.policy, self.decisions, noise, critic, self.train_config, observation, tasks
        )
        with writing(self.out):
            self.out.mkdir(parents=True, exist_ok=True)
        reloaded = reload(
            self.policy, lambda folder: self.load_as(self.expert_dtype, folder), self.config.policy, self.out,
            noise, critic, ppo, observation, tasks, x_0,
        )  # fmt: skip
        return [updated, reloaded]

    def own_noise(self) -> NoiseModel:
        """The noise that training would use."""
        return self._noise(self.train_config)

    def collect(self, noise: NoiseModel) -> Decisions:
        """Chains of complete episodes with the noise."""
        with Progress(f"collect with {_describe(noise)}", len(self.scenes), "episode") as progress:
            rollout = collect(
                self.policy, self.vec_envs, self.scenes, noise, early_stop=False, keep_decisions=True,
                default_task=self.config.task, on_episode=lambda _: progress.advance(),
            )  # fmt: skip
        assert rollout.decisions is not None
        return rollout.decisions

    def write(self, results: Sequence[CheckResult]) -> None:
        """check.md and check.json; the table is printed too."""
        text = report(self.config.policy, results)
        record = {
            "flags": dataclasses.asdict(self.config),
            "training": dataclasses.asdict(self.train_config),
            "environment": self.environment,
            **describe_machine(self.device, self.config.env_id),
            "passed": all(result.passed for result in results),
            "checks": [{**dataclasses.asdict(result), "passed": result.passed} for result in results],
        }
        write_json(self.out / "check.json", record)
        with writing(self.out / "check.md"):
            (self.out / "check.md").write_text(text, encoding="utf-8")
        print(text)
        tell(f"{self.out / 'check.md'}, {self.out / 'check.json'}")

    def _noise(self, flags: TrainConfig) -> NoiseModel:
        observation, tasks, _ = self._first_batch
        features = self.policy.prefix_features(self.policy.encode(observation, tasks))
        return make_noise(flags, self.policy, features.shape[1])

    def _validate(self, noise: NoiseModel | None) -> list[dict[str, Any]]:
        scenes = fixed_scenes(self.config.noise_seed, self.config.noise_episodes)
        label = f"noise: {'none' if noise is None else _describe(noise)}"
        return validate(
            self.policy, self.vec_envs, scenes, label=label, default_task=self.config.task, noise=noise
        )

    def _starts(self) -> list[Any]:
        env = make_single_env(self.config.env_id, self.kwargs, self.policy.spec)
        try:
            return [reset_scene(env, scene)[0] for scene in self.scenes]
        finally:
            env.close()

    @cached_property
    def _first_batch(self) -> tuple[Any, list[str], torch.Tensor]:
        """Observations of two scenes, their instructions and x_0."""
        env = make_single_env(self.config.env_id, self.kwargs, self.policy.spec)
        try:
            starts = [reset_scene(env, scene) for scene in fixed_scenes(self.config.seed, 2)]
        finally:
            env.close()
        tasks = [info.get("task") or self.config.task for _, info in starts]
        x_0 = torch.stack([episode_noise(number, 0, self.policy.spec)[0] for number in range(2)])
        return stack_observations([observation for observation, _ in starts]), tasks, x_0


def report(policy: str, results: Sequence[CheckResult]) -> str:
    """The results as Markdown: a line for each check, then its table and the names of what differs."""
    lines = [f"# flowrl-check of {policy}", ""]
    for number, result in enumerate(results, 1):
        lines.append(f"{number}. {result.name}: {'passed' if result.passed else 'FAILED'}")
    for number, result in enumerate(results, 1):
        lines += ["", f"## {number}. {result.name}", "", *_table(result.rows)]
        for name in ("wrong", "changed", "trainable but unchanged", "different weights"):
            if names := result.details.get(name):
                lines += ["", f"{name}: {', '.join(names)}"]
        for remark in filter(None, result.details.get("remarks", ())):
            lines += ["", remark]
    return "\n".join(lines) + "\n"


def _table(rows: Sequence[Row]) -> list[str]:
    words = {None: "-", True: "yes", False: "NO"}
    columns = list(rows[0])
    body = [[words[row[c]] if c == "passed" else _cell(row[c]) for c in columns] for row in rows]
    return [f"| {' | '.join(cells)} |" for cells in (columns, ["---"] * len(columns), *body)]


def _cell(value: Any) -> str:
    return f"{value:.2g}" if isinstance(value, float) else str(value)


def _describe(noise: NoiseModel) -> str:
    basis = f"dct {noise.num_elements}" if noise.basis == "dct" else noise.basis
    size = f"{noise.sigma_start:g}:{noise.sigma_end:g}"
    if noise.kind == "flow-sde":
        size = f"flow-sde {noise.flow_sde_level:g}"
    elif noise.kind == "head":
        size = f"head {size}"
    return f"{size} {basis}"
