"""Text that is available on every machine: the source code of the Python standard library.

The demo checkpoint was trained on one part of these files and is evaluated on the other. A file belongs to the held-out
part by a hash of its path alone, so that training and evaluation agree on every Python version without a list of names.
"""

import hashlib
import os
import sysconfig
from pathlib import Path

HELD_OUT_SHARE = 20
"""One in this many files is held out."""

_FOREIGN = frozenset({"site-packages", "dist-packages", "__pycache__"})
_TESTS = frozenset({"test", "tests", "idle_test"})


def is_held_out(relative_path: str, share: int = HELD_OUT_SHARE) -> bool:
    """Whether the file at this path (below the standard library, with forward slashes) is in the held-out part."""
    return hashlib.sha256(relative_path.encode()).digest()[0] % share == 0


def source_files(held_out: bool, with_tests: bool = False) -> list[Path]:
    """The `.py` files of one part of the standard library, in a fixed order; its test suites are optional."""
    root = Path(sysconfig.get_path("stdlib"))
    found: list[Path] = []
    for folder, folders, files in os.walk(root):
        folders[:] = {*folders} - (_FOREIGN if with_tests else _FOREIGN | _TESTS)
        found += [Path(folder, name) for name in files if name.endswith(".py")]
    return [
        path for path in sorted(found) if is_held_out(path.relative_to(root).as_posix()) == held_out
    ]
