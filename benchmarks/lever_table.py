"""A row for each run that `levers.sh` made: training success at its ends, and success without noise beside the start's.

python benchmarks/lever_table.py OUT
"""

import json
import sys
from pathlib import Path
from typing import Any

from flowrl.metrics import paired_difference


def results_of(folder: Path) -> dict[str, Any]:
    """An evaluation's results."""
    return json.loads((folder / "eval_results.json").read_text())


def successes(results: dict[str, Any]) -> list[bool]:
    """Success of each evaluated episode."""
    return [bool(episode["success"]) for episode in results["episodes"]]


def environment(results: dict[str, Any]) -> str:
    """The environment's arguments, as one text whatever their order."""
    return json.dumps(json.loads(results["settings"]["env_kwargs"]), sort_keys=True)


def table(out: Path) -> None:
    """Prints the rows. A run is paired with the start in the same environment; where that was not evaluated, with nothing."""
    folders = [path.parent for path in out.glob("eval/*/*/eval_results.json")]
    starts = {
        environment(results): successes(results)
        for path in folders
        if path.name not in ("last", f"{path.parent.name}-mean")
        for results in [results_of(path)]
    }
    for run in sorted(out / "eval" / path.parent.name for path in out.glob("*/log.jsonl")):
        log = [json.loads(line) for line in (out / run.name / "log.jsonl").read_text().splitlines()]
        train = [line["train_success"] for line in log if line["train_success"] is not None]
        episodes = sum(line["train_episodes"] or 0 for line in log)
        fifth = max(1, len(train) // 5)
        row = f"{run.name:16s} {len(train)} iterations {episodes} episodes, with noise {sum(train[:fifth]) / fifth:.1%}"
        row += f" -> {sum(train[-fifth:]) / fifth:.1%}"
        if train:
            row += f", lr {log[-1]['lr']:.2g}, ev {log[-1]['explained_variance'] or 0.0:.2f}"
        row += f", ratio dev {max(line['ratio_max_dev'] or 0.0 for line in log):.1g}"
        for name in ("last", f"{run.name}-mean"):
            if run / name in folders:
                row += f"; {name} {compared(results_of(run / name), starts)}"
        print(row)


def compared(results: dict[str, Any], starts: dict[str, list[bool]]) -> str:
    """Success, and the paired difference to the start in the same environment."""
    own = successes(results)
    start = starts.get(environment(results))
    text = f"{sum(own)}/{len(own)} = {sum(own) / len(own):.1%}"
    if start is None:
        return f"{text} (start not evaluated there)"
    pair = paired_difference(start, own)
    low, high = pair.ci95
    difference = f"{100 * pair.paired_difference:+.1f}, {100 * low:+.1f} to {100 * high:+.1f}"
    return f"{text} from {sum(start) / len(start):.1%} ({difference}, p {pair.mcnemar_p:.2g})"


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    table(Path(sys.argv[1]))
