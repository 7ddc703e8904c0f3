"""The value function."""

from __future__ import annotations

from torch import Tensor, nn


class Critic(nn.Module):
    """Return expected from an observation, read from the policy's prefix features.

    Args:
        num_features: F, width of the features.
        hidden: Width of the hidden layer.
    """

    def __init__(self, num_features: int, hidden: int = 256) -> None:
        super().__init__()
        self.num_features = num_features
        self.layers = nn.Sequential(
            nn.LayerNorm(num_features), nn.Linear(num_features, hidden), nn.SiLU(), nn.Linear(hidden, 1)
        )

    def forward(self, features: Tensor) -> Tensor:
        """Features (B, F) of any dtype -> value (B,) float32."""
        return self.layers(features.float()).squeeze(-1)
