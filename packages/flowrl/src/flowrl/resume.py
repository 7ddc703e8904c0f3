"""What a run is resumed with: its flags, and its newest checkpoint. torch is imported for the checkpoint alone.

args.json holds the first start's flags in `flags`, and in `resumptions` what each later start changed.
"""

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from flowrl.config import TrainConfig, flag, parse_env_kwargs
from flowrl.errors import FlowRLError
from flowrl.preset import has_type

if TYPE_CHECKING:
    from flowrl.checkpoint import TrainingState

ARGS = "args.json"
MAY_CHANGE = (
    "iterations",
    "val_every",
    "save_every",
    "envs",
    "pipeline",
    "device",
    "torch_threads",
    "offload",
)
"""Flags that another start of the same run may set: its length, its schedule, and the machine it runs on."""
OF_A_START = ("out", "resume")
NEEDED = (
    "iteration",
    "validated",
    "next_index",
    "best_bound",
    "best_iteration",
    "lr",
    "bad_in_a_row",
    "random",
)
"""What a checkpoint's record must hold for a run to go on from it."""


def run_folder(config: TrainConfig) -> Path:
    """The folder of a run: --out, or runs/<name of the policy>."""
    return Path(config.out or Path("runs") / Path(config.policy).name)


def read_args(out: Path | str) -> dict[str, Any]:
    """A run's args.json.

    Raises:
        FlowRLError: no run there, or a damaged file.
    """
    path = Path(out) / ARGS
    if not path.is_file():
        above = Path(out).parent
        hint = (
            f"give the run's folder, --out {above}" if (above / ARGS).is_file() else "give the --out of a run"
        )
        raise FlowRLError(f"--resume: {path} is missing, so {out} is not the folder of a run; {hint}")
    try:
        args = json.loads(path.read_text(encoding="utf-8"))
        _recorded_flags(args)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise FlowRLError(
            f"{path} is damaged ({type(error).__name__}: {error}); start a new run from a checkpoint, --policy {out}/last"
        ) from error
    return args


def recorded_config(out: str) -> TrainConfig:
    """The flags that a run in `out` had at its last start.

    Raises:
        FlowRLError: no run there, a damaged file, or flags that this version does not know.
    """
    recorded = _recorded_flags(read_args(out))
    hints = get_type_hints(TrainConfig)
    for name, value in recorded.items():
        if name not in hints or not has_type(value, hints[name]):
            known = "has no such flag" if name not in hints else "does not take it"
            raise FlowRLError(
                f"{Path(out) / ARGS}: {flag(name)} is {value!r}, and this flowrl {known}; "
                f"start a new run from a checkpoint, --policy {out}/last"
            )
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in recorded.items()
    }
    return dataclasses.replace(TrainConfig(), **values)


def settled_config(config: TrainConfig) -> TrainConfig:
    """The config to resume with: the recorded one with what may change taken from `config`.

    Environment arguments that are not given stay as recorded.

    Raises:
        FlowRLError: no run in `config.out`, or a flag differs that may not.
    """
    recorded = recorded_config(config.out)
    old = parse_env_kwargs(recorded.env_kwargs)
    new_env_kwargs = json.dumps({**old, **parse_env_kwargs(config.env_kwargs)})
    if parse_env_kwargs(new_env_kwargs) == old:
        new_env_kwargs = recorded.env_kwargs
    new = dataclasses.replace(config, env_kwargs=new_env_kwargs)
    for name in changed(recorded, new):
        if name not in MAY_CHANGE:
            raise FlowRLError(
                f"{flag(name)} {getattr(config, name)!r}: the run in {config.out} has {getattr(recorded, name)!r}, and a "
                f"resumed run keeps it; leave the flag out, or start a new run with --policy {config.out}/last"
            )
    return new


def newest_state(out: Path) -> "TrainingState | None":
    """The newest of a run's checkpoints; None when it was killed before the first.

    Raises:
        FlowRLError: one of them is damaged, or was written by a version that could not resume.
    """
    from flowrl.checkpoint import list_checkpoints, load_training_state, read_meta

    newest, place = None, (-1, False)
    for folder in list_checkpoints(out):
        meta = read_meta(folder) or {}
        if missing := [name for name in NEEDED if name not in meta]:
            raise FlowRLError(
                f"{folder} is of an earlier flowrl, without {', '.join(missing)}: it cannot be resumed; "
                f"start a new run from it with --policy {folder}"
            )
        if (meta["iteration"], meta["validated"]) >= place:
            newest, place = folder, (meta["iteration"], meta["validated"])
    return None if newest is None else load_training_state(newest)


def changed(old: TrainConfig, new: TrainConfig) -> dict[str, Any]:
    """The flags of `new` that differ from `old`, without those that say where and how it is started."""
    return {
        name: value
        for name, value in dataclasses.asdict(new).items()
        if name not in OF_A_START and value != getattr(old, name)
    }


def _recorded_flags(args: dict[str, Any]) -> dict[str, Any]:
    flags: dict[str, Any] = {**args["flags"]}
    for resumption in args.get("resumptions", []):
        flags |= resumption["changed"]
    return {name: value for name, value in flags.items() if name not in OF_A_START}
