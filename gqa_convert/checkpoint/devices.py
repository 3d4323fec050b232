"""The device of a computation: the user's choice, or a GPU if there is one."""

from gqa_convert.errors import OptionError


def chosen_device(asked: str | None) -> str:
    """Return the device to compute on.

    Args:
        asked: the value of `--device`, such as `cpu`, `cuda` or `cuda:1`; None for a GPU if there is one.

    Raises:
        OptionError: there is no such device.
    """
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
