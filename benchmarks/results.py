"""Tables and learning curves of docs/results.md from what `gain.py` left.

    python benchmarks/results.py runs/gain --save benchmarks/results/gain     # from OUT; also writes the compact form to commit
    python benchmarks/results.py benchmarks/results/gain                      # from the compact form

Fills the parts of the page between `<!-- results:NAME -->` and `<!-- /results:NAME -->`; what is missing is said there.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from result_data import Results, merged, read_results, write_results
from result_plots import learning_curves
from result_tables import (
    NOT_RUN,
    ablations_table,
    claim_table,
    controls_table,
    final_table,
    groups_table,
    larger_table,
    measures_table,
    usage_table,
)

ROOT = Path(__file__).parents[1]
CURVES = "learning_curves.png"
TABLES: dict[str, Callable[[Results], str]] = {
    "claim": claim_table,
    "final": final_table,
    "final-cpu": partial(final_table, test="test-cpu"),
    "groups": groups_table,
    "measures": measures_table,
    "controls": controls_table,
    "controls-cpu": partial(controls_table, test="test-cpu"),
    "ablations": ablations_table,
    "usage": usage_table,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "folder",
        type=Path,
        nargs="+",
        help="OUT of gain.py, or the compact form; of several, the later ones win",
    )
    parser.add_argument("--save", type=Path, help="write the compact form here")
    parser.add_argument("--commit", help="of the code that ran, where the machine had no git")
    parser.add_argument("--page", type=Path, default=ROOT / "docs/results.md")
    parser.add_argument("--images", type=Path, default=ROOT / "docs/images")
    parser.add_argument(
        "--start", type=Path, default=ROOT / "models/chess-tiny", help="the start's policy folder"
    )
    parser.add_argument(
        "--larger",
        type=Path,
        default=ROOT / "benchmarks/results/larger",
        help="OUT of larger_policy.py, or its compact form",
    )
    parser.add_argument("--save-larger", type=Path, help="write its compact form here")
    args = parser.parse_args()
    for folder in args.folder:
        if not folder.is_dir():
            sys.exit(f"error: {folder}: no such folder; give OUT of gain.py, or the compact form")
    results = merged([read_results(folder, args.start) for folder in args.folder])
    if args.commit:
        results = replace(results, commit=args.commit)
    if args.save:
        write_results(results, args.save)
    larger = read_results(args.larger, args.start)
    if args.save_larger:
        write_results(larger, args.save_larger)
    blocks = {name: table(results) for name, table in TABLES.items()} | {"larger": larger_table(larger)}
    drawn = learning_curves(results, args.images / CURVES)
    blocks["curves"] = f"![Learning curves of the runs](images/{CURVES})\n" if drawn else NOT_RUN
    args.page.write_text(filled(args.page.read_text(), blocks))
    for name in ("claim", "final", "controls", "ablations", "larger", "usage"):
        print(f"{name}\n{blocks[name]}")


def filled(page: str, blocks: dict[str, str]) -> str:
    """The page with each block between its marks.

    Raises:
        SystemExit: a block has no place on the page.
    """
    for name, text in blocks.items():
        marks = f"<!-- results:{name} -->", f"<!-- /results:{name} -->"
        if any(page.count(mark) != 1 for mark in marks):
            sys.exit(f"error: the page has no place {marks[0]} ... {marks[1]}, or several; put it there once")
        before, _, rest = page.partition(marks[0])
        page = f"{before}{marks[0]}\n\n{text.strip()}\n\n{marks[1]}{rest.partition(marks[1])[2]}"
    return page


if __name__ == "__main__":
    main()
