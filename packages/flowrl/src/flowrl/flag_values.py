"""Flags whose text is more than one value."""

import json
from typing import Any

from flowrl.errors import FlowRLError


def parse_env_kwargs(text: str) -> dict[str, Any]:
    """The JSON object of --env-kwargs as keyword arguments.

    Raises:
        FlowRLError: not JSON, or not an object.
    """
    try:
        kwargs = json.loads(text)
    except json.JSONDecodeError as error:
        raise FlowRLError(
            f"--env-kwargs {text!r}: not JSON ({error}); for example '{{\"seconds\": 10}}'"
        ) from error
    if not isinstance(kwargs, dict):
        raise FlowRLError(f"--env-kwargs {text!r}: must be a JSON object, for example '{{\"seconds\": 10}}'")
    return kwargs


def parse_schedules(text: str) -> list[tuple[float, float]]:
    """ "0.1:0.002,0.2:0.002" as [(0.1, 0.002), (0.2, 0.002)]; none for an empty text.

    Raises:
        FlowRLError: a schedule that is not two positive finite numbers.
    """
    schedules = []
    for part in filter(None, text.split(",")):
        try:
            start, end = (float(number) for number in part.split(":"))
            if not all(0 < sigma < float("inf") for sigma in (start, end)):
                raise ValueError
        except ValueError:
            raise FlowRLError(
                f"--schedules {part!r}: must be START:END, two positive numbers, for example 0.2:0.002"
            ) from None
        schedules.append((start, end))
    return schedules


def parse_rename(pairs: tuple[str, ...]) -> dict[str, str]:
    """("top=camera1", ...) as {"top": "camera1", ...}: environment's name -> policy's name.

    Raises:
        FlowRLError: a pair without exactly one `=`, or a name given twice.
    """
    names: dict[str, str] = {}
    for pair in pairs:
        environment, equals, policy = pair.partition("=")
        if not (environment and equals) or "=" in policy:
            raise FlowRLError(f"--rename {pair!r}: must be ENVIRONMENT=POLICY, for example top=camera1")
        if environment in names or (policy and policy in names.values()):
            raise FlowRLError(f"--rename {pair!r}: a name is given twice")
        names[environment] = policy
    return names
