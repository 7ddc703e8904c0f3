"""What is to be reached, beside what was measured."""

from collections.abc import Iterable
from typing import Any

from result_tables import markdown

Found = tuple[float, str] | None
"""A number and the result that it is from; None: not measured."""


def aims_table(measured: dict[str, dict[str, Any]]) -> str:
    """Of each aim the best that was measured, and whether it is met."""
    chunk, minibatch = list(chunks(measured)), list(minibatches(measured))
    full = list(settings(measured, "gpu-iteration-450m"))
    tiny = list(settings(measured, "gpu-iteration-chess-tiny"))
    before = [
        (r["before"]["iteration_s"] / r["after"]["iteration_s"], name)
        for name, r in measured.items()
        if name.startswith("cpu-against-")
    ]
    rows = [
        ("chunk for 16 environments, 450 M [ms]", 30, least((r["ms"], where) for r, where in chunk)),
        ("the same, times as fast as LeRobot", -10, most((r["ratio"], where) for r, where in chunk)),
        ("minibatch of 16, 450 M [ms]", 30, least((r["ms"], where) for r, where in minibatch)),
        (
            "the same, times as fast as LeRobot encoding again",
            -5,
            most((r["ratio"], where) for r, where in minibatch),
        ),
        ("iteration, 450 M, 100 episodes, 2 epochs [s]", 10, least((s["iteration_s"], w) for s, w in full)),
        (
            "the same, times as fast as LeRobot encoding again",
            -5,
            most((s["ratio"], where) for s, where in full if "ratio" in s),
        ),
        (
            "chess-tiny: share of the simulators' rate",
            -0.8,
            most((s["share_of_simulators"], w) for s, w in tiny),
        ),
        ("chess-tiny on a CPU: times as fast as before the fast path", -2, most(before)),
    ]  # a negative aim is a least value
    table = [["aim", "to be", "found", "met", "from"]]
    for what, aim, found in rows:
        wanted = f"at most {aim:g}" if aim > 0 else f"at least {-aim:g}"
        if found is None:
            table.append([what, wanted, "not measured", "open", ""])
        else:
            value, where = found
            met = value <= aim if aim > 0 else value >= -aim
            table.append([what, wanted, f"{value:.3g}", "yes" if met else "**no**", where])
    return markdown(table)


def chunks(measured: dict[str, dict[str, Any]]) -> Iterable[tuple[dict[str, Any], str]]:
    """Whole chunks of the full size at batch 16, and the way that computed them."""
    for name in ("gpu-policy-450m", "gpu-policy-450m-ways"):
        for row in measured.get(name, {}).get("chunks", ()):
            if row["what"] == "chunk" and row["batch"] == 16:
                yield row, f"{name}, {row['mode']}"


def minibatches(measured: dict[str, dict[str, Any]]) -> Iterable[tuple[dict[str, Any], str]]:
    """flowrl's minibatches of the full size."""
    for name in ("gpu-policy-450m", "gpu-policy-450m-ways"):
        for row in measured.get(name, {}).get("updates", ()):
            if row["what"].startswith("minibatch, flowrl"):
                yield row, f"{name}, {row['mode']}: {row['what'].removeprefix('minibatch, ')}"


def settings(measured: dict[str, dict[str, Any]], start: str) -> Iterable[tuple[dict[str, Any], str]]:
    """Iterations of the results whose names begin so."""
    for name, result in measured.items():
        if name.startswith(start):
            for setting in result["settings"]:
                decisions = setting["best"]["update"]["decisions"]
                yield setting, f"{name}, {setting['envs']} environments, {decisions} decisions"


def least(found: Iterable[tuple[float, str]]) -> Found:
    return min(found, default=None)


def most(found: Iterable[tuple[float, str]]) -> Found:
    return max(found, default=None)
