"""The action: a chunk of joint targets, checked before anything moves."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chess_env.errors import ActionError


def check_actions(
    actions: Any, shape: tuple[int, ...], rows: Sequence[int] | None = None
) -> NDArray[np.float32]:
    """Actions as a float32 array of `shape`; of a batch only `rows` have to hold finite numbers.

    Raises:
        ActionError: Another shape, not numbers, or a NaN or infinite value.
    """
    try:
        array = np.asarray(actions, dtype=np.float32)
    except (TypeError, ValueError) as error:
        raise ActionError(
            f"the action is not an array of numbers ({error}): shape {shape} is needed"
        ) from None
    if array.shape != shape:
        raise ActionError(
            f"the action has shape {array.shape}: {shape} is needed (joint targets, degrees; gripper 0..100)"
        )
    checked = array if rows is None else array[list(rows)]
    if not np.isfinite(checked).all():
        where = tuple(int(i) for i in np.argwhere(~np.isfinite(checked))[0])
        if rows is not None:
            where = (int(rows[where[0]]), *where[1:])
        raise ActionError(
            f"the action has {array[where]} at {where}: finite joint targets are needed (is the policy's output finite?)"
        )
    return array
