"""What the user asks of `publish`."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gqa_convert.errors import OptionError
from gqa_convert.hub.licenses import LICENSE_ID

_NAME = r"(?!.*(?:--|\.\.))[A-Za-z0-9](?:[\w.-]{0,94}\w)?"
_REPO_ID = re.compile(f"{_NAME}/{_NAME}", re.ASCII)
HUB_ID = re.compile(f"{_NAME}(?:/{_NAME})?", re.ASCII)


@dataclass(frozen=True)
class PublishOptions:
    """Where a checkpoint goes, and what its folder does not say of it.

    Attributes:
        repo_id: of the form org/name.
        private: create a new repository as private.
        results: files of evaluate.
        base_model: id on the Hub of the model that it was made from.
        license: identifier of the Hub.

    Raises:
        OptionError: a name is malformed.
    """

    repo_id: str
    private: bool = False
    results: Sequence[Path] = ()
    base_model: str | None = None
    license: str | None = None

    def __post_init__(self) -> None:
        _check("--repo-id", self.repo_id, _REPO_ID, "org/name")
        _check("--base-model", self.base_model, HUB_ID, "org/name")
        _check("--license", self.license, LICENSE_ID, "apache-2.0, llama2 or other")

    @property
    def url(self) -> str:
        """The address of the repository."""
        from huggingface_hub import constants

        return f"{constants.ENDPOINT}/{self.repo_id}"

    @property
    def name(self) -> str:
        """The repository's name without its owner."""
        return self.repo_id.partition("/")[2]


def _check(option: str, value: str | None, pattern: re.Pattern[str], example: str) -> None:
    if value is not None and not pattern.fullmatch(value):
        raise OptionError(f"{option} {value!r} is no name on the Hub: write it like {example}")
