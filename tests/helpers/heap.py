"""The C library's heap in programs whose memory is measured."""

from typing import Final

LARGE_TENSORS_MAPPED: Final = dict.fromkeys(("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"), str(1 << 20))
"""Variables with which malloc maps each block of 1 MiB and more by itself. Otherwise holes of the heap count as the
program's memory, as many as happen to be.
"""
