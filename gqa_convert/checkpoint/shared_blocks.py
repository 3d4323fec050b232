"""Whether a filesystem lets two files share blocks, so that copying moves no bytes (XFS, btrfs, bcachefs).

Imports the standard library alone, because reading ahead asks while the program is still starting.
"""

import fcntl
import os
import struct
from pathlib import Path

BLOCK = 4096
"""Bytes. Filesystems that share blocks do so at this granularity or a divisor of it."""

_FICLONERANGE = 0x4020940D


def can_share_blocks(path: str | os.PathLike[str], scratch: int) -> bool:
    """Return whether a file can share blocks with the open, empty file `scratch`, which may be unnamed."""
    if Path(path).stat().st_size < BLOCK:
        return False
    source = os.open(path, os.O_RDONLY)
    try:
        fcntl.ioctl(scratch, _FICLONERANGE, struct.pack("=qQQQ", source, 0, BLOCK, 0))
    except OSError:
        return False
    finally:
        os.close(source)
    return True
