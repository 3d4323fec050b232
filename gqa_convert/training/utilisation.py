"""Model FLOPs utilisation (Chowdhery et al. 2022): the share of a GPU's peak throughput that the arithmetic of training
uses.
"""

from typing import Any

from gqa_convert.training.gpus import find_gpu


def peak(device: Any) -> float | None:
    """The peak FLOPs per second of a torch device; None for CPUs and GPUs that are not in the table."""
    if device.type != "cuda":
        return None
    import torch

    gpu = find_gpu(torch.cuda.get_device_name(device))
    return None if gpu is None else gpu.peak


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
