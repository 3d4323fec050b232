"""Start reading a source while the program is still starting, so that the disk does not wait for it.

Imports next to nothing but the standard library: everything else is what the time is used for.
"""

import contextlib
import os
import threading
from pathlib import Path

from gqa_convert.checkpoint.shared_blocks import can_share_blocks

_BYTES = 512 << 20
"""More than a disk delivers while the program starts; a refused conversion has read this much in vain."""

_STEP = 8 << 20


def read_early(source: str | os.PathLike[str], out: str | os.PathLike[str]) -> threading.Thread | None:
    """Begin to bring the first weights of a local folder into the page cache, in a thread, and return it.

    Nothing is read where the result will share the source's blocks. Mistakes are not reported: whoever opens the source
    next does so.

    Args:
        source: the folder, or the name of a source elsewhere.
        out: the folder of the result, which need not exist.
    """
    folder = Path(source)
    if not hasattr(os, "sendfile") or not folder.is_dir():
        return None
    reader = threading.Thread(target=_read, args=(folder, Path(out)), daemon=True)
    reader.start()
    return reader


def _read(folder: Path, out: Path) -> None:
    left = _BYTES
    with contextlib.suppress(OSError), Path(os.devnull).open("wb") as nowhere:
        paths = sorted(folder.glob("*.safetensors"))
        if paths and _will_share(paths[0], out.absolute().parent):
            return
        for path in paths:
            with path.open("rb") as file:
                at = 0
                # the kernel passes pages on without copying them
                while left and (done := os.sendfile(nowhere.fileno(), file.fileno(), at, min(_STEP, left))):
                    at, left = at + done, left - done


def _will_share(path: Path, folder: Path) -> bool:
    """Whether a file that is made in `folder` can share the blocks of `path`."""
    try:
        unnamed = os.open(folder, os.O_TMPFILE | os.O_RDWR)
    except (OSError, AttributeError):  # O_TMPFILE is Linux's, and not every filesystem has it
        return False
    try:
        return can_share_blocks(path, unnamed)
    finally:
        os.close(unnamed)
