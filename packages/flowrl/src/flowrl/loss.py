"""PPO's loss on denoising chains, as pure functions.

Every scored element of a chain has its own clipped ratio, as tokens do in language-model PPO: at the small noise of the
last steps the probability of a whole step moves by hundreds of nats after one small update.
Source: Schulman et al. 2017, "Proximal policy optimization algorithms", eq. 7; KL estimate: Schulman 2020, "k3".
"""

import torch
from torch import Tensor

from flowrl.policy.noise import NoiseModel

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to +- this, so that exp stays finite; such ratios are far outside the clip range."""


def executed_mask(num_executed: Tensor, noise: NoiseModel) -> Tensor:
    """1 for the elements that count, (B, 1, F, 1) float32.

    In the white basis an element is one target of the chunk, and targets that never ran (the episode ended inside the
    chunk) do not count. A cosine mode spans the whole chunk and always counts.
    """
    if noise.basis != "white":
        return torch.ones(len(num_executed), 1, noise.num_elements, 1, device=num_executed.device)
    targets = torch.arange(noise.num_elements, device=num_executed.device)
    return (targets < num_executed[:, None]).float()[:, None, :, None]


def log_ratio(new: Tensor, old: Tensor, mask: Tensor, unit: str) -> Tensor:
    """Log of the probability ratio per unit, clamped to +-20: (B, K, F, A) for element, (B, K) for step, (B,) for chunk."""
    difference = new - old
    if unit == "step":
        difference = (difference * mask).sum(dim=(2, 3))
    elif unit == "chunk":
        difference = (difference * mask).sum(dim=(1, 2, 3))
    return difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean of the values whose mask is 1 (broadcast); 0 when there is none."""
    mask = mask.expand_as(values)
    return (values * mask).sum() / mask.sum().clamp(min=1.0)


def clipped_loss(log_ratios: Tensor, advantages: Tensor, mask: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """-min(r A, clip(r, 1 - c, 1 + c) A), averaged over the units that count, and the fraction of ratios outside the clip.

    Args:
        log_ratios: (B, ...), one per unit.
        advantages: (B,), normalized.
        mask: Broadcasts to `log_ratios`.
        clip: c.
    """
    ratio = log_ratios.exp()
    advantage = advantages.view(-1, *[1] * (log_ratios.dim() - 1))
    objective = torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)
    return -masked_mean(objective, mask), masked_mean(outside_clip(log_ratios, clip), mask)


def outside_clip(log_ratios: Tensor, clip: float) -> Tensor:
    """1 for the units whose ratio is outside [1 - clip, 1 + clip], float32, of the same shape."""
    return ((log_ratios.detach().exp() - 1).abs() > clip).float()


def approx_kl(new: Tensor, old: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Estimates of KL(old || new) by (r - 1) - log r: the mean over elements, and the sum over a decision's elements, averaged."""
    log_ratios = log_ratio(new.detach(), old, mask, "element")
    kl = (log_ratios.exp() - 1) - log_ratios
    return masked_mean(kl, mask), (kl * mask).sum(dim=(1, 2, 3)).mean()
