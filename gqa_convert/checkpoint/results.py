"""The base of what the functions behind the commands return."""

from dataclasses import asdict

from gqa_convert.checkpoint.strict_json import JsonObject


class Result:
    """A dataclass with a JSON form, which `--json` prints."""

    __slots__ = ()

    def as_json(self) -> JsonObject:
        """The result as plain data."""
        return asdict(self)  # type: ignore[call-overload, no-any-return]
