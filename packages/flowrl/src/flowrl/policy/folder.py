"""A LeRobot policy folder on disk: what must be in it, where its VLM is, and what a checkpoint takes over from it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from flowrl.errors import FlowRLError

CONFIG, WEIGHTS, VLM, TOKENIZER = "config.json", "model.safetensors", "vlm", "tokenizer.json"
PREPROCESSOR, POSTPROCESSOR = "policy_preprocessor.json", "policy_postprocessor.json"
OPTIONAL_FILES = ("train_config.json", "preset.json", "LICENSE")
_VLM_PATTERNS = ("*.json", "*.txt", "*.jinja", "*.model")
_VLM_KEY = "vlm_model_name"
_STEPS = {"rename_observations_processor", "tokenizer_processor", "device_processor", "normalizer_processor"}
_STATISTICS = {
    "MEAN_STD": ("mean", "std"),
    "MIN_MAX": ("min", "max"),
    "QUANTILES": ("q01", "q99"),
    "QUANTILE10": ("q10", "q90"),
}


@dataclass(frozen=True)
class PolicyFolder:
    """A checked policy folder.

    Attributes:
        path: The folder.
        config: Its `config.json`.
        vlm: Folder with the VLM's config and tokenizer (inside `path`, or elsewhere when the policy brings none).
        preprocessor, postprocessor: The two processor files.
        files: Everything but the weights that a checkpoint takes over, by path relative to the folder.
    """

    path: Path
    config: Mapping[str, Any]
    vlm: Path
    preprocessor: Mapping[str, Any]
    postprocessor: Mapping[str, Any]
    files: Mapping[str, bytes]


def open_policy_folder(path: Path | str) -> PolicyFolder:
    """Reads and checks everything but the weights.

    A local folder never causes network traffic; a hub id (`user/name`) is downloaded by huggingface_hub.

    Raises:
        FlowRLError: If a file is missing or damaged, the VLM cannot be found, or the normalization statistics do not
            belong to the policy's features.
    """
    folder, is_local = local_folder(path)
    config = read_json(folder, CONFIG, "copy the whole policy folder again")
    preprocessor = read_json(folder, PREPROCESSOR, _MIGRATE)
    postprocessor = read_json(folder, POSTPROCESSOR, _MIGRATE)
    _check_steps(folder, preprocessor)
    _check_weights_readable(folder)
    check_statistics(folder, config, preprocessor, postprocessor)
    name, needed = _vlm_reference(config, preprocessor)
    vlm = _find_vlm(folder, name, needed, is_local)

    names = [
        CONFIG,
        PREPROCESSOR,
        POSTPROCESSOR,
        *(name for name in OPTIONAL_FILES if (folder / name).is_file()),
    ]
    names += [
        step["state_file"]
        for pipeline in (preprocessor, postprocessor)
        for step in pipeline["steps"]
        if "state_file" in step
    ]
    files = {name: (folder / name).read_bytes() for name in names}
    for file in sorted({file for pattern in _VLM_PATTERNS for file in vlm.glob(pattern)}):
        files[f"{VLM}/{file.name}"] = file.read_bytes()
    return PolicyFolder(folder, config, vlm, preprocessor, postprocessor, files)


def check_statistics(
    folder: Path, config: Mapping[str, Any], preprocessor: Mapping[str, Any], postprocessor: Mapping[str, Any]
) -> None:
    """Proves that state and actions are really normalized, by statistics of this policy's own features.

    LeRobot passes a feature through unchanged when its statistics are missing or stored under another name.

    Raises:
        FlowRLError: If statistics are missing, of the wrong size, not finite, an identity, or differ between the two
            processors.
    """
    features = {**config.get("input_features", {}), **config.get("output_features", {})}
    needed = {name: feature for name, feature in features.items() if feature["type"] in ("STATE", "ACTION")}
    before = _statistics(folder, preprocessor, PREPROCESSOR, "normalizer_processor")
    after = _statistics(folder, postprocessor, POSTPROCESSOR, "unnormalizer_processor")
    for name, feature in needed.items():
        check_feature_statistics(name, feature, *before)
        if feature["type"] == "ACTION":
            check_feature_statistics(name, feature, *after)
            for key, value in before[2].items():
                if key.startswith(f"{name}.") and key in after[2] and not torch.equal(value, after[2][key]):
                    raise FlowRLError(
                        f"{folder}: the statistics {key} differ between {PREPROCESSOR} and {POSTPROCESSOR}; "
                        "take both from the same training run"
                    )


def replace_paths(files: Mapping[str, bytes], vlm: str) -> dict[str, bytes]:
    """The files with the VLM's path set to `vlm` where LeRobot keeps it; nothing else changes.

    That is the tokenizer's name in the preprocessor, and in SmolVLA's config.json the VLM's.
    """
    replaced = dict(files)
    if _VLM_KEY.encode() in files[CONFIG]:
        replaced[CONFIG] = replace_json_string(files[CONFIG], _VLM_KEY, vlm)
    replaced[PREPROCESSOR] = replace_json_string(files[PREPROCESSOR], "tokenizer_name", vlm)
    return replaced


def replace_json_string(text: bytes, key: str, value: str) -> bytes:
    """Sets the string (or null) value of every `key` in a JSON text; every other byte stays.

    Raises:
        FlowRLError: If the key is not there.
    """
    pattern = re.compile(rf'("{re.escape(key)}"\s*:\s*)("(?:[^"\\]|\\.)*"|null)')
    new, count = pattern.subn(lambda match: match.group(1) + json.dumps(value), text.decode())
    if count == 0:
        raise FlowRLError(f"the JSON has no string {key!r}; is this a policy folder of LeRobot?")
    return new.encode()


_MIGRATE = (
    "an old LeRobot checkpoint is converted by `python -m lerobot.processor.migrate_policy_normalization "
    "--pretrained-path DIR`, otherwise copy the whole policy folder again"
)


def local_folder(path: Path | str) -> tuple[Path, bool]:
    """The folder of a path or hub id (downloaded), and whether it was one on this machine.

    Raises:
        FlowRLError: If it is neither.
    """
    folder = Path(path)
    if folder.is_dir():
        if not (folder / CONFIG).is_file() and (folder / "pretrained_model" / CONFIG).is_file():
            raise FlowRLError(f"{folder} holds no policy itself; give {folder / 'pretrained_model'}")
        return folder, True
    if folder.is_file():
        raise FlowRLError(f"{folder} is a file; give the policy folder that contains it")
    is_hub_id = re.fullmatch(r"[\w.-]+/[\w.-]+", str(path)) and not str(path).startswith(".")
    if (
        not is_hub_id or folder.parent.is_dir()
    ):  # models/nothing beside an existing models/ is a slip, not a hub id
        raise FlowRLError(
            f"policy folder {folder} does not exist; give a LeRobot policy folder or a hub id (user/name)"
        )
    try:
        return Path(snapshot_download(str(path))), False
    except (OSError, ValueError, HfHubHTTPError) as error:
        raise FlowRLError(
            f"{path} is neither a folder here nor a repository that the Hugging Face hub gave "
            f"({type(error).__name__}); check the path, the name and the network"
        ) from error


def _vlm_reference(config: Mapping[str, Any], preprocessor: Mapping[str, Any]) -> tuple[str, Sequence[str]]:
    """Where the policy says that its VLM is, and the files that it needs of it.

    SmolVLA is built from the VLM's config. pi0 has its widths from LeRobot, and needs the tokenizer alone.
    """
    if _VLM_KEY in config:
        return str(config[_VLM_KEY] or ""), (CONFIG, TOKENIZER)
    steps = {step.get("registry_name"): step.get("config", {}) for step in preprocessor["steps"]}
    return str(steps["tokenizer_processor"].get("tokenizer_name", "")), (TOKENIZER,)


def _find_vlm(folder: Path, name: str, needed: Sequence[str], is_local: bool) -> Path:
    inside = folder / VLM
    candidates = [inside] if inside.is_dir() or not name else [inside, Path(name)]
    for candidate in candidates:
        if not candidate.is_dir():
            continue
        for file in needed:
            if not (candidate / file).is_file():
                raise FlowRLError(
                    f"{candidate / file} is missing; copy the VLM's config and tokenizer to {inside}"
                )
        return candidate
    try:
        found = snapshot_download(name, allow_patterns=list(_VLM_PATTERNS), local_files_only=is_local)
    except (OSError, ValueError, HfHubHTTPError) as error:
        raise FlowRLError(
            f"the VLM's config and tokenizer ({name}) are neither in {inside} nor in the Hugging Face cache; get "
            f"them once by `hf download {name} --include '*.json' '*.txt' '*.jinja' --local-dir {inside}`"
        ) from error
    return Path(found)


def read_json(folder: Path, name: str, remedy: str) -> dict[str, Any]:
    """A JSON object from a file of the folder.

    Raises:
        FlowRLError: If the file is missing (with the remedy), or holds something else.
    """
    file = folder / name
    if not file.is_file():
        raise FlowRLError(f"{file} is missing; {remedy}")
    try:
        content = json.loads(file.read_text())
    except ValueError as error:
        raise FlowRLError(f"{file} is not valid JSON ({error}); copy it again") from error
    if not isinstance(content, dict):
        raise FlowRLError(f"{file} holds no JSON object; copy it again")
    return content


def _check_steps(folder: Path, preprocessor: Mapping[str, Any]) -> None:
    present = {step.get("registry_name") for step in preprocessor.get("steps", [])}
    missing = sorted(_STEPS - present)
    if missing:
        raise FlowRLError(f"{folder / PREPROCESSOR} has no step {', '.join(missing)}; {_MIGRATE}")


def _check_weights_readable(folder: Path) -> None:
    if (folder / "adapter_config.json").is_file():
        raise FlowRLError(f"{folder} is a PEFT adapter; merge it into the full policy and save that first")
    file = folder / WEIGHTS
    if not file.is_file():
        raise FlowRLError(f"{file} is missing; copy the whole policy folder again")
    try:
        with safe_open(file, framework="pt") as handle:
            handle.keys()
    except (SafetensorError, OSError) as error:
        raise FlowRLError(f"{file} is truncated or damaged ({error}); copy it again") from error


def _statistics(
    folder: Path, pipeline: Mapping[str, Any], name: str, step_name: str
) -> tuple[Path, Mapping[str, str], dict[str, Tensor]]:
    """File, normalization mode per feature type, and statistics of the (un)normalizer step of a processor."""
    steps = pipeline.get("steps", [])
    step = next((step for step in steps if step.get("registry_name") == step_name), None)
    if step is None:
        raise FlowRLError(f"{folder / name} has no {step_name}; actions would run unnormalized: {_MIGRATE}")
    modes = step.get("config", {}).get("norm_map", {})
    if "state_file" not in step:
        raise FlowRLError(
            f"{folder / name} has no statistics (its {step_name} names no state file); {_MIGRATE}"
        )
    file = folder / step["state_file"]
    if not file.is_file():
        raise FlowRLError(f"normalization statistics {file} are missing; copy the whole policy folder again")
    try:
        return file, modes, load_file(file)
    except (SafetensorError, OSError) as error:
        raise FlowRLError(f"{file} is truncated or damaged ({error}); copy it again") from error


def check_feature_statistics(
    name: str,
    feature: Mapping[str, Any],
    file: Path,
    modes: Mapping[str, str],
    statistics: Mapping[str, Tensor],
) -> None:
    """Proves that a feature is normalized, by finite statistics of its own size.

    Args:
        name: The feature, for example "action".
        feature: Its "type" (STATE or ACTION) and "shape".
        file: Where the statistics come from, for the error.
        modes: Normalization by type, for example {"STATE": "MEAN_STD"}.
        statistics: "<name>.mean" and so on.

    Raises:
        FlowRLError: If one is missing, of another size, not finite, or all are an identity.
    """
    mode = modes.get(feature["type"], "IDENTITY")
    if mode not in _STATISTICS:
        raise FlowRLError(
            f"{file} normalizes {name} by {mode}, that is not at all; allowed are {', '.join(_STATISTICS)}: "
            "train the policy with normalized states and actions"
        )
    values = []
    for statistic in _STATISTICS[mode]:
        value = statistics.get(f"{name}.{statistic}")
        if value is None:
            known = ", ".join(sorted(statistics)) or "nothing"
            raise FlowRLError(
                f"{file} has no {name}.{statistic} (it has: {known}); rename the statistics to the policy's features"
            )
        if tuple(value.shape) != tuple(feature["shape"]):
            raise FlowRLError(
                f"{file}: {name}.{statistic} has shape {tuple(value.shape)}, the policy's {name} {tuple(feature['shape'])}"
            )
        if not value.isfinite().all():
            raise FlowRLError(f"{file}: {name}.{statistic} is not finite; recompute the dataset's statistics")
        values.append(value)
    identity = (0.0, 1.0) if mode == "MEAN_STD" else (-1.0, 1.0)
    if all(bool((value == constant).all()) for value, constant in zip(values, identity)):
        raise FlowRLError(
            f"{file}: the statistics of {name} are an identity; put the dataset's statistics there"
        )
