"""A moving average of the trained weights: what is validated and saved, while the weights themselves explore and train."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from flowrl.checkpoint import TrainingState
from flowrl.errors import FlowRLError

WEIGHTS, AVERAGE = "weights", "average"


class WeightAverage:
    """Exponential moving average of parameters, in float32: a <- d_n a + (1 - d_n) w after iteration n, from a = w at the start.

    A policy gradient from a few hundred episodes is mostly noise, and so is most of each step. The average keeps the drift and
    loses the noise. Source: Polyak and Juditsky 1992, "Acceleration of stochastic approximation by averaging"; as a
    moving average e.g. in Ho et al. 2020, "Denoising diffusion probabilistic models", section 4.

    Args:
        parameters: What is trained, by name.
        decay: d, from 0 (the average is the weights themselves) to below 1; the average looks back about 1 / (1 - d) iterations.
            At first d_n = (1 + n) / (10 + n), until that reaches d: a long memory would hold on to the start.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], decay: float) -> None:
        self.decay = decay
        self._parameters = dict(parameters)
        self._average = {name: self._copy(p) for name, p in self._parameters.items()} if decay else {}

    @torch.no_grad()
    def update(self, iteration: int) -> None:
        """Counts the weights as iteration n = `iteration` has left them."""
        decay = min(self.decay, (1 + iteration) / (10 + iteration))
        for name, average in self._average.items():
            average.lerp_(self._parameters[name].float(), 1.0 - decay)

    @contextmanager
    @torch.no_grad()
    def applied(self) -> Iterator[None]:
        """Meanwhile the parameters hold the average; afterwards they are what they were, bit for bit."""
        weights = {name: self._parameters[name].detach().clone() for name in self._average}
        self._load(self._average)
        try:
            yield
        finally:
            self._load(weights)

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint needs besides the policy, which was saved with the average in it: the weights, and the average
        where the policy's own dtype rounds it. Copies; nothing for decay 0. Call outside `applied`."""
        stored = {f"{WEIGHTS}.{name}": self._parameters[name].detach().clone() for name in self._average}
        for name, average in self._average.items():
            if self._parameters[name].dtype != average.dtype:
                stored[f"{AVERAGE}.{name}"] = average
        return stored

    def restore(self, state: TrainingState) -> None:
        """Average and weights as a checkpoint left them; the parameters hold the saved policy's, the average.

        Raises:
            FlowRLError: The checkpoint stores the weights of other parameters.
        """
        if not self._average:
            return
        weights, exact = state.group(WEIGHTS), state.group(AVERAGE)
        own = {name: parameter.shape for name, parameter in self._parameters.items()}
        if {name: weight.shape for name, weight in weights.items()} != own:
            raise FlowRLError(
                f"{state.folder} does not store the weights beside their average; start a new run from it with --policy"
            )
        self._average = {name: self._copy(parameter) for name, parameter in self._parameters.items()}
        for name, average in exact.items():
            self._average[name].copy_(average)
        with torch.no_grad():
            self._load(weights)

    def _load(self, values: Mapping[str, Tensor]) -> None:
        for name, value in values.items():
            self._parameters[name].copy_(value)

    @staticmethod
    def _copy(parameter: nn.Parameter) -> Tensor:
        return parameter.detach().float().clone()
