"""The machine and software of a measurement, which every result file records."""

import os
import platform
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version

from gqa_convert._version import __version__
from gqa_convert.checkpoint.devices import PROC, system_lines, usable_cores
from gqa_convert.checkpoint.strict_json import JsonObject


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
    names = (
        line.split(":", 1)[1].strip()
        for line in system_lines(PROC / "cpuinfo")
        if line.startswith("model name")
    )
    name = next(names, platform.processor() or platform.machine())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if device.startswith("cuda"):
        import torch

        properties = torch.cuda.get_device_properties(torch.device(device))
        name, memory = properties.name, properties.total_memory
    return Machine(
        device=device,
        processor=name,
        cores=usable_cores(),
        memory_bytes=memory,
        system=f"{platform.system()} {platform.release()}",
        versions={"gqa_convert": __version__, "python": platform.python_version()}
        | {library: version(library) for library in ("torch", "transformers", "numpy")},
    )


def measurement(kind: str, command: list[str] | None, device: str = "cpu") -> JsonObject:
    """Return the head of the JSON of a measurement that is made now: what measured, when in UTC, and on what.

    Args:
        kind: the command that measured, such as `evaluate` or `benchmark`; `publish` recognises files by it.
        command: the command line, or None from Python.
        device: the device of the computation.
    """
    created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return {
        "kind": kind,
        "created": created,
        "command": command,
        "machine": asdict(machine(device)),
    }
