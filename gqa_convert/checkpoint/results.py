"""The base of what the functions behind the commands return."""

import warnings
from typing import Any

from gqa_convert.checkpoint.strict_json import JsonObject


class Result:
    """A result with named attributes and a JSON form, which `--json` prints.

    Earlier versions returned that JSON as a dictionary. `result["key"]` still works, with a DeprecationWarning.
    """

    __slots__ = ()

    def as_json(self) -> JsonObject:
        """The result as plain data."""
        raise NotImplementedError

    def __getitem__(self, key: str) -> Any:
        warnings.warn(
            f"result[{key!r}] is deprecated: read the attribute, or result.as_json()[{key!r}]",
            DeprecationWarning,
            stacklevel=2,
        )
        return self.as_json()[key]
