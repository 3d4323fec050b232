"""Earlier names of arguments and attributes. They still work, with a DeprecationWarning."""

import functools
import warnings
from collections.abc import Callable
from typing import Any, Final, TypeVar, cast

Init = TypeVar("Init", bound=Callable[..., None])

RENAMED: Final = {
    "width": "embed_dim",
    "heads": "num_heads",
    "head_width": "head_dim",
    "value_head_width": "value_head_dim",
    "key_width": "kdim",
    "value_width": "vdim",
}
"""Earlier names -> the names that nn.MultiheadAttention uses."""


def accept_earlier_names(function: Init) -> Init:
    """Let an `__init__` accept the keyword arguments of `RENAMED` too."""

    @functools.wraps(function)
    def renamed(self: Any, *arguments: Any, **options: Any) -> None:
        for old in RENAMED.keys() & options.keys():
            new = RENAMED[old]
            if new in options:
                raise TypeError(f"{type(self).__name__} got both {new} and its earlier name {old}: give {new} alone")
            warn_renamed(f"argument {old} of {type(self).__name__}", new, stacklevel=3)
            options[new] = options.pop(old)
        function(self, *arguments, **options)

    return cast(Init, renamed)


class EarlierAttributes:
    """Reads the attributes of `RENAMED` by their earlier names."""

    @property
    def width(self) -> int:
        """Deprecated: `embed_dim`."""
        return self._renamed("width")

    @property
    def heads(self) -> int:
        """Deprecated: `num_heads`."""
        return self._renamed("heads")

    @property
    def head_width(self) -> int:
        """Deprecated: `head_dim`."""
        return self._renamed("head_width")

    @property
    def value_head_width(self) -> int:
        """Deprecated: `value_head_dim`."""
        return self._renamed("value_head_width")

    @property
    def key_width(self) -> int:
        """Deprecated: `kdim`."""
        return self._renamed("key_width")

    @property
    def value_width(self) -> int:
        """Deprecated: `vdim`."""
        return self._renamed("value_width")

    def _renamed(self, old: str) -> int:
        warn_renamed(f"attribute {old} of {type(self).__name__}", RENAMED[old], stacklevel=4)
        value: int = getattr(self, RENAMED[old])
        return value


def warn_renamed(what: str, new: str, *, stacklevel: int) -> None:
    """Warn that `what` is deprecated in favour of `new`."""
    warnings.warn(f"{what} is deprecated: use {new}", DeprecationWarning, stacklevel=stacklevel)
