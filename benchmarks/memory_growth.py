"""Memory of the trainer's process over 20 iterations of a small job: resident set after each [MB].

    python benchmarks/memory_growth.py [--iterations 20]

The job is the tests' toy, stepped in this process: growth here is the trainer's, not an environment's.
"""

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from toy_inline import load

from flowrl import train as training
from flowrl.config import TrainConfig


def resident_mb() -> float:
    """Of this process. Source: Linux, proc(5), VmRSS [kB]."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1024


class MeasuredRun(training.Run):
    """Tells the resident set after each iteration."""

    def complete(self, *args, **kwargs) -> None:
        super().complete(*args, **kwargs)
        print(f"iteration {self.iteration}: {resident_mb():.1f} MB", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=int, default=20)
    iterations = parser.parse_args().iterations
    training.Run = MeasuredRun  # type: ignore[misc]
    with tempfile.TemporaryDirectory() as folder:
        config = TrainConfig(
            policy="none", env_id="toy_inline:ToyInline-v0", out=f"{folder}/run", iterations=iterations, envs=4,
            episodes=64, val_episodes=8, val_every=5, save_every=5, lr=1e-4, minibatch=32, device="cpu", torch_threads=1,
        )  # fmt: skip
        training.train(config, load)


if __name__ == "__main__":
    main()
