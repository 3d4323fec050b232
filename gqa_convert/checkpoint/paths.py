"""Paths as a user writes them."""

import os
from pathlib import Path


def local_path(given: str | os.PathLike[str]) -> Path:
    """The path, with `~` and `~name` replaced by a home folder; as in a shell, `~name` stays where there is no such
    user.
    """
    try:
        return Path(given).expanduser()
    except RuntimeError:
        return Path(given)


def expanded(name: str | os.PathLike[str]) -> str:
    """A folder or a Hub id as it is recorded and printed: the user's own words, but for `~`, which stands for another
    folder elsewhere.
    """
    text = str(name)
    return str(local_path(text)) if text.startswith("~") else text
