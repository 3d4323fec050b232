"""Paths as users write them, with `~` for a home folder."""

import os
from pathlib import Path


def local_path(given: str | os.PathLike[str]) -> Path:
    """Return the path with `~` and `~name` replaced by a home folder.

    As in a shell, `~name` stays unchanged if there is no such user.
    """
    try:
        return Path(given).expanduser()
    except RuntimeError:
        return Path(given)


def expanded(name: str | os.PathLike[str]) -> str:
    """Return a folder or Hub id in the form that is recorded and printed.

    This is what the user wrote, with `~` expanded because it means another folder for other users.
    """
    text = str(name)
    return str(local_path(text)) if text.startswith("~") else text
