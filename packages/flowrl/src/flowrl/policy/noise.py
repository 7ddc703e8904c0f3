"""Exploration noise with a known density, added to the result of every denoising step."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn

from flowrl.errors import FlowRLError
from flowrl.flow.schedule import denoising_times, flow_sde_schedule, geometric_schedule
from flowrl.policy.interface import FlowPolicy, FlowSpec
from flowrl.policy.noise_sizes import FixedSizes, HeadSizes, LearnedSizes, NoiseSizes
from flowrl.prefix import Prefix

NoiseBasis = Literal["white", "dct"]
NoiseKind = Literal["geometric", "head", "flow-sde"]
_HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)


class NoiseModel(nn.Module):
    """Gaussian noise of size sigma_k in a basis over the chunk's time.

    x_{k+1} = mean_k + B^T (sigma_k * eps), eps ~ N(0, 1) of shape (F, A), where the F rows of B are orthonormal vectors
    over the T targets of the chunk. The density is that of B (x_{k+1} - mean_k) ~ N(0, sigma_k^2), one independent
    Gaussian per element (row, joint). Only the A action dimensions of the environment get noise and are scored.

    - `white`: B is the identity, F = T, every target on its own.
    - `dct`: B holds the F lowest vectors of the orthonormal DCT-II, smooth deviations that an arm can follow. With
      F < T the noise spans a subspace; the likelihood is the density inside it.

    Kinds:

    - `geometric`: sigma_k falls in a constant ratio from `sigma_start` to `sigma_end`, and mean_k = x_k + dt v_k. With
      `learn_sigma` sigma is trained per step and joint, starts exactly there, and stays within [0.5 * min, 1.5 * max] of
      the two ends. Source: Black et al. 2024, "Training diffusion models with reinforcement learning" (DDPO), for
      the chain as a decision process; the schedule is ours.
    - `head`: the same bounds and start, but sigma_k(o) is read from the observation by a small network.
      Source: Zhang et al. 2025, "ReinFlow"; see `HeadSizes`.
    - `flow-sde`: the flow's reverse-time SDE, whose states have the marginals of the noise-free flow as dt -> 0:
      mean_k = x_k + dt (v_k + s_k^2 / (2 t_k) (x_k + (1 - t_k) v_k)), sigma_k = s_k sqrt(|dt|), s_k = a sqrt(t_k / (1 - t_k)).
      -(x + (1 - t) v) / t is the score of a flow between data (t = 0) and standard normal noise (t = 1). In a cosine basis the
      noise is B^T B dw, and the score's term is projected by the same B^T B, which keeps the marginals too.
      Source: Liu et al. 2025, "Flow-GRPO: Training flow matching models via online RL", eq. 9; used for robots by
      Chen et al. 2025, "pi_RL: Online RL fine-tuning for flow-based vision-language-action models" (Flow-SDE).

    Values are log *densities*: they are positive where sigma is small.

    Args:
        spec: Sizes of the policy.
        kind: "geometric", "head" or "flow-sde".
        sigma_start: Noise of the first step, normalized action units, > 0; not for "flow-sde".
        sigma_end: Noise of the last step, > 0; not for "flow-sde".
        basis: "white" or "dct".
        num_modes: Number of cosine modes F for "dct", 1..T (all T by default); not allowed for "white".
        learn_sigma: Whether the noise sizes are trained per step and joint; only for "geometric".
        flow_sde_level: a, in (0, 1]; only for "flow-sde".
        num_features: Width of the prefix features; for "head", which needs it.

    Raises:
        FlowRLError: On a value out of range, or arguments that do not go together.
    """

    basis_rows: Tensor
    drift_scale: Tensor
    times: Tensor

    def __init__(
        self,
        spec: FlowSpec,
        *,
        kind: NoiseKind = "geometric",
        sigma_start: float = 0.2,
        sigma_end: float = 0.002,
        basis: NoiseBasis = "white",
        num_modes: int | None = None,
        learn_sigma: bool = False,
        flow_sde_level: float = 0.5,
        num_features: int | None = None,
    ) -> None:
        super().__init__()
        _check(spec, kind, sigma_start, sigma_end, basis, num_modes, learn_sigma, flow_sde_level)
        self.spec = spec
        self.kind: NoiseKind = kind
        self.sigma_start, self.sigma_end = float(sigma_start), float(sigma_end)
        self.basis: NoiseBasis = basis
        self.num_elements = num_modes or spec.chunk_size
        self.learn_sigma = learn_sigma
        self.flow_sde_level = float(flow_sde_level)
        self.num_features = num_features

        num_steps = spec.num_denoising_steps
        if kind == "flow-sde":
            schedule = flow_sde_schedule(flow_sde_level, num_steps)
        else:
            schedule = geometric_schedule(sigma_start, sigma_end, num_steps)
        self.sizes: NoiseSizes
        if kind == "head":
            if num_features is None:
                raise FlowRLError("a noise head needs the width of the policy's prefix features")
            self.sizes = HeadSizes(schedule, spec.action_dim, num_features)
        else:
            self.sizes = LearnedSizes(schedule, spec.action_dim) if learn_sigma else FixedSizes(schedule)

        _, times = denoising_times(num_steps)
        drift = [sigma**2 / (2 * time) for sigma, time in zip(schedule, times)]  # s^2 |dt| / (2 t)
        rows = _dct_rows(self.num_elements, spec.chunk_size) if basis == "dct" else torch.zeros(0, 0)
        self.register_buffer("times", torch.tensor(times)[:, None, None], persistent=False)
        self.register_buffer("drift_scale", torch.tensor(drift)[:, None, None], persistent=False)
        self.register_buffer("basis_rows", rows.float(), persistent=False)

    @property
    def trained(self) -> bool:
        """Whether the sizes are trained; otherwise the entropy is constant."""
        return any(True for _ in self.parameters())

    @property
    def needs_features(self) -> bool:
        """Whether the sizes depend on the observation."""
        return self.sizes.needs_features

    def sigma(self, features: Tensor | None = None) -> Tensor:
        """Noise sizes per denoising step: (K, 1) fixed, (K, A) learned, (B, K, A) by a head; float32, normalized units.

        Args:
            features: (B, F) prefix features; needed by a head alone.
        """
        return self.sizes(features)

    def sigma_for(self, policy: FlowPolicy, prefix: Prefix) -> Tensor:
        """`sigma` for a batch of encoded observations."""
        return self.sigma(policy.prefix_features(prefix) if self.needs_features else None)

    def mean(self, x_t: Tensor, v_t: Tensor, dt: float, step: int | None = None) -> Tensor:
        """The noise-free result of a step: x_t + dt * v_t, bit for bit the sampler without noise, but for "flow-sde".

        Args:
            x_t, v_t: (B, T, D) for one step, (B, K, T, D) for all.
            dt: Step size, -1/K.
            step: k, or None for all K steps.

        Returns:
            The shape of x_t. The dimensions above A are x_t + dt * v_t for every kind.
        """
        mean = x_t + dt * v_t
        if self.kind != "flow-sde":
            return mean
        steps = slice(None) if step is None else step
        num_scored = self.spec.action_dim
        pulled = x_t[..., :num_scored] + (1.0 - self.times[steps]) * v_t[..., :num_scored]
        if self.basis == "dct":
            pulled = self._from_elements(self._to_elements(pulled))
        scored = mean[..., :num_scored] - self.drift_scale[steps] * pulled
        return torch.cat([scored, mean[..., num_scored:]], dim=-1)

    def perturb(self, mean: Tensor, step: int, eps: Tensor, sigma: Tensor | None = None) -> Tensor:
        """Next state of the chain.

        Args:
            mean: (B, T, D), the noise-free result of denoising step `step`.
            step: k, 0..K-1.
            eps: (B, F, A), standard normal.
            sigma: What `sigma` returned; None computes it, without an observation.

        Returns:
            (B, T, D). The dimensions above A are those of `mean`, bit for bit.
        """
        noise = self._of_step(sigma, step) * eps
        if self.basis == "dct":
            noise = self._from_elements(noise)
        num_scored = self.spec.action_dim
        return torch.cat([mean[..., :num_scored] + noise, mean[..., num_scored:]], dim=-1)

    def log_prob(
        self, x_next: Tensor, mean: Tensor, step: int | None = None, sigma: Tensor | None = None
    ) -> Tensor:
        """Log density of a transition, per element: log N(B (x_next - mean); 0, sigma_k^2).

        Args:
            x_next: (B, T, D) for one step, (B, K, T, D) for all.
            mean: Same shape, what `mean` returned.
            step: k, or None for all K steps.
            sigma: What `sigma` returned; None computes it, without an observation.

        Returns:
            (B, F, A) or (B, K, F, A), float32.
        """
        num_scored = self.spec.action_dim
        delta = x_next[..., :num_scored].float() - mean[..., :num_scored].float()
        if self.basis == "dct":
            delta = self._to_elements(delta)
        size = self._of_step(sigma, step)
        return -0.5 * (delta / size).square() - size.log() - _HALF_LOG_2PI

    def settings(self) -> dict[str, object]:
        """The arguments that rebuild this model (without the learned values), those of its kind alone, as JSON values."""
        num_modes = self.num_elements if self.basis == "dct" else None
        settings: dict[str, object] = {"kind": self.kind, "basis": self.basis, "num_modes": num_modes}
        if self.kind == "flow-sde":
            return settings | {"flow_sde_level": self.flow_sde_level}
        settings |= {"sigma_start": self.sigma_start, "sigma_end": self.sigma_end}
        if self.kind == "head":
            return settings | {"num_features": self.num_features}
        return settings | {"learn_sigma": self.learn_sigma}

    def _of_step(self, sigma: Tensor | None, step: int | None) -> Tensor:
        """Sizes that broadcast to elements (B, F, A) of one step, or (B, K, F, A) of all."""
        sizes = (self.sigma() if sigma is None else sigma)[..., None, :]
        return sizes if step is None else sizes[..., step, :, :]

    # Elementwise, not matrix products: independent of TF32 and of the batch composition.

    def _to_elements(self, values: Tensor) -> Tensor:
        """B values: (..., T, A) -> (..., F, A)."""
        return (self.basis_rows[:, :, None] * values[..., None, :, :]).sum(-2)

    def _from_elements(self, elements: Tensor) -> Tensor:
        """B^T elements: (..., F, A) -> (..., T, A)."""
        return (self.basis_rows[:, :, None] * elements[..., :, None, :]).sum(-3)


def gaussian_entropy(sigma: Tensor) -> Tensor:
    """Differential entropy of each element, log sigma + 1/2 log(2 pi e) [nats]; negative where sigma is small."""
    return sigma.log() + _HALF_LOG_2PI + 0.5


def _check(
    spec: FlowSpec,
    kind: str,
    sigma_start: float,
    sigma_end: float,
    basis: str,
    num_modes: int | None,
    learn_sigma: bool,
    flow_sde_level: float,
) -> None:
    for name, value in (("sigma start", sigma_start), ("sigma end", sigma_end)):
        if not (math.isfinite(value) and value > 0):
            raise FlowRLError(f"{name} is {value}; it must be a positive number (0 has no density)")
    if kind not in ("geometric", "head", "flow-sde"):
        raise FlowRLError(f"noise kind {kind!r} is unknown; choose geometric, head or flow-sde")
    if learn_sigma and kind != "geometric":
        raise FlowRLError(f"--learn-sigma with --noise-kind {kind}; it belongs to --noise-kind geometric")
    if not 0 < flow_sde_level <= 1:
        raise FlowRLError(
            f"--flow-sde-level {flow_sde_level}: must be greater than 0 and at most 1 (papers use 0.5 to 0.7)"
        )
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
