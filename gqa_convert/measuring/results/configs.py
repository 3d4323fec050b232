"""The part of a checkpoint's `config.json` that a report reads."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gqa_convert.errors import ReportError
from gqa_convert.measuring.results.fields import parse_json


@dataclass(frozen=True)
class ModelConfig:
    """A `config.json`, whose keys differ from family to family.

    Attributes:
        keys: its content.
    """

    keys: dict[str, Any]

    def count(self, *names: str) -> int | None:
        """The first of the keys that holds a positive integer."""
        found = (self.keys.get(name) for name in names)
        return next((value for value in found if isinstance(value, int) and value is not True and value > 0), None)

    @property
    def model_types(self) -> tuple[str, ...]:
        """The config's type and those of its parts: a benchmark names the type of the language model."""
        nested = [value for value in self.keys.values() if isinstance(value, dict)]
        found = [each.get("model_type") for each in (self.keys, *nested)]
        return tuple(dict.fromkeys(each for each in found if isinstance(each, str)))


def read_config(folder: Path) -> ModelConfig | None:
    """The config of a checkpoint, None if it is missing or broken."""
    try:
        content = parse_json(folder / "config.json")
    except ReportError:
        return None
    return ModelConfig(content) if isinstance(content, dict) else None
