"""The flags of the exploration noise, which training and check have in common."""

from typing import TYPE_CHECKING, Any

from flowrl.errors import FlowRLError

if TYPE_CHECKING:
    from flowrl.config import CheckConfig, TrainConfig

NOISE_FLAGS = (
    "noise_kind",
    "sigma_start",
    "sigma_end",
    "learn_sigma",
    "flow_sde_level",
    "noise_basis",
    "noise_modes",
)


def noise_flags(config: "TrainConfig | CheckConfig") -> dict[str, Any]:
    """The noise that a config asks for, as fields that training and check share."""
    return {name: getattr(config, name) for name in NOISE_FLAGS}


def check_noise_flags(config: "TrainConfig | CheckConfig") -> None:
    """Raises FlowRLError for flags of the noise that do not go together."""
    if config.learn_sigma and config.noise_kind != "geometric":
        reason = (
            "is trained anyway" if config.noise_kind == "head" else "has a derived size, which is not trained"
        )
        raise FlowRLError(
            f"--learn-sigma with --noise-kind {config.noise_kind}: that noise {reason}; leave --learn-sigma out"
        )
    if config.flow_sde_level != type(config).flow_sde_level and config.noise_kind != "flow-sde":
        raise FlowRLError(
            f"--flow-sde-level {config.flow_sde_level} with --noise-kind {config.noise_kind}: it has no effect there; "
            "give --noise-kind flow-sde, or leave it out"
        )
    if not 0 < config.flow_sde_level <= 1:
        raise FlowRLError(f"--flow-sde-level {config.flow_sde_level}: must be greater than 0 and at most 1")
