"""Start reading a source while the program is still starting, so that the disk does not wait for it.

Imports the standard library alone: everything else is what the time is used for.
"""

import contextlib
import os
import threading
from pathlib import Path

_BYTES = 512 << 20
"""More than a disk delivers while the program starts; a refused conversion has read this much in vain."""

_STEP = 8 << 20


def read_early(source: str | os.PathLike[str]) -> threading.Thread | None:
    """Begin to bring the first weights of a local folder into the page cache, in a thread, and return it.

    Mistakes are not reported: whoever opens the source next does so.
    """
    folder = Path(source)
    if not hasattr(os, "sendfile") or not folder.is_dir():
        return None
    reader = threading.Thread(target=_read, args=(folder,), daemon=True)
    reader.start()
    return reader


def _read(folder: Path) -> None:
    left = _BYTES
    with contextlib.suppress(OSError), Path(os.devnull).open("wb") as nowhere:
        for path in sorted(folder.glob("*.safetensors")):
            with path.open("rb") as file:
                at = 0
                # the kernel passes pages on without copying them
                while left and (done := os.sendfile(nowhere.fileno(), file.fileno(), at, min(_STEP, left))):
                    at, left = at + done, left - done
