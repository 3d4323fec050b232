"""The machine and software of a measurement, which every result file records."""

import os
import platform
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from gqa_convert._version import __version__
from gqa_convert.checkpoint.strict_json import JsonObject

_PROC, _GROUPS = Path("/proc"), Path("/sys/fs/cgroup")


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The machine and the software of a computation.

    Attributes:
        device: the device of the computation, such as `cpu` or `cuda:0`.
        processor: its name; the GPU's for a GPU.
        cores: the number that this process may use.
        memory_bytes: the machine's memory; the GPU's for a GPU.
        system: the operating system and its release.
        versions: of Python and of the libraries, by name.
    """

    device: str
    processor: str
    cores: int
    memory_bytes: int
    system: str
    versions: Mapping[str, str]


def machine(device: str = "cpu") -> Machine:
    """Describe the machine and the software for a computation on a device, such as `cpu` or `cuda:0`."""
    names = [line.split(":", 1)[1].strip() for line in _lines(_PROC / "cpuinfo") if line.startswith("model name")]
    name = names[0] if names else platform.processor() or platform.machine()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if device.startswith("cuda"):
        import torch

        properties = torch.cuda.get_device_properties(torch.device(device))
        name, memory = properties.name, properties.total_memory
    return Machine(
        device=device,
        processor=name,
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=memory,
        system=f"{platform.system()} {platform.release()}",
        versions={"gqa_convert": __version__, "python": platform.python_version()}
        | {library: version(library) for library in ("torch", "transformers", "numpy")},
    )


def available_memory(device: Any) -> int | None:
    """Return the bytes that this process may use: its GPU's free memory with what torch keeps for it, or Linux's
    available memory, as far as the limits of its control groups allow.

    Args:
        device: a torch device.
    """
    if device.type == "cuda":
        import torch

        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0] + kept)
    free = [1024 * kibibytes for kibibytes in _numbers(_PROC / "meminfo", "MemAvailable:")]
    return max(0, min([*free, *_left_by_limits()])) if free else None


def _left_by_limits() -> Iterator[int]:
    """The bytes that each memory limit on this process leaves, of control groups of version 2."""
    for line in _lines(_PROC / "self" / "cgroup"):
        group = _GROUPS / line.split(":", 2)[2].lstrip("/")
        for folder in (group, *group.parents):
            cached = sum(_numbers(folder / "memory.stat", "inactive_file"))
            with suppress(OSError, ValueError):  # there is no such group here, or it has no limit
                yield int((folder / "memory.max").read_text()) - int((folder / "memory.current").read_text()) + cached


def measurement(kind: str, command: list[str] | None, device: str = "cpu") -> JsonObject:
    """Return the head of the JSON of a measurement that is made now: what measured, when in UTC, and on what.

    Args:
        kind: the command that measured, such as `evaluate` or `benchmark`; `publish` recognises files by it.
        command: the command line, or None from Python.
        device: the device of the computation.
    """
    created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return {"kind": kind, "created": created, "command": command, "machine": asdict(machine(device))}


def _numbers(path: Path, key: str) -> list[int]:
    """The numbers after a word that begins a line."""
    return [int(line.split()[1]) for line in _lines(path) if line.startswith(f"{key} ")]


def _lines(path: Path) -> list[str]:
    """The lines of a file of the system, if there is one."""
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
