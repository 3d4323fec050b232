"""Pictures drawn with matplotlib: checks before long work, and recognition of files that this program drew."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gqa_convert.checkpoint.atomic_files import write_whole
from gqa_convert.checkpoint.resource_errors import is_disk_full
from gqa_convert.errors import MissingExtraError, NoSpaceError, OptionError, OutputError

FORMATS = (".png", ".svg", ".pdf")
DRAWN_BY = "drawn by gqa-convert"
"""The mark by which a file that this program drew is known."""


def check_picture(path: Path, option: str = "--plot", formats: Sequence[str] = FORMATS) -> None:
    """Refuse a picture, or a page with one, that could not be drawn, before the long work.

    Raises:
        OptionError: the suffix of the file is unknown, or its folder is missing.
        OutputError: the file exists, and this program did not draw it.
        MissingExtraError: matplotlib is not installed.
    """
    if path.suffix.lower() not in formats:
        raise OptionError(
            f"{option} {path} ends in {path.suffix or 'nothing'!r}: name a file that ends in one of {', '.join(formats)}"
        )
    if not path.parent.is_dir():
        raise OptionError(f"{option} {path}: there is no folder {path.parent}, make it first")
    if path.exists() and not is_our_picture(path):
        raise OutputError(f"{option} {path} exists and gqa-convert did not draw it: name another file")
    try:
        import matplotlib as mpl  # noqa: F401
    except ImportError:
        raise MissingExtraError(
            f"matplotlib is not installed, which {option} needs: pip install 'gqa-convert[plot]'"
        ) from None


def is_our_picture(path: Path) -> bool:
    """Whether `save_picture` wrote a file."""
    try:
        return DRAWN_BY.encode() in path.read_bytes()
    except OSError:
        return False


def save_picture(figure: Any, path: Path) -> None:
    """Write a matplotlib figure in the format of the file's suffix, marked as drawn by this program. The file appears
    whole or not at all.

    Raises:
        NoSpaceError: the disk is full.
        OutputError: the file can't be written.
    """
    kind = path.suffix[1:].lower()
    picture = io.BytesIO()
    figure.savefig(picture, format=kind, dpi=150, metadata={"Software" if kind == "png" else "Creator": DRAWN_BY})
    write_drawing(path, picture.getvalue())


def write_drawing(path: Path, content: bytes) -> None:
    """Write what was drawn, marked with `DRAWN_BY`: the file appears whole or not at all.

    Raises:
        NoSpaceError: the disk is full.
        OutputError: the file can't be written.
    """
    try:
        write_whole(path, content)
    except OSError as problem:
        if is_disk_full(problem):
            raise NoSpaceError(
                f"the disk or quota of {path} is full: free some space, or name a picture on another disk"
            ) from None
        raise OutputError(f"{path} can't be written ({problem.strerror or problem}): name another picture") from None
