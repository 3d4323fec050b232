"""Text that is available on every machine: the source code of the Python standard library.

The demo checkpoint was trained on one part of these files and is evaluated on the other. A file belongs to the held-out
part by a hash of its path alone, so that training and evaluation agree on every Python version without a list of names.
"""

import hashlib
import os
import sysconfig
from pathlib import Path

from gqa_convert.data.documents import Fields
from gqa_convert.data.files import Files

HELD_OUT_SHARE = 20
"""One in this many files is held out."""

_FOREIGN = frozenset({"site-packages", "dist-packages", "__pycache__"})
_TESTS = frozenset({"test", "tests", "idle_test"})


def is_held_out(relative_path: str, share: int = HELD_OUT_SHARE) -> bool:
    """Whether the file at this path (below the standard library, with forward slashes) is in the held-out part."""
    return hashlib.sha256(relative_path.encode()).digest()[0] % share == 0


def source_files(held_out: bool, with_tests: bool = False) -> list[Path]:
    """The `.py` files of one part of the standard library, in a fixed order; its test suites are optional."""
    root = sysconfig.get_path("stdlib")
    skipped = _FOREIGN if with_tests else _FOREIGN | _TESTS
    found: list[tuple[str, ...]] = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in skipped]
        above = Path(folder).relative_to(root).parts
        found += [(*above, name) for name in files if name.endswith(".py")]
    return [Path(root, *parts) for parts in sorted(found) if is_held_out("/".join(parts)) == held_out]


def read_texts(paths: list[Path]) -> list[str]:
    """The texts of the files, without files that are nearly empty or not UTF-8 (some test data deliberately is not)."""
    return [piece.text for piece in Files("the standard library", paths, lenient=True).pieces(Fields())]
