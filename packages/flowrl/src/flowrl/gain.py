"""What training has changed since its start: paired over the validation's scenes, and told when it is a collapse."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from flowrl.metrics import Z_95, paired_difference, paired_mean_difference
from flowrl.validate import reports_success

COLLAPSE_P = 0.01
"""A fall that chance alone would bring this rarely is a collapse; runs validate often, so 5 % would be a false alarm a run."""
Z_99 = 2.5758293035489004  # two-sided 99 % quantile of the normal distribution
GAIN_FIELDS = ("val_gain", "val_gain_low", "val_gain_high", "val_collapse")


@dataclass(frozen=True)
class Validation:
    """One validation's result on each scene, in order: `success` where it is reported, and `returns`."""

    success: Sequence[bool] | None
    returns: Sequence[float]

    @classmethod
    def of(cls, records: Sequence[Mapping[str, Any]]) -> Self:
        """From the episodes' records."""
        success = [bool(r["success"]) for r in records] if reports_success(records) else None
        return cls(success, [float(record["return"]) for record in records])

    def tensors(self) -> dict[str, Tensor]:
        """For a checkpoint: `return`, float64 (N,), and `success`, bool (N,), where it is reported."""
        stored = {"return": torch.tensor(self.returns, dtype=torch.float64)}
        return stored if self.success is None else stored | {"success": torch.tensor(self.success)}

    @classmethod
    def restore(cls, stored: Mapping[str, Tensor]) -> Self | None:
        """What `tensors` stored; None where there is nothing, as in checkpoints of an earlier flowrl."""
        if "return" not in stored:
            return None
        return cls(stored["success"].tolist() if "success" in stored else None, stored["return"].tolist())


def gain(start: Validation, now: Validation) -> dict[str, Any]:
    """The log's `GAIN_FIELDS`: mean difference to the start on the same scenes, its 95 % interval, and whether it collapsed.

    Success is compared where it is reported (a collapse: fewer, with McNemar's p < .01), else returns (the difference's 99 %
    interval is below 0). The interval is null for a single scene's return.
    """
    interval: tuple[float, float] | None
    if start.success is not None and now.success is not None:
        compared = paired_difference(start.success, now.success)
        difference, interval = compared.paired_difference, compared.ci95
        collapse = difference < 0 and compared.mcnemar_p < COLLAPSE_P
    else:
        difference, interval = paired_mean_difference(start.returns, now.returns)
        half = (interval[1] - difference) * Z_99 / Z_95 if interval is not None else float("inf")
        collapse = difference + half < 0
    low, high = interval if interval is not None else (None, None)
    return dict(zip(GAIN_FIELDS, (difference, low, high, collapse)))


def describe_gain(line: Mapping[str, Any]) -> str:
    """A log line's gain in words, "-8.3 points against the start (-20.1 to +3.4)"; empty where there is none."""
    if line.get("val_gain") is None:
        return ""
    low, high = line["val_gain_low"], line["val_gain_high"]
    if line["val_success"] is None:
        interval = "" if low is None else f" ({low:+.3g} to {high:+.3g})"
        return f"{line['val_gain']:+.3g} against the start{interval}"
    return f"{100 * line['val_gain']:+.1f} points against the start ({100 * low:+.1f} to {100 * high:+.1f})"


def describe_collapse(line: Mapping[str, Any], out: Path, best_iteration: int) -> str:
    """One line for a validation that has collapsed: by how much, where the best policy is, and what usually helps."""
    what = "return" if line["val_success"] is None else "success"
    return (
        f"warning: validation {what} has collapsed, {describe_gain(line)}; the run goes on. {out / 'best'} holds iteration "
        f"{best_iteration}. Usual remedies: a lower --lr or --kl-adapt, smaller noise (--sigma-start, --sigma-end), "
        "more --episodes"
    )
