"""torch's own threads for the decoding kernel: a second pool would compete with torch's, whose threads wait actively."""

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

from gqa_convert.attention.decoding.compiling import Kernel


@cache
def _fork() -> Any:
    """GOMP_parallel of the OpenMP library that torch runs on; None where it cannot be found."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    mapped = dict.fromkeys(line.split(maxsplit=5)[5] for line in lines if line.count(" ") >= 5 and "/" in line)
    found = [path for path in mapped if Path(path).name.startswith(("libgomp", "libiomp5"))]
    ours = [path for path in found if "/torch" in path]
    if len(ours or found) != 1:
        return None
    try:
        fork = ctypes.CDLL((ours or found)[0]).GOMP_parallel
    except (OSError, AttributeError):
        return None
    fork.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    fork.restype = None
    return fork


def can_use(threads: int) -> bool:
    """Whether the kernel can run on so many threads."""
    return threads == 1 or _fork() is not None


def run(kernel: Kernel, fields: Any, threads: int) -> None:
    """Run the kernel in every thread, each of which takes tasks until none is left.

    Args:
        kernel: compiled.
        fields: a ctypes array of its arguments.
        threads: of them.
    """
    if threads == 1:
        kernel.call(ctypes.addressof(fields))
    else:
        _fork()(kernel.address, ctypes.addressof(fields), threads, 0)
