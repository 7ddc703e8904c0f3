"""The checks of `flowrl-check`, each a function that returns a table and a verdict; noise is in `noise_checks.py`. `check.py` runs them."""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowrl.checkpoint import resolve_checkpoint, save_checkpoint
from flowrl.config import TrainConfig
from flowrl.flow.likelihood import rescore, rescore_flat
from flowrl.flow.sampler import sample_chain
from flowrl.gae import normalize_advantages
from flowrl.policy.critic import Critic
from flowrl.policy.interface import FlowPolicy
from flowrl.policy.noise import NoiseModel
from flowrl.ppo import PPO
from flowrl.rollout import Decisions

CHUNK_LIMIT = 5e-4
"""Largest difference of a noise-free action from the library's own [normalized]: 0.01 degrees where joints spread by 20."""
RATIO_LIMIT = 1e-3
"""Largest |ratio - 1| of a chain that is rescored in another composition of its batch, float32."""
MINIBATCH, MAX_SINGLE = 16, 64
FROZEN = (".vlm.", ".paligemma.", ".state_proj.")
"""Parts of the names of weights that no update may change, whatever the policy says."""

Row = dict[str, Any]
Records = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class CheckResult:
    """Outcome of one check.

    Attributes:
        name: What was checked.
        rows: The table. A row's `passed` is None where it only informs.
        details: Further values for the record, for example names of weights.
    """

    name: str
    rows: Sequence[Row]
    details: Mapping[str, Any]

    @property
    def passed(self) -> bool:
        """No row has failed."""
        return all(row["passed"] is not False for row in self.rows)


def compare_records(what: str, reference: Records, others: Records, *, required: bool = True) -> Row:
    """Episodes on the same scenes, equal in every value (success, frames, closest approach, closing error, ...)."""
    different = [number for number, (a, b) in enumerate(zip(reference, others)) if dict(a) != dict(b)]
    fields: dict[str, float] = {}  # name -> largest difference, 0 for what is no number
    for a, b in ((reference[number], others[number]) for number in different):
        for name in sorted({*a, *b}):
            x, y = a.get(name), b.get(name)
            if x != y:
                size = abs(x - y) if isinstance(x, int | float) and isinstance(y, int | float) else 0.0
                fields[name] = max(fields.get(name, 0.0), size)
    equal = not different and len(reference) == len(others) > 0
    return {
        "what": what,
        "scenes": len(reference),
        "equal": len(reference) - len(different),
        "largest differences": ", ".join(
            f"{name} {size:.3g}" if size else name for name, size in fields.items()
        ),
        "passed": equal if required else None,
    }


@torch.no_grad()
def same_chunks(policy: FlowPolicy, observation: Mapping[str, Any], tasks: Sequence[str], x_0: Tensor) -> Row:
    """Noise-free chunks of a policy whose velocity is not the exact one, against those of the policy's own library.

    Args:
        policy: The policy.
        observation, tasks, x_0: As in `FlowPolicy.predict_action_chunk`.
    """
    chain = sample_chain(policy, policy.encode(observation, tasks), x_0.to(policy.device))
    own = policy.unnormalize(chain.actions[..., : policy.spec.action_dim])
    library = policy.predict_action_chunk(observation, tasks, x_0)
    normalized = [policy.normalize(chunk.to(policy.device)).float() for chunk in (own, library)]
    difference = (normalized[0] - normalized[1]).abs().amax(dim=(1, 2))
    compiled = ", compiled" if policy.compiled else ""
    return {
        "what": f"(d) chunks of the {policy.velocity_mode} velocity{compiled}, within {CHUNK_LIMIT:g} normalized",
        "scenes": len(difference),
        "equal": int((difference <= CHUNK_LIMIT).sum()),
        "largest differences": f"{float(difference.max()):.2g}",
        "passed": bool((difference <= CHUNK_LIMIT).all()),
    }


def distinct_starts(observations: Sequence[Any], again: Sequence[Any]) -> Row:
    """Every scene must start differently, and in the same way when it is repeated."""
    keys, repeated = [_bytes(o) for o in observations], [_bytes(o) for o in again]
    num_equal = sum(a == b for a, b in zip(keys, repeated))
    return {
        "what": "starts of the scenes: distinct, and equal when repeated",
        "scenes": len(keys),
        "equal": num_equal,
        "largest differences": f"{len(set(keys))} distinct",
        "passed": len(set(keys)) == len(keys) == num_equal,
    }


@torch.no_grad()
def likelihood(what: str, policy: FlowPolicy, decisions: Decisions, noise: NoiseModel) -> list[Row]:
    """Stored chains with stored prefixes rescored: as sampled (exact), and in other compositions (`RATIO_LIMIT`).

    The limit holds for weights in float32; others are reported.
    """
    float32 = all(weight.dtype == torch.float32 for weight in policy.trainable_parameters().values())
    count, device = len(decisions), decisions.states.device
    rounds = [torch.as_tensor(rows, device=device) for rows in decisions.rounds]
    as_sampled = [index.repeat(2) if len(index) == 1 else index for index in rounds]
    shuffled = torch.as_tensor(np.random.default_rng(0).permutation(count), device=device).split(MINIBATCH)
    singly = torch.as_tensor(np.linspace(0, count - 1, min(count, MAX_SINGLE)).astype(int), device=device)
    compositions = [
        ("as sampled", rescore, as_sampled, 0.0),
        (f"shuffled minibatches of {MINIBATCH}", rescore, shuffled, RATIO_LIMIT),
        ("all denoising steps in one batch, as in the update", rescore_flat, shuffled, RATIO_LIMIT),
        ("one at a time", rescore, singly.split(1), RATIO_LIMIT),
    ]
    rows = []
    for name, score, batches, limit in compositions:
        worst = torch.zeros((), device=device)
        for index in batches:
            again = score(policy, decisions.prefix[index], decisions.states[index], noise)
            kept = len(index.unique())  # of a padded pair the first row, as in the rollout
            deviation = ((again - decisions.log_prob[index])[:kept].exp() - 1).abs().max()
            worst = torch.maximum(worst, deviation)
        rows.append(
            {
                "noise": what,
                "composition": name,
                "decisions": len(torch.cat(list(batches)).unique()),
                "largest ratio deviation": float(worst),
                "limit": limit,
                "passed": bool(worst <= limit) if float32 or limit == 0 else None,
            }
        )
    return rows


def update(
    policy: FlowPolicy, decisions: Decisions, noise: NoiseModel, critic: Critic, config: TrainConfig,
    observation: Mapping[str, Any], tasks: Sequence[str],
) -> tuple[CheckResult, PPO]:  # fmt: skip
    """One PPO step with random advantages: which weights it has changed, and whether the encoding has.

    Returns:
        The result, and the PPO that has taken the step.
    """
    before = {
        name: tensor.detach().to("cpu", copy=True) for name, tensor in policy.module.state_dict().items()
    }
    encoded = policy.encode(observation, tasks)
    batch = first_decisions(decisions, min(config.minibatch, MINIBATCH))
    one_step = replace(
        config, minibatch=len(batch), epochs=1, critic_epochs=0, critic_warmup=0, kl_adapt=None, grad_cosine=False
    )  # fmt: skip
    ppo = PPO(policy, noise, critic, one_step)
    advantages = normalize_advantages(np.random.default_rng(0).normal(size=len(batch)))
    stats = ppo.update(batch, advantages, np.zeros(len(batch)), iteration=1)

    after = {name: tensor.detach().cpu() for name, tensor in policy.module.state_dict().items()}
    changed = sorted(name for name in after if not _same_bits(before.get(name), after[name]))
    trainable = set(policy.trainable_parameters())
    frozen = sorted(name for name in after if any(part in f".{name}" for part in FROZEN))
    again = policy.encode(observation, tasks)
    same_prefix = all(_same_bits(tensor, again.tensors[name]) for name, tensor in encoded.tensors.items())
    intended = [name for name in changed if name in trainable and name not in frozen]
    wrong = sorted(set(changed) - set(intended))
    rows: list[Row] = [
        _weights("trainable weights changed", intended, len(trainable), len(intended) > 0),
        _weights("other weights changed", wrong, len(after) - len(trainable), not wrong),
    ]
    for part in FROZEN:
        names = [name for name in frozen if part in f".{name}"]
        touched = [name for name in names if name in changed]
        if names:
            rows.append(_weights(f"weights of {part.strip('.')} changed", touched, len(names), not touched))
    rows.append(
        {"what": "encoded observation is bit-identical", "count": "", "of": "", "passed": same_prefix}
    )
    rows.append(
        {"what": "minibatches skipped", "count": stats.skipped, "of": 1, "passed": stats.skipped == 0}
    )
    details = {
        "lr": config.lr,
        "decisions": len(batch),
        "changed": changed,
        "wrong": wrong,
        "trainable but unchanged": sorted(trainable - set(changed)),
    }
    return CheckResult("Update", rows, details), ppo


def reload(
    policy: FlowPolicy, load_same: Any, source: str, out: Path, noise: NoiseModel, critic: Critic, ppo: PPO,
    observation: Mapping[str, Any], tasks: Sequence[str], x_0: Tensor,
) -> CheckResult:  # fmt: skip
    """A saved checkpoint against the policy in memory: weights, normalization, and the chunk for the same x_0.

    Args:
        policy: The policy, with trained weights.
        load_same: `load_same(folder)` loads a folder as `policy` was loaded.
        source: What `policy` was loaded from.
        out: An existing folder; the checkpoint is written into it and removed.
        noise, critic, ppo: Saved with it.
        observation, tasks, x_0: A batch of at least two, as in `FlowPolicy.predict_action_chunk`.
    """
    chunk = policy.predict_action_chunk(observation, tasks, x_0)
    own = policy.module.state_dict()
    with tempfile.TemporaryDirectory(dir=out, prefix="reload-") as temporary:
        folder = save_checkpoint(
            Path(temporary) / "checkpoint", policy, noise=noise, critic=critic, optimizers={"ppo": ppo.optimizer}
        )  # fmt: skip
        files = _changed_files(Path(source), folder)
        again: FlowPolicy = load_same(str(folder))
        library = policy.reload_with_library(folder, observation, tasks, x_0)
        reloaded = again.module.state_dict()
        wrong = sorted(
            name for name in {*own, *reloaded} if not _same_bits(own.get(name), reloaded.get(name))
        )
        probe = torch.linspace(-3, 3, policy.spec.chunk_size * policy.spec.action_dim)
        probe = probe.view(1, policy.spec.chunk_size, policy.spec.action_dim)
        same_scale = all(
            _same_bits(getattr(policy, way)(probe.to(policy.device)), getattr(again, way)(probe.to(policy.device)))
            for way in ("normalize", "unnormalize")
        )  # fmt: skip
        new_chunk = again.predict_action_chunk(observation, tasks, x_0)
    rows: list[Row] = [
        _reload_row("weights bit-identical, dtypes kept", f"{len(own) - len(wrong)}/{len(own)}", not wrong)
    ]
    if files is not None:
        kept = sum(files.values())
        rows.append(
            _reload_row(
                "normalization files, byte for byte", f"{kept}/{len(files)}", kept == len(files) and kept > 0
            )
        )
    rows.append(_reload_row("normalization of actions", _yes(same_scale), same_scale))
    rows.append(
        _reload_row("chunk for the same x_0", _difference(chunk, new_chunk), _same_bits(chunk, new_chunk))
    )
    if library is None:
        rows.append(_reload_row("chunk by the library's own loader", "not applicable: it has none", None))
    else:
        rows += _library_rows(policy, own, chunk, *library)
    return CheckResult("Reload", rows, {"different weights": wrong, "files": files or {}})


def first_decisions(decisions: Decisions, count: int) -> Decisions:
    """The first rounds that hold `count` decisions together (whole rounds, since chains are scored as sampled)."""
    ends = np.cumsum([len(rows) for rows in decisions.rounds])
    first = decisions.rounds[: int(np.searchsorted(ends, count)) + 1]
    chosen = np.sort(np.concatenate(first))
    rounds = [np.searchsorted(chosen, rows) for rows in first]
    index = torch.as_tensor(chosen, device=decisions.states.device)
    return Decisions(
        prefix=decisions.prefix[index],
        states=decisions.states[index],
        log_prob=decisions.log_prob[index],
        features=decisions.features[index],
        num_executed=decisions.num_executed[index],
        episode=decisions.episode[chosen],
        order=decisions.order[chosen],
        rounds=rounds,
    )


def _library_rows(
    policy: FlowPolicy, own: Mapping[str, Tensor], chunk: Tensor, state: Mapping[str, Tensor], library: Tensor
) -> list[Row]:
    """Trained weights must survive the library's loader. Its chunk must be equal where it keeps every dtype."""
    trainable = policy.trainable_parameters()
    kept = [name for name in trainable if _same_bits(own[name], state.get(name))]
    all_dtypes_kept = all(name in state and state[name].dtype == tensor.dtype for name, tensor in own.items())
    return [
        _reload_row(
            "trained weights through the library's own loader",
            f"{len(kept)}/{len(trainable)}",
            len(kept) == len(trainable),
        ),
        _reload_row(
            "chunk by the library's own loader" + ("" if all_dtypes_kept else ", in other dtypes"),
            _difference(chunk, library),
            _same_bits(chunk, library) if all_dtypes_kept else None,
        ),
    ]


def _changed_files(source: Path, folder: Path) -> dict[str, bool] | None:
    """Whether each statistics file of the source folder is the checkpoint's, byte for byte; None for a hub id."""
    source = resolve_checkpoint(source)
    names = sorted(path.name for path in source.glob("policy_*.safetensors"))
    if not names:
        return None
    return {
        name: (folder / name).is_file() and (folder / name).read_bytes() == (source / name).read_bytes()
        for name in names
    }


def _same_bits(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return False
    return a.dtype == b.dtype and torch.equal(a.detach().cpu(), b.detach().cpu())


def _difference(a: Tensor, b: Tensor) -> str:
    return "equal" if _same_bits(a, b) else f"{float((a.cpu() - b.cpu()).abs().max()):.3g} at most"


def _weights(what: str, names: Sequence[str], of: int, passed: bool) -> Row:
    return {"what": what, "count": len(names), "of": of, "passed": passed}


def _reload_row(what: str, result: str, passed: bool | None) -> Row:
    return {"what": what, "result": result, "passed": passed}


def _yes(value: bool) -> str:
    return "equal" if value else "different"


def _bytes(observation: Any) -> bytes:
    if isinstance(observation, Mapping):
        return b"".join(_bytes(observation[name]) for name in sorted(observation))
    return np.ascontiguousarray(observation).tobytes()
