"""Model FLOPs utilisation (Chowdhery et al. 2022): the share of a GPU's peak throughput that the arithmetic of training
uses.
"""

from typing import Any

_PEAKS = {
    "B200": 2250e12,
    "H200": 989e12,
    "GH200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H800": 989e12,
    "H20": 148e12,
    "A100": 312e12,
    "A800": 312e12,
    "A40": 150e12,
    "A30": 165e12,
    "A10G": 70e12,
    "A10": 125e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
    "MI300X": 1307e12,
    "MI250": 383e12,
}
"""Dense bfloat16 FLOPs per second, from the manufacturers' data sheets; the first matching name applies.
"""


def peak(device: Any) -> float | None:
    """The peak FLOPs per second of a torch device; None for CPUs and GPUs that are not in the table."""
    if device.type != "cuda":
        return None
    import torch

    name = torch.cuda.get_device_name(device)
    return next((flops for known, flops in _PEAKS.items() if known in name), None)


def flops_per_token(parameters: int, layers: int, attention_size: int, length: int) -> float:
    """The FLOPs per token of a forward and a backward pass of a decoder, without the teacher's and without
    recomputation.

    Args:
        parameters: the number of all parameters.
        layers: the number of layers.
        attention_size: query heads times head_dim.
        length: the tokens per sample.
    """
    return 6.0 * parameters + 12.0 * layers * attention_size * length
