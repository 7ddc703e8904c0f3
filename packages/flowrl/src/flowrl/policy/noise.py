"""Exploration noise with a known density, added to the result of every denoising step."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn

from flowrl.errors import FlowRLError
from flowrl.flow.schedule import geometric_schedule
from flowrl.policy.interface import FlowSpec

NoiseBasis = Literal["white", "dct"]
_HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)


class NoiseModel(nn.Module):
    """Gaussian noise of size sigma_k in a basis over the chunk's time.

    x_{k+1} = mean_k + B^T (sigma_k * eps), eps ~ N(0, 1) of shape (F, A), where the F rows of B are orthonormal vectors
    over the T targets of the chunk. The density is that of B (x_{k+1} - mean_k) ~ N(0, sigma_k^2), one independent
    Gaussian per element (row, joint). Only the A action dimensions of the environment get noise and are scored.

    - `white`: B is the identity, F = T, every target on its own.
    - `dct`: B holds the F lowest vectors of the orthonormal DCT-II, smooth deviations that an arm can follow. With
      F < T the noise spans a subspace; the likelihood is the density inside it.

    The noise sizes fall geometrically from `sigma_start` to `sigma_end`. With `learn_sigma` they are trained per step and
    joint, start exactly there, and stay within [0.5 * min, 1.5 * max] of the two ends by a sigmoid in log sigma (the
    gradient vanishes towards the bounds, nothing is clamped).

    Values are log *densities*: they are positive where sigma is small.

    Args:
        spec: Sizes of the policy.
        sigma_start: Noise of the first step, normalized action units, > 0.
        sigma_end: Noise of the last step, > 0.
        basis: "white" or "dct".
        num_modes: Number of cosine modes F for "dct", 1..T (all T by default); not allowed for "white".
        learn_sigma: Whether the noise sizes are trained.

    Raises:
        FlowRLError: On a value out of range.
    """

    basis_rows: Tensor
    schedule: Tensor
    start_position: Tensor

    def __init__(
        self,
        spec: FlowSpec,
        *,
        sigma_start: float = 0.2,
        sigma_end: float = 0.002,
        basis: NoiseBasis = "white",
        num_modes: int | None = None,
        learn_sigma: bool = False,
    ) -> None:
        super().__init__()
        for name, value in (("sigma start", sigma_start), ("sigma end", sigma_end)):
            if not (math.isfinite(value) and value > 0):
                raise FlowRLError(f"{name} is {value}; it must be a positive number (0 has no density)")
        if basis not in ("white", "dct"):
            raise FlowRLError(f"noise basis {basis!r} is unknown; choose white or dct")
        if basis == "white" and num_modes is not None:
            raise FlowRLError(
                f"{num_modes} noise modes given for the white basis; modes belong to --noise-basis dct"
            )
        if num_modes is not None and not 1 <= num_modes <= spec.chunk_size:
            raise FlowRLError(
                f"{num_modes} noise modes; a chunk of {spec.chunk_size} targets has 1 to {spec.chunk_size}"
            )
        self.spec = spec
        self.sigma_start, self.sigma_end = float(sigma_start), float(sigma_end)
        self.basis: NoiseBasis = basis
        self.num_elements = num_modes or spec.chunk_size
        self.learn_sigma = learn_sigma
        self.sigma_min = 0.5 * min(sigma_start, sigma_end)
        self.sigma_max = 1.5 * max(sigma_start, sigma_end)

        sizes = torch.tensor(
            geometric_schedule(sigma_start, sigma_end, spec.num_denoising_steps), dtype=torch.float64
        )[:, None]
        position = (sizes / self.sigma_min).log() / math.log(self.sigma_max / self.sigma_min)
        rows = _dct_rows(self.num_elements, spec.chunk_size) if basis == "dct" else torch.zeros(0, 0)
        self.register_buffer("schedule", sizes.float(), persistent=False)
        self.register_buffer("start_position", position.logit().float(), persistent=False)
        self.register_buffer("basis_rows", rows.float(), persistent=False)
        if learn_sigma:
            self.raw_sigma = nn.Parameter(torch.zeros(spec.num_denoising_steps, spec.action_dim))

    def sigma(self) -> Tensor:
        """Noise sizes per denoising step: (K, 1) fixed or (K, A) learned, float32, normalized action units."""
        if not self.learn_sigma:
            return self.schedule
        # Both sigmoids in one shape, so that they round alike and the start is exactly the schedule.
        start = self.start_position.expand_as(self.raw_sigma).contiguous()
        shift = torch.sigmoid(start + self.raw_sigma) - torch.sigmoid(start)
        return self.schedule * torch.exp(math.log(self.sigma_max / self.sigma_min) * shift)

    def perturb(self, mean: Tensor, step: int, eps: Tensor) -> Tensor:
        """Next state of the chain.

        Args:
            mean: (B, T, D), the noise-free result of denoising step `step`.
            step: k, 0..K-1.
            eps: (B, F, A), standard normal.

        Returns:
            (B, T, D). The dimensions above A are those of `mean`, bit for bit.
        """
        noise = self.sigma()[step] * eps
        if self.basis == "dct":
            # Elementwise, not a matrix product: independent of TF32 and of the batch composition.
            noise = (self.basis_rows[:, :, None] * noise[..., :, None, :]).sum(-3)
        num_scored = self.spec.action_dim
        return torch.cat([mean[..., :num_scored] + noise, mean[..., num_scored:]], dim=-1)

    def log_prob(self, x_next: Tensor, mean: Tensor, step: int | None = None) -> Tensor:
        """Log density of a transition, per element: log N(B (x_next - mean); 0, sigma_k^2).

        Args:
            x_next: (B, T, D) for one step, (B, K, T, D) for all.
            mean: Same shape, x_k + dt * v(x_k).
            step: k, or None for all K steps.

        Returns:
            (B, F, A) or (B, K, F, A), float32.
        """
        num_scored = self.spec.action_dim
        delta = x_next[..., :num_scored].float() - mean[..., :num_scored].float()
        if self.basis == "dct":
            delta = (self.basis_rows[:, :, None] * delta[..., None, :, :]).sum(-2)
        sigma = self.sigma()[:, None, :] if step is None else self.sigma()[step]
        return -0.5 * (delta / sigma).square() - sigma.log() - _HALF_LOG_2PI

    def settings(self) -> dict[str, object]:
        """The arguments that rebuild this model (without the learned values), as JSON values."""
        return {
            "sigma_start": self.sigma_start,
            "sigma_end": self.sigma_end,
            "basis": self.basis,
            "num_modes": self.num_elements if self.basis == "dct" else None,
            "learn_sigma": self.learn_sigma,
        }


def _dct_rows(num_modes: int, chunk_size: int) -> Tensor:
    """The lowest rows of the orthonormal DCT-II, (num_modes, chunk_size) float64.

    Row f is sqrt(2/T) cos(pi (t + 1/2) f / T), and sqrt(1/T) for f = 0.
    """
    time = torch.arange(chunk_size, dtype=torch.float64)
    mode = torch.arange(num_modes, dtype=torch.float64)
    rows = torch.cos(math.pi * (time[None, :] + 0.5) * mode[:, None] / chunk_size) * math.sqrt(
        2.0 / chunk_size
    )
    rows[0] = math.sqrt(1.0 / chunk_size)
    return rows
