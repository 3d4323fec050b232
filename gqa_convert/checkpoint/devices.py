"""The device of a computation: the user's choice, or a GPU if there is one."""

from pathlib import Path

from gqa_convert.errors import OptionError

_OF_GPUS = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg", "/dev/kfd")
"""Files of the drivers of GPUs (NVIDIA's, those in WSL, AMD's)."""


def has_gpu_driver() -> bool:
    """Whether this machine may have a GPU, found without importing torch."""
    return any(Path(file).exists() for file in _OF_GPUS)


def chosen_device(asked: str | None) -> str:
    """Return the device to compute on.

    Args:
        asked: the value of `--device`, such as `cpu`, `cuda` or `cuda:1`; None for a GPU if there is one.

    Raises:
        OptionError: there is no such device.
    """
    if asked == "cpu":
        return asked
    import torch

    if asked is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        place = torch.device(asked)
    except RuntimeError:
        raise OptionError(f"--device {asked!r} is not a device: write it like cpu, cuda or cuda:1") from None
    if place.type not in ("cpu", "cuda"):
        raise OptionError(f"--device {asked!r} is neither the CPU nor a GPU: write it like cpu, cuda or cuda:1")
    if place.type == "cuda" and not torch.cuda.is_available():
        raise OptionError(
            f"--device is {asked}, and torch finds no GPU here: use --device cpu, or install torch for the GPU"
        )
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        raise OptionError(
            f"--device is {asked}, and there are {torch.cuda.device_count()} GPUs, counted from 0: name one of them"
        )
    return asked


def chosen_devices(asked: str | None) -> tuple[str, ...]:
    """Return the devices to compute on, a process on each.

    Args:
        asked: the value of a `--device` that accepts several: one as for `chosen_device`, GPUs such as `cuda:0,cuda:1`,
            `cuda:all`, or `cpu,cpu` for two processes.

    Raises:
        OptionError: one of them is not there, GPUs and the CPU are mixed, or a GPU is named twice.
    """
    if asked == "cuda:all":
        import torch

        chosen_device("cuda")
        return tuple(f"cuda:{number}" for number in range(torch.cuda.device_count()))
    if asked is None or "," not in asked:
        return (chosen_device(asked),)
    names = [name.strip() for name in asked.split(",")]
    if {"cpu", "cuda"} <= {name.partition(":")[0] for name in names}:
        raise OptionError(f"--device is {asked}, and the CPU and GPUs cannot share a conversion: name one kind")
    devices = tuple(chosen_device("cuda:0" if name == "cuda" else name) for name in names)
    twice = next((device for device in devices if not device.startswith("cpu") and devices.count(device) > 1), None)
    if twice is not None:
        raise OptionError(f"--device is {asked}, which names {twice} more than once: name each GPU once")
    return devices
