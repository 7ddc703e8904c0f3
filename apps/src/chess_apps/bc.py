"""chess-bc from flags to a policy folder; the training loop itself is in ``clone.py``."""

import contextlib
import io
import json
import math
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from lerobot.processor.normalize_processor import NormalizerProcessorStep
from safetensors import SafetensorError
from torch import Tensor

from chess_apps.clone import Batches, clone, reset_expert, write_record
from chess_apps.config import CloneConfig
from chess_apps.demonstrations import Demonstrations
from chess_apps.recording import check_recording, record_episodes
from chess_env.env import CAMERAS
from flowrl.errors import FlowRLError
from flowrl.policy.smolvla import SmolVLAFlowPolicy
from flowrl.policy.tiny import build_smolvla, save_policy_folder
from flowrl.preset import PRESET_FILE, load_preset
from flowrl.record import writing

TASK_TOKENS = 32
"""Bytes of the longest instruction; a longer one is refused, not cut."""
MOMENTS = ("mean", "std")


def run(config: CloneConfig) -> None:
    """Record or read demonstrations, clone them, write the policy folder ``config.out``."""
    check(config)
    out = Path(config.out)
    initial = out.with_name(out.name + ".initial")
    try:
        _run(config, out, initial)
    finally:
        if config.policy == "new":
            shutil.rmtree(initial, ignore_errors=True)
    print(f"wrote {out}")


def _run(config: CloneConfig, out: Path, initial: Path) -> None:
    """What ``run`` does between the checks and the end; ``initial`` holds a new policy before it is cloned, and ``run`` removes it."""
    demos = load_demonstrations(config)
    print(
        f"{demos.num_episodes} episodes, {len(demos)} observations, {demos.images.nbytes / 2**30:.2f} GiB of images"
    )
    device = torch.device(
        ("cuda" if torch.cuda.is_available() else "cpu") if config.device == "auto" else config.device
    )
    torch.manual_seed(config.seed)
    if config.policy == "new":
        _fresh(initial)
        size, statistics = demos.images.shape[2], demos.statistics()
        policy = build_smolvla(
            initial / "vlm",
            size=config.size,
            cameras=demos.cameras,
            image_size=size,
            task_tokens=TASK_TOKENS,
            seed=config.seed,
        )
        tensors = {
            name: {key: torch.from_numpy(values[key]) for key in MOMENTS}
            for name, values in statistics.items()
        }
        with _writing_whole(initial, out):
            save_policy_folder(initial, policy, statistics)
        wrapped = SmolVLAFlowPolicy.load(initial, device=device)
    else:
        wrapped = SmolVLAFlowPolicy.load(config.policy, device=device)
        tensors = stored_statistics(wrapped)
        check_fits(wrapped, demos)
    policy = wrapped.module
    parameters = sum(p.numel() for p in policy.parameters())
    print(f"{parameters / 1e6:.2f} M parameters on {device}")
    _check_space(out, wrapped)
    if config.reset_expert:
        reset_expert(policy, config.seed)
    text, text_mask = tokenize(wrapped, demos)
    batches = Batches(
        demos,
        tensors,
        text,
        text_mask,
        batch=config.batch,
        max_action_dim=wrapped.spec.padded_action_dim,
        device=device,
        seed=config.seed + 1,
    )
    curve = clone(policy, batches, config)
    unfinished = _fresh(out.with_name(out.name + ".unfinished"))
    with _writing_whole(unfinished, out):
        wrapped.save(unfinished, final_folder=out)
        write_record(unfinished, config, demos, curve)
        write_preset(unfinished, config, demos)
        unfinished.rename(out)


def _fresh(folder: Path) -> Path:
    """An empty folder; what an interrupted run left there is removed."""
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    return folder


@contextlib.contextmanager
def _writing_whole(folder: Path, out: Path) -> Iterator[None]:
    """Write ``folder`` wholly or not at all: what a full disk left of it is removed.

    Raises:
        FlowRLError: It cannot be written.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise FlowRLError(
            f"--out {out}: the policy cannot be written ({error}); nothing of it is left: free space and run again"
        ) from error


def _check_space(out: Path, policy: SmolVLAFlowPolicy) -> None:
    """Refuse before cloning, whose hours would be lost, what does not fit at its end."""
    needed = sum(tensor.nbytes for tensor in policy.module.state_dict().values())
    free = shutil.disk_usage(out.parent).free
    if free < needed:
        raise FlowRLError(
            f"--out {out}: {free / 2**20:.0f} MiB are free there and the weights take {needed / 2**20:.0f} MiB; "
            "free space or choose another place"
        )


def check(config: CloneConfig) -> None:
    """Refuse, in one line, what cannot work, before anything is recorded."""
    for name in ("steps", "batch", "stride"):
        if getattr(config, name) < 1:
            raise FlowRLError(f"--{name} {getattr(config, name)}: at least 1 is needed")
    for name in ("lr", "max_grad_norm"):
        if not (math.isfinite(getattr(config, name)) and getattr(config, name) > 0):
            raise FlowRLError(
                f"--{name.replace('_', '-')} {getattr(config, name)}: a number above 0 is needed"
            )
    for name in ("warmup", "weight_decay"):
        if not (math.isfinite(getattr(config, name)) and getattr(config, name) >= 0):
            raise FlowRLError(f"--{name.replace('_', '-')} {getattr(config, name)}: at least 0 is needed")
    if config.max_seconds is not None and config.max_seconds <= 0:
        raise FlowRLError(f"--max-seconds {config.max_seconds}: more than 0 is needed")
    if Path(config.out).exists():
        raise FlowRLError(f"--out {config.out} exists already; choose another folder or remove it")
    if config.policy == "new" and config.train == "expert":
        raise FlowRLError(
            "--train expert needs a --policy whose VLM is trained; a new one has random weights"
        )
    if config.preset is not None and not Path(config.preset).is_file():
        raise FlowRLError(f"--preset {config.preset}: no such file")
    if config.demos is None:
        check_recording(config.record)
    if re.fullmatch(r"auto|cpu|cuda(:\d+)?", config.device) is None:
        raise FlowRLError(f"--device {config.device}: must be auto, cpu, cuda or cuda:N")
    number = int(config.device.partition(":")[2] or 0)
    if config.device.startswith("cuda") and number >= torch.cuda.device_count():
        raise FlowRLError(
            f"--device {config.device}: torch sees {torch.cuda.device_count()} CUDA devices here; use --device cpu"
        )
    out = Path(config.out)
    with writing(out):  # hours of cloning would be lost
        out.parent.mkdir(parents=True, exist_ok=True)
        probe = out.with_name(f".{out.name}.tmp")
        probe.touch()
        probe.unlink()


def write_preset(out: Path, config: CloneConfig, demos: Demonstrations) -> None:
    """``preset.json``: the environment that the policy was cloned in, and defaults of training where given."""
    if config.preset is not None:
        text = Path(config.preset).read_text()
    else:
        kwargs = {"image_size": demos.images.shape[2], "distractors": list(config.record.distractors)}
        text = json.dumps({"env_kwargs": kwargs, "train": {}}, indent=2) + "\n"
    (out / PRESET_FILE).write_text(text)
    load_preset(str(out))


def load_demonstrations(config: CloneConfig) -> Demonstrations:
    """The LeRobotDataset of --demos, or freshly recorded episodes."""
    chunk_size = 50
    if config.demos is not None:
        return Demonstrations.from_lerobot(Path(config.demos), chunk_size=chunk_size, stride=config.stride)
    return Demonstrations.from_episodes(
        record_episodes(config.record, stride=config.stride), cameras=CAMERAS, chunk_size=chunk_size
    )


def check_fits(policy: SmolVLAFlowPolicy, demos: Demonstrations) -> None:
    """Raises FlowRLError when the demonstrations have other cameras or image sizes than the policy."""
    features = policy.module.config.image_features
    names = tuple(name.removeprefix("observation.images.") for name in features)
    if names != demos.cameras:
        raise FlowRLError(f"the policy sees the cameras {names}, the demonstrations have {demos.cameras}")
    size = policy.module.config.resize_imgs_with_padding
    if size is not None and tuple(demos.images.shape[2:4]) != (size[1], size[0]):
        raise FlowRLError(
            f"the policy works on {size[0]}x{size[1]} images, the demonstrations have "
            f"{demos.images.shape[3]}x{demos.images.shape[2]}; record with that --record.image-size"
        )


def stored_statistics(policy: SmolVLAFlowPolicy) -> dict[str, dict[str, Tensor]]:
    """Mean and standard deviation of state and action as the policy's own normalizer holds them."""
    held = next(step.stats for step in policy.preprocessor.steps if isinstance(step, NormalizerProcessorStep))
    return {
        name: {key: torch.as_tensor(held[name][key], dtype=torch.float32) for key in MOMENTS}
        for name in ("observation.state", "action")
    }


def tokenize(policy: SmolVLAFlowPolicy, demos: Demonstrations) -> tuple[Tensor, Tensor]:
    """Token ids and mask, one row per task of the demonstrations, through the policy's own preprocessor."""
    count = len(demos.tasks)
    observation = {
        "pixels": {camera: demos.images[[0] * count, number] for number, camera in enumerate(demos.cameras)},
        "agent_pos": demos.state[[0] * count],
    }
    with contextlib.redirect_stdout(io.StringIO()):
        batch = policy.prepare(observation, list(demos.tasks))
    return batch["observation.language.tokens"].cpu(), batch[
        "observation.language.attention_mask"
    ].bool().cpu()
