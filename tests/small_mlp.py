"""Small flow_mlp policies with random weights, for tests."""

import torch

from flowrl.policy.mlp import MLPConfig, MLPFlowPolicy


def small_mlp(state_dim: int = 3, action_dim: int = 2, *, seed: int = 0, **sizes: int) -> MLPFlowPolicy:
    """Actions in the environment's units are 0.5 * normalized + 0.1; states are divided by 2."""
    sizes = {"chunk_size": 4, "n_action_steps": 3, "hidden": 16, "num_frequencies": 5, **sizes}
    statistics = {
        "observation.state.mean": torch.zeros(state_dim),
        "observation.state.std": torch.full((state_dim,), 2.0),
        "action.mean": torch.full((action_dim,), 0.1),
        "action.std": torch.full((action_dim,), 0.5),
    }
    return MLPFlowPolicy.create(MLPConfig(state_dim, action_dim, **sizes), statistics, seed=seed)
