"""A row for each run that `levers.sh` made: training success at its ends, and success without noise beside the start's.

python benchmarks/lever_table.py OUT
"""

import json
import sys
from pathlib import Path

from flowrl.metrics import paired_difference


def successes(folder: Path) -> list[bool]:
    """Success of each evaluated episode."""
    episodes = json.loads((folder / "eval_results.json").read_text())["episodes"]
    return [bool(episode["success"]) for episode in episodes]


def table(out: Path) -> None:
    """Prints the rows."""
    results = [path.parent for path in out.glob("eval/*/*/eval_results.json")]
    starts = {
        path.parent.name: path for path in results if path.name not in ("last", f"{path.parent.name}-mean")
    }
    for folder in sorted(path for path in (out / "eval").iterdir() if path.is_dir()):
        log = [json.loads(line) for line in (out / folder.name / "log.jsonl").read_text().splitlines()]
        train = [line["train_success"] for line in log if line["train_success"] is not None]
        episodes = sum(line["train_episodes"] or 0 for line in log)
        tenth = max(1, len(train) // 5)
        row = f"{folder.name:16s} {len(train)} iterations {episodes} episodes, with noise {sum(train[:tenth]) / tenth:.1%}"
        row += f" -> {sum(train[-tenth:]) / tenth:.1%}, lr {log[-1]['lr']:.2g}, ev {log[-1]['explained_variance']:.2f}"
        start = successes(starts.get(folder.name, next(iter(starts.values()))))
        for name in ("last", f"{folder.name}-mean"):
            own = successes(folder / name)
            pair = paired_difference(start, own)
            low, high = pair.ci95
            row += f"; {name} {sum(start) / len(start):.1%} -> {sum(own) / len(own):.1%}"
            row += f" ({100 * pair.paired_difference:+.1f}, {100 * low:+.1f} to {100 * high:+.1f}, p {pair.mcnemar_p:.2g})"
        print(row)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    table(Path(sys.argv[1]))
