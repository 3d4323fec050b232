"""The machine and software of a measurement, which every result file records."""

import os
import platform
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from gqa_convert._version import __version__
from gqa_convert.checkpoint.strict_json import JsonObject

_LIBRARIES = ("torch", "transformers", "numpy")


@dataclass(frozen=True, slots=True, kw_only=True)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """The head of a measurement's JSON.

    Attributes:
        kind: the command that measured, such as `evaluate` or `benchmark`; `publish` recognises files by it.
        created: the time in UTC, as 2025-01-31T12:00:00Z.
        command: the command line; None from Python.
        machine: the machine and the software.
    """

    kind: str
    created: str
    command: list[str] | None
    machine: Machine

    def as_json(self) -> JsonObject:
        return asdict(self)


def machine(device: str = "cpu") -> Machine:
    """Describe the machine and the software for a computation on a device, such as `cpu` or `cuda:0`."""
    name, memory = _processor(), _memory()
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
        versions=_versions(),
    )


def available_memory(device: Any, local_processes: int = 1) -> int | None:
    """Return the bytes that this process may use: its GPU's free memory with what torch keeps for it, or its share of Linux's
    available memory.

    Args:
        device: a torch device.
        local_processes: number of processes that share this machine.
    """
    if device.type == "cuda":
        import torch

        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0] + kept)
    if device.type != "cpu":
        return None
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        kibibytes = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, IndexError, StopIteration):
        return None
    return kibibytes * 1024 // max(1, local_processes)


def measurement(kind: str, command: list[str] | None, device: str = "cpu") -> Measurement:
    """Return the head of a measurement that is made now.

    Args:
        kind: the command that measured, such as `evaluate` or `benchmark`.
        command: the command line, or None from Python.
        device: the device of the computation.
    """
    created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return Measurement(kind=kind, created=created, command=command, machine=machine(device))


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _versions() -> dict[str, str]:
    found = {"gqa_convert": __version__, "python": platform.python_version()}
    for library in _LIBRARIES:
        try:
            found[library] = version(library)
        except PackageNotFoundError:
            continue
    return found
