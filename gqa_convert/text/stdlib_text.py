"""Text that every machine has: the Python standard library's own sources.

The demo checkpoint was trained on one part of these files and is evaluated on the other. A file belongs to the held-out
part by a hash of its path alone, so that both sides agree on any Python version without a list of names.
"""

import hashlib
import sysconfig
from pathlib import Path

HELD_OUT_SHARE = 20
"""One file in this many is held out."""


def is_held_out(relative_path: str) -> bool:
    """Whether the file at this path (below the standard library, with forward slashes) was kept out of training."""
    return hashlib.sha256(relative_path.encode()).digest()[0] % HELD_OUT_SHARE == 0


def source_files(held_out: bool, with_tests: bool = False) -> list[Path]:
    """The standard library's `.py` files of one part, in a fixed order; its own test suites only if asked for."""
    root = Path(sysconfig.get_path("stdlib"))
    chosen = []
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if "site-packages" in parts or "dist-packages" in parts or "__pycache__" in parts:
            continue
        if not with_tests and any(part in ("test", "tests", "idle_test") for part in parts):
            continue
        if is_held_out("/".join(parts)) == held_out:
            chosen.append(path)
    return chosen


def read_texts(paths: list[Path]) -> list[str]:
    """The files' texts; a file that is no UTF-8 (some test data is not, on purpose) or is all but empty is left out."""
    texts = []
    for path in paths:
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue
        if len(text) > 100:
            texts.append(text)
    return texts
