"""A policy folder to publish from a run's checkpoint: no optimizer state, no paths of the machine, a model card with the test's numbers.

python benchmarks/export_model.py runs/gain/final/rl-seed1 models/chess-tiny-rl --results benchmarks/results/gain --model rl-seed1
"""

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

MAX_BYTES = 20e6
WEIGHTS = "model.safetensors"
TRAINING_STATE = ("flowrl.json", "flowrl.safetensors")


def iteration_of(checkpoint: Path) -> int | None:
    """The iteration of a checkpoint of flowrl-train; None where there is none."""
    record = checkpoint / TRAINING_STATE[0]
    return json.loads(record.read_text())["meta"]["iteration"] if record.is_file() else None


def clean_policy(checkpoint: Path, out: Path, vlm_path: str | None = None) -> None:
    """Writes `out`: the checkpoint's policy alone, its preset with the run's environment arguments.

    Args:
        checkpoint: Policy folder, or a checkpoint of flowrl-train.
        out: A folder that does not exist yet.
        vlm_path: Where LeRobot will find the VLM's config and tokenizer; `out`/vlm by default.

    Raises:
        FlowRLError: no policy folder, no preset, a path of this machine left in it, or `out` exists.
    """
    from flowrl.checkpoint import relocate
    from flowrl.errors import FlowRLError
    from flowrl.preset import load_preset

    if out.exists():
        raise FlowRLError(f"{out}: exists; choose another folder or remove it")
    preset = load_preset(str(checkpoint))
    if not preset["env_kwargs"]:
        raise FlowRLError(
            f"{checkpoint}: neither preset.json nor flowrl.json names its environment; export a checkpoint of flowrl-train"
        )
    unfinished = out.with_name(f".{out.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    shutil.copytree(checkpoint, unfinished, ignore=shutil.ignore_patterns(*TRAINING_STATE, "README.md"))
    (unfinished / "preset.json").write_text(json.dumps(preset, indent=2) + "\n")
    relocate(unfinished, vlm_path or str(out / "vlm"))
    for path in unfinished.rglob("*.json") if vlm_path else ():
        if found := absolute_paths(json.loads(path.read_text())):
            raise FlowRLError(
                f"{path}: names {found[0]}, a path of this machine; set it to null or to a relative path"
            )
    (unfinished / WEIGHTS).chmod(0o644)  # safetensors writes for its owner alone
    unfinished.rename(out)


def absolute_paths(value: Any) -> list[str]:
    """Strings in a JSON value that are absolute paths of files or folders on this machine."""
    if isinstance(value, dict):
        return [found for part in value.values() for found in absolute_paths(part)]
    if isinstance(value, list):
        return [found for part in value for found in absolute_paths(part)]
    return [value] if isinstance(value, str) and len(value) > 1 and Path(value).is_absolute() else []


def size_of(folder: Path) -> int:
    """Bytes of all files."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def main() -> None:
    from model_card import model_card

    from flowrl.errors import FlowRLError

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("out", type=Path, help="relative to the repository: LeRobot finds the VLM by it")
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results/gain"))
    parser.add_argument("--model", default="rl-seed1", help="its name in the results")
    args = parser.parse_args()
    try:
        if args.out.is_absolute():
            raise FlowRLError(
                f"{args.out}: give a path relative to the repository, it is written into config.json"
            )
        card = model_card(args.results, args.model, args.out)
        clean_policy(args.checkpoint, args.out, vlm_path=str(args.out / "vlm"))
        (args.out / "README.md").write_text(card)
        if (size := size_of(args.out)) > MAX_BYTES:
            raise FlowRLError(
                f"{args.out}: {size / 1e6:.1f} MB, at most {MAX_BYTES / 1e6:.0f} are meant to be committed"
            )
    except FlowRLError as error:
        sys.exit(f"error: {error}")
    print(f"wrote {args.out}, {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
