"""SmolVLA policies of a named size with random weights, for measurements.

    python benchmarks/sized_policy.py 450m runs/450m-25 --chunk-size 25      # writes a policy folder

The sizes are those of `flowrl.policy.tiny.SIZES`; the VLM is in bfloat16, as the published one's.
"""

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from flowrl.policy.tiny import SIZES, build_smolvla, save_policy_folder

FULL_PADDED_DIM = 32  # of the published SmolVLA
SPREAD = 20.0  # of the joints [deg]


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes a SmolVLA with random weights.")
    parser.add_argument("size", choices=sorted(SIZES))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--chunk-size", type=int, default=50, help="targets of a decision")
    args = parser.parse_args()
    if args.folder.exists():
        parser.error(f"{args.folder} exists; give a new folder")
    build_policy_folder(args.folder, args.size, args.chunk_size)


@contextmanager
def policy_folder(name: str, chunk_size: int = 50) -> Iterator[str]:
    """The policy folder `name` as it is; a named size is built in a temporary folder that lasts as long as the context."""
    if name not in SIZES:
        yield name
        return
    with tempfile.TemporaryDirectory() as folder:
        build_policy_folder(Path(folder), name, chunk_size)
        yield folder


def build_policy_folder(folder: Path, size: str, chunk_size: int = 50) -> None:
    """Writes it, complete, with joints around random places."""
    rng = np.random.default_rng(0)
    joints = {"mean": SPREAD * rng.normal(size=6), "std": np.full(6, SPREAD)}
    module = build_smolvla(folder / "vlm", size=size, padded_dim=FULL_PADDED_DIM, chunk_size=chunk_size)
    module.model.vlm_with_expert.vlm.to(torch.bfloat16)
    save_policy_folder(folder, module, {"observation.state": joints, "action": joints})


if __name__ == "__main__":
    main()
