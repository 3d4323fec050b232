"""The machine: which device to compute on, how much memory is free, what is fast, and how results
describe it.

A test states the answers by an environment variable, so that a run on one machine shows what
another would do.
"""

import json
import os
import platform
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from gqa_convert._version import __version__
from gqa_convert.errors import OptionError

from .json_objects import JsonObject

STATED = "GQA_CONVERT_MACHINE"
"""The environment variable that tests set: a JSON object of answers, by the names that `_stated` is
called with.
"""

PROC = Path("/proc")
_GROUPS = Path("/sys/fs/cgroup")

_OF_GPUS = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg", "/dev/kfd")
"""Files of the drivers of GPUs (NVIDIA's, those in WSL, AMD's)."""


def _stated(name: str) -> Any:
    """A test's answer to a question; None where the machine answers."""
    return json.loads(os.environ.get(STATED, "{}")).get(name)


def has_gpu_driver() -> bool:
    """Whether this machine may have a GPU, found without importing torch."""
    stated = _stated("gpu_driver")
    return any(Path(file).exists() for file in _OF_GPUS) if stated is None else bool(stated)


def usable_cores() -> int:
    """The number of processor cores that this process may use."""
    return _stated("cores") or len(os.sched_getaffinity(0))


def multiplies_bfloat16(device: Any) -> bool:
    """Whether a torch device multiplies matrices faster in bfloat16 than in float32. Of x86
    processors, those without AMX take two to three times as long, even with instructions for it.
    """
    stated = _stated("bfloat16")
    if stated is not None:
        return bool(stated)
    import torch

    if device.type == "cpu" and torch.cpu._is_avx2_supported():
        return bool(torch.cpu._is_amx_tile_supported())
    if device.type == "cpu":
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return device.type == "cuda" and bool(torch.cuda.is_bf16_supported(including_emulation=False))


def chosen_device(asked: str | None) -> str:
    """Return the device to compute on.

    Args:
        asked: the value of `--device`, such as `cpu`, `cuda` or `cuda:1`; None for a GPU if there
            is one.

    Raises:
        OptionError: there is no such device.
    """
    if asked in ("cpu", "cpu:0"):
        return "cpu"
    # in one line, where torch would print a traceback
    if asked is not None and not re.fullmatch(r"cuda(:0|:[1-9][0-9]*)?", asked):
        raise OptionError(
            f"--device {asked!r} is neither the CPU nor a GPU: write it like cpu, cuda or cuda:1"
        )
    import torch

    if asked is None:
        has_gpu = _stated("gpu")
        return "cuda" if (torch.cuda.is_available() if has_gpu is None else has_gpu) else "cpu"
    count = torch.cuda.device_count()
    if int(asked.partition(":")[2] or 0) >= count:
        raise OptionError(
            f"--device is {asked}, and torch finds {count} GPUs here, counted from 0: "
            "name one of them, use --device cpu, or "
            "install torch for the GPU"
        )
    return asked


def available_memory(device: Any) -> int | None:
    """Return the bytes that this process may use: its GPU's free memory with what torch keeps for
    it, or Linux's available memory, as far as the limits of its control groups allow.

    Args:
        device: a torch device.
    """
    stated = _stated("memory")
    if stated is not None:
        return int(stated)
    if device.type == "cuda":
        import torch

        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0] + kept)
    # a control group may allow less than the machine has
    free = [1024 * kibibytes for kibibytes in _numbers(PROC / "meminfo", "MemAvailable:")]
    return max(0, min([*free, *_left_by_limits()])) if free else None


def _left_by_limits() -> Iterator[int]:
    """The bytes that each memory limit on this process leaves, of control groups of version 2."""
    for line in system_lines(PROC / "self" / "cgroup"):
        group = _GROUPS / line.split(":", 2)[2].lstrip("/")
        for folder in (group, *group.parents):
            cached = sum(_numbers(folder / "memory.stat", "inactive_file"))
            with suppress(OSError, ValueError):  # there is no such group here, or it has no limit
                yield (
                    int((folder / "memory.max").read_text())
                    - int((folder / "memory.current").read_text())
                    + cached
                )


def _numbers(path: Path, key: str) -> list[int]:
    """The numbers after a word that begins a line."""
    return [int(line.split()[1]) for line in system_lines(path) if line.startswith(f"{key} ")]


def system_lines(path: Path) -> list[str]:
    """The lines of a file of the system, if there is one."""
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


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
    """Describe the machine and the software for a computation on a device, such as `cpu` or
    `cuda:0`.
    """
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
    """Return the head of the JSON of a measurement that is made now: what measured, when in UTC,
    and on what.

    Args:
        kind: the command that measured, such as `evaluate` or `benchmark`; `publish` recognises
            files by it.
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
