"""The tables of docs/performance.md from what `scaling.py` and `against_commit.py` left.

    python benchmarks/performance_page.py                        # benchmarks/results/performance -> docs/performance.md

Fills the parts of the page between `<!-- results:NAME -->` and `<!-- /results:NAME -->`; the rest is written by hand. A part
that was not measured is named in its table.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from performance_aims import aims_table
from result_tables import markdown
from results import filled

ROOT = Path(__file__).parents[1]
BATCH = 16
DEGREES = "difference_deg", "lerobot_batch_deg", "lerobot_to_float32_deg", "to_float32_deg"
Measured = dict[str, dict[str, Any]]
"""Name of the file without its ending -> its content."""
Row = list[str]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, nargs="?", default=ROOT / "benchmarks/results/performance")
    parser.add_argument("--page", type=Path, default=ROOT / "docs/performance.md")
    args = parser.parse_args()
    if not args.folder.is_dir():
        sys.exit(f"error: {args.folder}: no such folder; give --out of scaling.py")
    args.page.write_text(filled(args.page.read_text(), blocks(read(args.folder))))


def read(folder: Path) -> Measured:
    return {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}


def blocks(measured: Measured) -> dict[str, str]:
    """Each part of the page."""
    iterations = [
        "iteration-chess-tiny",
        *(f"iteration-chess-tiny-{part}" for part in ("many-envs", "few-envs")),
    ]
    return {
        "aims": aims_table(measured),
        "chunk-450m": table(measured, chunk_rows, ["gpu-policy-450m", "gpu-policy-450m-ways"]),
        "update-450m": table(measured, update_rows, ["gpu-policy-450m", "gpu-policy-450m-ways"]),
        "chunk-chess-tiny": table(measured, chunk_rows, ["gpu-policy-chess-tiny"]),
        "update-chess-tiny": table(measured, update_rows, ["gpu-policy-chess-tiny"]),
        "sizes": table(
            measured, scale_rows, [f"gpu-policy-{size}" for size in ("chess-tiny", "8m", "30m", "450m")]
        ),
        "lengths": table(
            measured, scale_rows, ["gpu-policy-450m-chunk25", "gpu-policy-450m", "gpu-policy-450m-chunk100"]
        ),
        "iteration-450m": iteration_tables(
            measured, [f"gpu-iteration-450m{part}" for part in ("", "-fast", "-fast-short")]
        ),
        "environments": table(measured, setting_rows, [f"gpu-{name}" for name in iterations]),
        "episodes": table(
            measured, setting_rows, ["gpu-iteration-chess-tiny", "gpu-iteration-chess-tiny-episodes"]
        ),
        "parts-chess-tiny": table(measured, part_rows, ["gpu-iteration-chess-tiny"]),
        "cpu-chunk": table(measured, chunk_rows, ["cpu-policy-chess-tiny"]),
        "cpu-update": table(measured, update_rows, ["cpu-policy-chess-tiny"]),
        "cpu-iteration": iteration_tables(
            measured, ["cpu-iteration-chess-tiny", "cpu-iteration-chess-tiny-envs"]
        ),
        "cpu-before": before_table(measured),
        "sources": sources_table(measured),
    }


def table(
    measured: Measured, rows: Callable[[str, dict[str, Any]], Iterable[Row]], names: Sequence[str]
) -> str:
    """One table of several results; `rows` gives those of one, its head first."""
    found = [list(rows(name, measured[name])) for name in names if name in measured]
    text = markdown([found[0][0], *(row for part in found for row in part[1:])]) if found else ""
    missing = [name for name in names if name not in measured]
    for name in names:
        if left_out := measured.get(name, {}).get("left_out"):
            text += f"\nOf {name} is left out: {left_out}.\n"
    return text + (f"\nNot measured: {', '.join(missing)}.\n" if missing else "")


def chunk_rows(name: str, result: dict[str, Any]) -> Iterable[Row]:
    """Chunks by batch and way, with their two parts."""
    yield [
        *("batch", "way", "LeRobot [ms]", "flowrl [ms]", "ratio", "encoding [ms]", "denoising [ms]"),
        *(
            "floor [ms]",
            "share of the floor",
            "largest difference [deg]",
            "LeRobot's own [deg]",
            "LeRobot's to a float32 VLM [deg]",
            "flowrl's to it [deg]",
            "first call [s]",
        ),
    ]
    rows = {(row["what"], row["batch"], row["mode"]): row for row in result["chunks"]}
    for (what, batch, mode), row in sorted(rows.items(), key=lambda item: (item[0][2], item[0][1])):
        if what == "chunk":
            parts = [digits(rows.get((part, batch, mode), {}).get("ms")) for part in ("prefix", "denoising")]
            degrees = [digits(row.get(name)) for name in DEGREES]
            yield [
                str(batch),
                mode,
                *compared(row),
                *parts,
                *floor(row),
                *degrees,
                seconds(row.get("first_s")),
            ]


def update_rows(name: str, result: dict[str, Any]) -> Iterable[Row]:
    """Forward and backward passes of a minibatch."""
    yield [
        "minibatch",
        "way",
        "what",
        "[ms]",
        "ratio",
        "floor [ms]",
        "share of the floor",
        "cosine of the gradients",
    ]
    for row in result["updates"]:
        what = row["what"].removeprefix("minibatch, ").replace("lerobot", "LeRobot, encoding again")
        cosine = "" if row.get("cosine") is None else f"{row['cosine']:.6f}"
        yield [
            str(row["batch"]),
            row["mode"],
            what,
            digits(row["ms"]),
            times(row["ratio"]),
            *floor(row),
            cosine,
        ]


def scale_rows(name: str, result: dict[str, Any]) -> Iterable[Row]:
    """A policy's chunk for 16 environments and its minibatch: how cost grows with its size, or with the chunk's length."""
    yield [
        *("policy", "parameters", "way", f"chunk, batch {BATCH}: LeRobot [ms]", "flowrl [ms]", "ratio"),
        *("minibatch: LeRobot [ms]", "flowrl [ms]", "ratio"),
    ]
    chunk = next((r for r in result["chunks"] if r["what"] == "chunk" and r["batch"] == BATCH), None)
    updates = {row["what"].removeprefix("minibatch, "): row for row in reversed(result["updates"])}
    eager, own = updates.get("lerobot"), updates.get("flowrl")
    yield [
        *(
            name.partition("policy-")[2],
            f"{result['parameters'] / 1e6:.1f} M",
            chunk["mode"] if chunk else "",
        ),
        *(compared(chunk) if chunk else ["", "", ""]),
        *([digits(eager["ms"]), digits(own["ms"]), times(own["ratio"])] if eager and own else [""] * 3),
    ]


def iteration_tables(measured: Measured, names: Sequence[str]) -> str:
    """Whole iterations, and below where their time goes."""
    return (
        table(measured, setting_rows, names)
        + "\n"
        + table(measured, part_rows, [n for n in names if n in measured])
    )


def setting_rows(name: str, result: dict[str, Any]) -> Iterable[Row]:
    """Iterations by environments and episodes."""
    yield [
        *(
            "way",
            "environments",
            "episodes",
            "decisions",
            "collecting [s]",
            "decisions/s",
            "share of the simulators'",
        ),
        *("update [s]", "iteration [s]", "in LeRobot's operations [s]", "ratio"),
    ]
    for setting in sorted(result["settings"], key=lambda s: (s["envs"], s["episodes"])):
        collected, update_s = fastest(setting), setting["best"]["update"]["wall_s"]
        eager_s = setting.get("eager_iteration_s")
        yield [
            *(way_of(result), str(setting["envs"]), str(setting["episodes"]), str(collected["decisions"])),
            *(seconds(collected["wall_s"]), f"{collected['decisions_per_s']:.0f}"),
            *(
                f"{100 * setting['share_of_simulators']:.0f} %",
                seconds(update_s),
                seconds(setting["iteration_s"]),
            ),
            *("" if eager_s is None else seconds(eager_s), times(setting.get("ratio"))),
        ]


def part_rows(name: str, result: dict[str, Any]) -> Iterable[Row]:
    """Where an iteration's time goes on the trainer's clock, and what the environments' processes do meanwhile."""
    parts = list(result["settings"][0]["parts_s"]) if result["settings"] else []
    yield [
        *("way", "environments", "episodes", *(f"{part} [s]" for part in parts)),
        *("GPU: encoding [s]", "GPU: denoising [s]", "simulators' cores busy", "of that pictures"),
    ]
    for setting in result["settings"]:
        collected = fastest(setting)
        busy = collected["workers_cpu_s"] / (result["cores"] * collected["wall_s"])
        pictures = setting.get("pictures_cpu_s")
        share = "" if pictures is None else f"{100 * pictures / collected['workers_cpu_s']:.0f} %"
        gpu = [seconds(collected.get(f"gpu_{part}_s")) for part in ("encode", "denoise")]
        cells = [seconds(value) for value in setting["parts_s"].values()]
        yield [
            way_of(result),
            str(setting["envs"]),
            str(setting["episodes"]),
            *cells,
            *gpu,
            f"{100 * busy:.0f} %",
            share,
        ]


def before_table(measured: Measured) -> str:
    """Iterations of two commits in turn."""
    rows = [
        [
            "before",
            "now",
            "decisions",
            "collecting [s]",
            "update [s]",
            "iteration [s]",
            "times as fast",
            "the same episodes",
        ]
    ]
    for result in (r for name, r in measured.items() if name.startswith("cpu-against-")):
        old, new = result["before"], result["after"]
        cells = [
            f"{seconds(old[key])} -> {seconds(new[key])}" for key in ("rollout_s", "update_s", "iteration_s")
        ]
        same = "yes" if result["same_episodes"] else "no"
        commits = old["commit"][:7], new["commit"][:7]
        rows.append(
            [*commits, result["after_flags"], str(new["decisions"]), *cells, times(result["ratio"]), same]
        )
    return (
        markdown(rows)
        if len(rows) > 1
        else "Not measured: cpu-against-*, from benchmarks/against_commit.py.\n"
    )


def sources_table(measured: Measured) -> str:
    """Machine, commit and command of every result."""
    rows = [["result", "machine", "cores", "commit", "command"]]
    for name, result in measured.items():
        commit, _, changes = (result.get("commit") or "unknown").partition("+")
        cores = str(result.get("cores", result.get("cpus", "")))
        command = f"`{result['command']}`" if "command" in result else "unknown"
        place = f"{commit[:7]}+{changes}" if changes else commit[:7]
        rows.append([name, result.get("device_name", ""), cores, place, command])
    return markdown(rows) if len(rows) > 1 else "Nothing is measured yet.\n"


def fastest(setting: dict[str, Any]) -> dict[str, Any]:
    """The fastest way of collecting, by number of groups."""
    collects = [result for name, result in setting["best"].items() if name.startswith("collect ")]
    return min(collects, key=lambda result: result["wall_s"])


def way_of(result: dict[str, Any]) -> str:
    """How velocity and update were computed."""
    compiled = ", compiled" if result["compiled"] else ""
    return f"{result['velocity']}{compiled}, update {result['update_precision']}"


def compared(row: dict[str, Any]) -> Row:
    return [digits(row["lerobot_ms"]), digits(row["ms"]), times(row["ratio"])]


def floor(row: dict[str, Any]) -> Row:
    """The floor, and how much of it is reached."""
    found = row.get("floor_ms")
    return ["", ""] if found is None else [digits(found), f"{100 * found / row['ms']:.0f} %"]


def digits(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}" if value < 100 else f"{value:.0f}"


def times(value: float | None) -> str:
    return "" if value is None else f"{value:.2g}x" if value < 10 else f"{value:.0f}x"


if __name__ == "__main__":
    main()
