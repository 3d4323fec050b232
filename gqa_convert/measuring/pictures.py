"""Pictures drawn with matplotlib, and pages with them: checks before long work, and a mark by which they are known."""

import io
from pathlib import Path
from typing import Any

from gqa_convert.errors import MissingExtraError, OptionError, OutputError
from gqa_convert.measuring.results import write_file

FORMATS = (".png", ".svg", ".pdf")
DRAWN_BY = "drawn by gqa-convert"
"""The mark by which a file that this program drew is known."""


def check_picture(path: Path, option: str, formats: tuple[str, ...] = FORMATS) -> None:
    """Refuse a picture, or a page with one, that could not be drawn, before the long work.

    Raises:
        OptionError: the suffix of the file is unknown, or its folder is missing.
        OutputError: the file exists, and this program did not draw it.
        MissingExtraError: matplotlib is not installed.
    """
    if path.suffix.lower() not in formats:
        raise OptionError(f"{option} {path}: name a file that ends in one of {', '.join(formats)}")
    if not path.parent.is_dir():
        raise OptionError(f"{option} {path}: there is no folder {path.parent}, make it first")
    if path.exists() and (path.is_dir() or DRAWN_BY.encode() not in path.read_bytes()):
        raise OutputError(f"{option} {path} exists and gqa-convert did not draw it: name another file")
    try:
        import matplotlib as mpl  # noqa: F401
    except ImportError:
        raise MissingExtraError(
            f"matplotlib is not installed, which {option} needs: pip install 'gqa-convert[plot]'"
        ) from None


def save_picture(figure: Any, path: Path) -> None:
    """Write a matplotlib figure in the format of the file's suffix, marked as drawn by this program. The file appears
    whole or not at all.

    Raises:
        NoSpaceError: the disk is full.
        OutputError: the file can't be written.
    """
    kind = path.suffix[1:].lower()
    mark = {"Software" if kind == "png" else "Creator": DRAWN_BY}
    picture = io.BytesIO()
    figure.savefig(picture, format=kind, dpi=150, metadata=mark)
    write_file(path, picture.getvalue())
