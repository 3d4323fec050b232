"""Paths as users write them, with `~` for a home folder."""

import os
from pathlib import Path

from gqa_convert.errors import OptionError


def local_path(given: str | os.PathLike[str]) -> Path:
    """Return the path with `~` and `~name` replaced by a home folder.

    As in a shell, `~name` stays unchanged if there is no such user.
    """
    return Path(expanded(given))


def expanded(name: str | os.PathLike[str]) -> str:
    """Return a folder or Hub id in the form that is recorded and printed.

    This is what the user wrote, with `~` expanded because it means another folder for other users.
    """
    return os.path.expanduser(name)  # noqa: PTH111 - Path's own raises an error where there is no such user


def cache_folder() -> Path:
    """Return the folder of everything that this package can make again: `gqa-convert` in
    `$XDG_CACHE_HOME` or `~/.cache`.

    Raises:
        OptionError: there is neither, as for a user without an entry in a container.
    """
    stated = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(stated) if stated else Path.home() / ".cache") / "gqa-convert"
    except RuntimeError:
        raise OptionError(
            "there is no home folder for the cache: set XDG_CACHE_HOME to a folder"
        ) from None
