"""The releases of the modelling files, which lie in published results: which release a result's
files are of.
"""

import functools
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from gqa_convert.families.family import MODELING, Modeling

TESTED = ">=5.18,<5.25"
"""The versions of transformers that the modelling files of this release were tested with;
pyproject.toml states them too.
"""

TESTED_KEY = "transformers_tested"
"""Where a result's config.json has the versions that its modelling files were tested with."""


class Release(NamedTuple):
    """The modelling files of one release of this package."""

    name: str
    transformers: str | None
    """The versions that they were tested with, as results of this release state them; None if they
    state none.
    """
    files: Mapping[str, str]
    """The SHA-256 of each file, by its name."""

    @property
    def is_current(self) -> bool:
        """Whether these are the files of the installed package."""
        return self is releases()[-1]

    def holds(self, folder: Path, name: str) -> bool:
        """Whether a file in a folder is that of this release."""
        path = folder / name
        return path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == self.files.get(
            name
        )


@functools.cache
def releases() -> tuple[Release, ...]:
    """All releases, in their order; the last is that of the installed package."""
    stated = json.loads((MODELING / "released.json").read_bytes())
    return tuple(Release(name, **entry) for name, entry in stated.items())


def release_of(folder: Path, modeling: Modeling) -> Release | None:
    """The latest release that the modelling files in a folder are of; None where a file is of none,
    or two are of different ones.

    Args:
        folder: a result.
        modeling: which files it must have.
    """
    for release in reversed(releases()):
        if all(release.holds(folder, file.name) for file in modeling.files):
            return release
    return None


def is_released(folder: Path, name: str) -> bool:
    """Whether a file in a folder is a modelling file of any release."""
    return any(release.holds(folder, name) for release in releases())
