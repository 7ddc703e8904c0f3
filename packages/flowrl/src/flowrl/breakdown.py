"""Where the probability ratios of an update move: by denoising step, place in the chunk, and joint. Sums stay on the device."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

Values = dict[str, list[float | None]]
_AXES = {"step": (1, 2), "position": (0, 2), "joint": (0, 1)}
"""Name -> the axes of (K, F, A) that are summed over. A position is a target of the chunk, or a cosine mode."""


def element_sums(log_ratios: Tensor, clipped: Tensor, mask: Tensor) -> Tensor:
    """Sums over the decisions of a batch, for each element: count, log r, (log r)^2, (r - 1) - log r, clipped.

    Args:
        log_ratios: (B, K, F, A), one for each element.
        clipped: 1 where the unit that the element belongs to is outside the clip range; (B,), (B, K) or (B, K, F, A).
        mask: Broadcasts to (B, K, F, A); 1 for the elements that count.

    Returns:
        (5, K, F, A) float32.
    """
    clipped = clipped.view(*clipped.shape, *[1] * (log_ratios.dim() - clipped.dim()))
    mask = mask.expand_as(log_ratios)
    kl = (log_ratios.exp() - 1) - log_ratios
    values = [torch.ones_like(log_ratios), log_ratios, log_ratios.square(), kl, clipped]
    return torch.stack([(value * mask).sum(0) for value in values])


@dataclass(frozen=True)
class Breakdown:
    """Spread, KL and clipping of the ratios along each axis of an element.

    Attributes:
        ratio_std: Standard deviation of log r over all elements.
        by_step, by_position, by_joint: Lists of length K, F and A under the names `kl` and `ratio_std` (of the last epoch,
            as the scalar `kl`) and `clip_fraction` (of all epochs); None for targets that were never executed.
    """

    ratio_std: float | None
    by_step: Values
    by_position: Values
    by_joint: Values


def break_down(epochs: Sequence[Tensor]) -> Breakdown:
    """The sums of each epoch, (5, K, F, A), as means along the axes; one transfer from the device."""
    sums = torch.stack(list(epochs)).double().cpu().numpy()
    last, whole = sums[-1], sums.sum(axis=0)
    values = {}
    for name, axes in _AXES.items():
        along = tuple(axis + 1 for axis in axes)
        count, log_ratio, square, kl, _ = last.sum(axis=along)
        all_count, *_, clipped = whole.sum(axis=along)
        values[f"by_{name}"] = {
            "kl": _divide(kl, count),
            "ratio_std": _divide(*_std(count, log_ratio, square)),
            "clip_fraction": _divide(clipped, all_count),
        }
    count, log_ratio, square, _, _ = last.sum(axis=(1, 2, 3))
    return Breakdown(_divide(*_std(np.array([count]), log_ratio, square))[0], **values)


def _std(count: np.ndarray, total: np.ndarray, square: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Numerator and denominator (the count) of a standard deviation from sums."""
    known = np.maximum(count, 1)
    variance = np.maximum(square / known - (total / known) ** 2, 0)
    return np.sqrt(variance) * count, count


def _divide(total: np.ndarray, count: np.ndarray) -> list[float | None]:
    """Means, rounded to four digits for the log; None where nothing was counted."""
    return [float(f"{a / n:.4g}") if n > 0 else None for a, n in zip(total, count)]
