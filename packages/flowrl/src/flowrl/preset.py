"""A policy folder may bring its own defaults: `preset.json` beside `config.json`.

    {"env_kwargs": {"distractors": [0, 4]}, "train": {"lr": 3e-5, "noise_basis": "dct"}}

`train` holds fields of TrainConfig, `env_kwargs` arguments of the environment. Explicit flags override both. A checkpoint of
flowrl-train also brings the environment arguments it was trained with, in `flowrl.json`; they go before the preset's.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from flowrl.config import CheckConfig, EvalConfig, TrainConfig, flag, parse_env_kwargs
from flowrl.errors import FlowRLError
from flowrl.noise_flags import NOISE_FLAGS

PRESET_FILE, RECORD_FILE = "preset.json", "flowrl.json"
NOT_IN_A_PRESET = ("policy", "out", "resume", "device", "env_kwargs")


def load_preset(policy: str) -> dict[str, dict[str, Any]]:
    """The preset of a policy folder: {"env_kwargs": {...}, "train": {...}}, both empty without one.

    Raises:
        FlowRLError: unreadable file, a key that no flag has, or a value of another type than its flag.
    """
    path = Path(policy) / PRESET_FILE
    preset = _read(path)
    if not isinstance(preset, dict) or not all(isinstance(part, dict) for part in preset.values()):
        raise FlowRLError(f"{path}: must be an object of the objects env_kwargs and train")
    unknown = sorted(set(preset) - {"env_kwargs", "train"})
    if unknown:
        raise FlowRLError(f"{path}: unknown key {', '.join(unknown)}; allowed are env_kwargs and train")
    train = preset.get("train", {})
    types = {name: hint for name, hint in get_type_hints(TrainConfig).items() if name not in NOT_IN_A_PRESET}
    unknown = sorted(set(train) - set(types))
    if unknown:
        raise FlowRLError(
            f"{path}: unknown key train.{', train.'.join(unknown)}; allowed are {', '.join(types)}"
        )
    for name, value in train.items():
        if not has_type(value, types[name]):
            raise FlowRLError(f"{path}: train.{name} is {value!r}, which {flag(name)} does not take")
    meta = _read(Path(policy) / RECORD_FILE).get("meta", {})
    return {"env_kwargs": {**preset.get("env_kwargs", {}), **meta.get("env_kwargs", {})}, "train": train}


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return json.loads(path.read_text())
    except (ValueError, OSError) as error:
        raise FlowRLError(f"{path}: cannot be read as JSON ({error}); mend or delete it") from error


def with_preset[Config: (TrainConfig, EvalConfig, CheckConfig)](
    defaults: Config, preset: dict[str, dict[str, Any]]
) -> Config:
    """Defaults with the preset's values in their place. Evaluation and check take what they have in common with training."""
    fields = {field.name for field in dataclasses.fields(defaults)}
    shared = ("env_id", "rename", "task", "seconds", *NOISE_FLAGS)
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in preset["train"].items()
        if name in fields and (isinstance(defaults, TrainConfig) or name in shared)
    }
    return dataclasses.replace(defaults, **values)


def with_preset_env_kwargs[Config: (TrainConfig, EvalConfig, CheckConfig)](
    config: Config, preset: dict[str, dict[str, Any]]
) -> Config:
    """The preset's environment arguments, each overridden by the same key of --env-kwargs."""
    merged = {**preset["env_kwargs"], **parse_env_kwargs(config.env_kwargs)}
    return dataclasses.replace(config, env_kwargs=json.dumps(merged))


def describe_preset(policy: str, preset: dict[str, dict[str, Any]]) -> str:
    """One line that names what the preset set; empty when there is none."""
    parts = [f"{flag(name)} {value}" for name, value in preset["train"].items()]
    if preset["env_kwargs"]:
        parts.append(f"--env-kwargs '{json.dumps(preset['env_kwargs'])}'")
    return f"defaults from {policy}: {' '.join(parts)}" if parts else ""


def has_type(value: Any, hint: Any) -> bool:
    """Whether a value from a JSON file is one that a field with this type hint takes."""
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    if hint == tuple[str, ...]:
        return isinstance(value, list) and all(isinstance(item, str) for item in value)
    if hint == float | None:
        return value is None or has_type(value, float)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return type(value) is hint
