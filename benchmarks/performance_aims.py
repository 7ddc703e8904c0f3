"""What is to be reached, beside what was measured."""

from collections.abc import Iterable
from typing import Any

from result_tables import markdown

Found = tuple[dict[str, Any], str] | None
"""A row or an iteration, and the result that it is from; None: not measured."""
MOST, LEAST = "at most", "at least"


def aims_table(measured: dict[str, dict[str, Any]]) -> str:
    """Of each aim what the fastest way reached, and whether that meets it; accuracy is that of the same way."""
    chunk = min(chunks(measured), key=lambda found: found[0]["ms"], default=None)
    minibatch = min(minibatches(measured), key=lambda found: found[0]["ms"], default=None)
    full = min(
        settings(measured, "gpu-iteration-450m"), key=lambda found: found[0]["iteration_s"], default=None
    )
    against = max(
        (found for found in settings(measured, "gpu-iteration-450m") if "ratio" in found[0]),
        key=lambda found: found[0]["ratio"],
        default=None,
    )
    tiny = max(
        settings(measured, "gpu-iteration-chess-tiny"),
        key=lambda found: found[0]["share_of_simulators"],
        default=None,
    )
    before = max(
        ((result, name) for name, result in measured.items() if name.startswith("cpu-against-")),
        key=lambda found: found[0]["ratio"],
        default=None,
    )
    rows = [
        ["aim", "to be", "found", "met", "from"],
        aim("chunk for 16 environments, 450 M [ms]", MOST, 30, chunk, "ms"),
        aim("the same, times as fast as LeRobot", LEAST, 10, chunk, "ratio"),
        aim("the same, largest difference to LeRobot's targets [deg]", MOST, 0.01, chunk, "difference_deg"),
        aim("minibatch of 16, 450 M [ms]", MOST, 30, minibatch, "ms"),
        aim("the same, times as fast as LeRobot encoding again", LEAST, 5, minibatch, "ratio"),
        aim("the same, cosine of the gradients", LEAST, 0.9999, minibatch, "cosine"),
        aim("iteration, 450 M, 100 episodes, 2 epochs [s]", MOST, 10, full, "iteration_s"),
        aim("iteration, 450 M, times as fast as in LeRobot's operations", LEAST, 5, against, "ratio"),
        aim("chess-tiny: share of the simulators' rate", LEAST, 0.8, tiny, "share_of_simulators"),
        aim("chess-tiny on a CPU: times as fast as before the fast path", LEAST, 2, before, "ratio"),
    ]
    return markdown(rows)


def aim(what: str, limit: str, value: float, found: Found, name: str) -> list[str]:
    """One row of the table."""
    wanted = f"{limit} {value:g}"
    if found is None:
        return [what, wanted, "not measured", "open", ""]
    result, where = found
    reached = result[name]
    met = reached <= value if limit == MOST else reached >= value
    return [
        what,
        wanted,
        f"{reached:.6f}" if name == "cosine" else f"{reached:.3g}",
        "yes" if met else "**no**",
        where,
    ]


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
