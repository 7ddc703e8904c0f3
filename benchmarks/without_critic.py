"""`flowrl-train` without a critic: every value is 0, so that with --lam 1 advantages are the returns, normalized over the iteration.

python benchmarks/without_critic.py --lam 1 --critic-epochs 0 [flags of flowrl-train]
"""

from torch import Tensor

import flowrl.train
from flowrl.cli import train
from flowrl.policy.critic import Critic


class NoCritic(Critic):
    """0 for every observation; its parameters keep a gradient, of 0."""

    def forward(self, features: Tensor) -> Tensor:
        """Features (B, F) -> zeros (B,) float32."""
        return 0.0 * super().forward(features)


def main() -> None:
    """flowrl-train with that critic."""
    flowrl.train.Critic = NoCritic  # type: ignore[misc]
    train()


if __name__ == "__main__":
    main()
