"""Writes a policy folder whose weights are the mean of several checkpoints' (Polyak and Juditsky 1992), to measure what averaging gives.

python benchmarks/average_checkpoints.py OUT CHECKPOINT [CHECKPOINT ...]
"""

import shutil
import sys
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

WEIGHTS = "model.safetensors"


def average(out: Path, folders: list[Path]) -> None:
    """The mean, in float64, of each floating tensor that differs; everything else is the last folder's.

    Args:
        out: A folder that does not exist yet.
        folders: Checkpoints of one run, the last one named last.
    """
    shutil.copytree(folders[-1], out)
    states = [load_file(folder / WEIGHTS) for folder in folders]
    with safe_open(folders[-1] / WEIGHTS, "pt") as file:
        metadata = file.metadata()
    mean = {}
    for name, last in states[-1].items():
        moved = any(not torch.equal(state[name], last) for state in states)
        values = torch.stack([state[name].double() for state in states]).mean(0) if moved else last
        mean[name] = values.to(last.dtype).contiguous()
    save_file(mean, out / WEIGHTS, metadata)
    print(f"{out}: mean of {len(folders)} checkpoints")


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    average(Path(sys.argv[1]), [Path(name) for name in sys.argv[2:]])
