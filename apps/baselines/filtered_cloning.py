"""Filtered cloning: a policy is fitted further to its own successful episodes. What RL on the same episodes must beat.

    python apps/baselines/filtered_cloning.py --episodes 12800 --out runs/filtered

The policy acts once with its preset's exploration noise on training scenes, as in `flowrl-train`; the decisions of the episodes that
succeed are kept, as encoded observations and chunks, and the action expert (the parameters that RL trains) is fitted to them by
flow matching: x_t = t noise + (1 - t) actions, target noise - actions (Lipman et al. 2023), t from Beta(1.5, 1) as SmolVLA
is trained. Also known as rejection sampling or best-of-n fine-tuning.

With --decisions FILE what was played is kept: the same command goes on from there, and further fits need no playing.
"""

import json
import math
import shutil
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import tyro
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from chess_apps.flow_matching import sample_time
from flowrl.cli import run_program
from flowrl.config import TrainConfig
from flowrl.device import prepare_torch
from flowrl.errors import FlowRLError
from flowrl.exploration import make_noise
from flowrl.policy.interface import FlowPolicy
from flowrl.policy.loading import load_policy
from flowrl.prefix import Prefix
from flowrl.preset import load_preset, with_preset, with_preset_env_kwargs
from flowrl.progress import Progress, tell
from flowrl.record import describe_machine
from flowrl.rollout import Rollout, collect
from flowrl.scenes import training_scenes
from flowrl.vector_env import close_vector_env, find_spec, make_vector_envs, resolve_env_kwargs


@dataclass(frozen=True)
class FilteredConfig:
    """Fit a policy further to its own successful episodes."""

    out: tuple[str, ...] = ()
    """Policy folders to write; must not exist. Several: each fit begins at --policy, on the same episodes. None: only play."""
    decisions: str = ""
    """File of the decisions to learn from: written after playing; where it exists, it is read instead of playing."""
    policy: str = "models/chess-tiny"
    """Policy folder to start from."""
    env_id: str = "chess_env:ChessPick-v0"
    """Environment, in Gymnasium's `module:id` form."""
    env_kwargs: str = "{}"
    """Further arguments of the environment, as JSON."""
    episodes: int = 12_800
    """Episodes that are played; those that succeed are learned from."""
    collect_at_once: int = 256
    """Episodes between two filterings: only successful ones stay in memory."""
    envs: int = 10
    """Environments that run side by side."""
    train_seed: int = 7_700_003
    """Seed of the training scenes, and of everything drawn."""
    steps: tuple[int, ...] = (2_000,)
    """Optimizer steps of each --out."""
    batch: int = 256
    """Decisions in a step."""
    lr: tuple[float, ...] = (1e-4,)
    """Peak learning rate of each --out; linear warm-up over 5 % of the steps, then a cosine to 0."""
    device: str = "auto"
    """Where the policy runs: auto, cpu, cuda, cuda:N."""
    torch_threads: int = 2
    """Threads of torch on the CPU."""


def main(args: list[str] | None = None) -> None:
    """Parse flags and run."""
    config = tyro.cli(FilteredConfig, args=args, description=__doc__)
    code = run_program(lambda _: run(config), [])
    if code:
        sys.exit(code)


def run(config: FilteredConfig) -> None:
    """Play, filter, fit, save.

    Raises:
        FlowRLError: bad input, or no episode that succeeded.
    """
    steps, rates = (config.steps, config.lr) if config.out else ((), ())
    if not len(config.out) == len(steps) == len(rates):
        raise FlowRLError(
            f"--out, --steps and --lr: {len(config.out)}, {len(config.steps)} and {len(config.lr)} values; give as many of each"
        )
    if not config.out and not config.decisions:
        raise FlowRLError("neither --out nor --decisions is given; name what is to be written")
    for out in config.out:
        if Path(out).exists():
            raise FlowRLError(f"--out {out}: exists; choose another folder")
    device = prepare_torch(config.device, config.torch_threads)
    policy = load_policy(config.policy, device=device)
    parameters = policy.trainable_parameters()
    start = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    prefix, actions, successes = kept_decisions(config, policy)
    tell(f"{successes} of {config.episodes} episodes succeeded: {len(actions)} decisions to learn from")
    for out, count, lr in zip(map(Path, config.out), steps, rates):
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(start[name])
        losses = fit(policy, prefix, actions, count, lr, config.batch, config.train_seed)
        record = {
            "flags": asdict(config) | {"out": str(out), "steps": count, "lr": lr},
            "successes": successes,
            "decisions": len(actions),
            "loss": losses,
            **describe_machine(device),
        }
        unfinished = out.with_name(f".{out.name}.unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        policy.save(unfinished, final_folder=out)
        (unfinished / "filtered_cloning.json").write_text(json.dumps(record, indent=1) + "\n")
        unfinished.rename(out)
        tell(f"wrote {out}")


def kept_decisions(config: FilteredConfig, policy: FlowPolicy) -> tuple[Prefix, Tensor, int]:
    """`successful_decisions`, from --decisions where that exists, else played and written there.

    Raises:
        FlowRLError: the file is of another policy, of other episodes, or is none.
    """
    if not config.decisions:
        return successful_decisions(config, policy)
    path = Path(config.decisions)
    played = {
        name: getattr(config, name) for name in ("policy", "env_id", "env_kwargs", "episodes", "train_seed")
    }
    if path.exists():
        device = next(iter(policy.trainable_parameters().values())).device
        return read_decisions(path, played, device)
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.touch()  # told before anything is played
    except OSError as error:
        raise FlowRLError(f"--decisions {path}: cannot be written ({error}); choose another place") from None
    prefix, actions, successes = successful_decisions(config, policy)
    notes = played | {"successes": successes, "token_axes": dict(prefix.token_axes)}
    tensors = {f"prefix.{name}": tensor.contiguous() for name, tensor in prefix.tensors.items()}
    try:
        save_file(tensors | {"actions": actions}, unfinished, metadata={"decisions": json.dumps(notes)})
    except (OSError, SafetensorError) as error:
        unfinished.unlink(missing_ok=True)
        raise FlowRLError(f"--decisions {path}: cannot be written ({error}); choose another place") from None
    unfinished.rename(path)
    return prefix, actions, successes


def read_decisions(path: Path, played: dict[str, object], device: torch.device) -> tuple[Prefix, Tensor, int]:
    """What `kept_decisions` wrote, on the policy's device.

    Raises:
        FlowRLError: as there.
    """
    try:
        with safe_open(path, "pt", device=str(device)) as file:
            notes = json.loads((file.metadata() or {}).get("decisions", "null"))
            if notes is None:
                raise FlowRLError(f"--decisions {path}: was not written by this program; choose another file")
            different = [name for name, value in played.items() if notes[name] != value]
            if different:
                flag = different[0]
                raise FlowRLError(
                    f"--decisions {path}: was played with --{flag.replace('_', '-')} {notes[flag]}, not {played[flag]}; "
                    "choose another file, or delete it to play anew"
                )
            names = file.keys()
            tensors = {name: file.get_tensor(name) for name in names}
    except (OSError, SafetensorError) as error:
        raise FlowRLError(f"--decisions {path}: cannot be read ({error}); delete it to play anew") from None
    actions = tensors.pop("actions")
    prefix = {name.removeprefix("prefix."): tensor for name, tensor in tensors.items()}
    return Prefix(prefix, notes["token_axes"]), actions, notes["successes"]


def successful_decisions(config: FilteredConfig, policy: FlowPolicy) -> tuple[Prefix, Tensor, int]:
    """Encoded observations and normalized chunks (N, T, D) of the episodes that succeeded, and how many those were."""
    preset = load_preset(config.policy)
    flags = TrainConfig(policy=config.policy, env_id=config.env_id, env_kwargs=config.env_kwargs)
    flags = with_preset_env_kwargs(with_preset(flags, preset), preset)
    if flags.noise_kind == "head":
        raise FlowRLError(
            "the preset's noise is read from the observation by an untrained head; use --noise-kind geometric in it"
        )
    kwargs = resolve_env_kwargs(
        find_spec(config.env_id), json.loads(flags.env_kwargs), flags.seconds, policy.spec
    )
    vec_envs = make_vector_envs(config.env_id, config.envs, kwargs, policy, pipeline=2)
    kept: list[tuple[Prefix, Tensor]] = []
    noise, successes = make_noise(flags, policy, 0), 0
    try:
        with Progress("episodes", config.episodes, "episode") as progress:
            for first in range(0, config.episodes, config.collect_at_once):
                count = min(config.collect_at_once, config.episodes - first)
                rollout = collect(
                    policy,
                    vec_envs,
                    training_scenes(config.train_seed, first, count),
                    noise,
                    early_stop=True,
                    keep_decisions=True,
                    on_episode=lambda _: progress.advance(),
                )
                good = {e.number for e in rollout.episodes if e.metrics["success"]}
                successes += len(good)
                kept += filtered(rollout, good)
    finally:
        close_vector_env(vec_envs)
    if not kept:
        raise FlowRLError(f"none of {config.episodes} episodes succeeded; there is nothing to learn from")
    return Prefix.concatenate([prefix for prefix, _ in kept]), torch.cat([a for _, a in kept]), successes


def filtered(rollout: Rollout, good: set[int]) -> list[tuple[Prefix, Tensor]]:
    """The decisions of the episodes in `good`: prefix and final state of the chain, or nothing."""
    decisions = rollout.decisions
    assert decisions is not None
    rows = [row for row, episode in enumerate(decisions.episode) if int(episode) in good]
    if not rows:
        return []
    index = torch.tensor(rows, device=decisions.states.device)
    return [(decisions.prefix[index], decisions.states[index, -1])]


def fit(
    policy: FlowPolicy, prefix: Prefix, actions: Tensor, steps: int, lr: float, batch: int, seed: int
) -> list[list[float]]:
    """Flow matching of the trainable parameters on stored observations; returns (step, mean loss since the last entry)."""
    parameters = list(policy.trainable_parameters().values())
    fused = actions.device.type == "cuda"
    optimizer = torch.optim.AdamW(parameters, lr=lr, betas=(0.9, 0.95), weight_decay=0.0, fused=fused)
    generator = torch.Generator(device=actions.device).manual_seed(seed)
    scored = policy.spec.action_dim
    losses: list[list[float]] = []
    total, since = torch.zeros((), device=actions.device), 0
    with Progress("fitting", steps, "step") as progress:
        for step in range(steps):
            rows = torch.randint(len(actions), (batch,), generator=generator, device=actions.device)
            chosen = actions[rows]
            noise = torch.randn(chosen.shape, generator=generator, device=actions.device)
            time = sample_time(batch, actions.device, generator)
            t = time[:, None, None]
            velocity = policy.velocity(t * noise + (1 - t) * chosen, time, prefix[rows])
            loss = (velocity - (noise - chosen))[..., :scored].square().mean()
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            warm, cosine = (
                (step + 1) / max(1, steps // 20),
                0.5 * (1 + math.cos(math.pi * step / steps)),
            )
            for group in optimizer.param_groups:
                group["lr"] = lr * min(1.0, warm) * cosine
            optimizer.step()
            total, since = total + loss.detach(), since + 1
            progress.advance()
            if (step + 1) % max(1, steps // 20) == 0 or step + 1 == steps:
                losses.append([step + 1, round(float(total) / since, 6)])
                total, since = torch.zeros_like(total), 0
    return losses


if __name__ == "__main__":
    main()
