"""What is known of GPUs: the peak of their arithmetic and their memory."""

from dataclasses import dataclass

from gqa_convert.errors import OptionError


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU, from its manufacturer's data sheet.

    Attributes:
        name: of its manufacturer.
        peak: dense bfloat16 FLOPs per second.
        memory: bytes.
    """

    name: str
    peak: float
    memory: int


_GPUS = tuple(
    Gpu(name, teraflops * 1e12, gigabytes * 10**9)
    for name, teraflops, gigabytes in (
        ("B200", 2250, 180),
        ("H200", 989, 141),
        ("GH200", 989, 96),
        ("H100 PCIe", 756, 80),
        ("H100", 989, 80),
        ("H800", 989, 80),
        ("H20", 148, 96),
        ("A100", 312, 80),
        ("A800", 312, 80),
        ("A40", 150, 48),
        ("A30", 165, 24),
        ("A10G", 70, 24),
        ("A10", 125, 24),
        ("L40S", 362, 48),
        ("L40", 181, 48),
        ("L4", 121, 24),
        ("RTX 4090", 165, 24),
        ("RTX 3090", 71, 24),
        ("MI300X", 1307, 192),
        ("MI250", 383, 128),
    )
)


def named_gpu(name: str) -> Gpu:
    """The GPU that a user names, such as `h100`.

    Raises:
        OptionError: it is not known.
    """
    for gpu in _GPUS:
        if _bare(gpu.name) == _bare(name):
            return gpu
    known = ", ".join(_bare(gpu.name) for gpu in _GPUS)
    raise OptionError(
        f"--hardware names {name!r}, which is not known: name one of {known}, or the memory of a GPU (8x80GB), which estimates no hours"
    )


def _bare(name: str) -> str:
    return name.lower().replace(" ", "").replace("-", "").replace("_", "")
