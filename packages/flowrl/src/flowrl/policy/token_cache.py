"""Tokens of instructions that were seen before."""

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from torch import Tensor

MAX_ENTRIES = 64


class TokenCache:
    """A tokenizer that remembers its latest results; in an environment with one instruction they are always the same.

    Args:
        tokenizer: Hugging Face's tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._results: OrderedDict[Any, Mapping[str, Any]] = OrderedDict()

    def __call__(self, text: str | list[str], **settings: Any) -> dict[str, Any]:
        """What the tokenizer returns, in tensors of the caller's own."""
        key = text if isinstance(text, str) else tuple(text), tuple(sorted(settings.items()))
        if key not in self._results:
            self._results[key] = dict(self._tokenizer(text, **settings))
            if len(self._results) > MAX_ENTRIES:
                self._results.popitem(last=False)
        self._results.move_to_end(key)
        return {
            name: value.clone() if isinstance(value, Tensor) else list(value)
            for name, value in self._results[key].items()
        }
