"""Liger's Triton kernels (Hsu et al. 2024) for the layers of a model, through transformers."""

import importlib.util
from typing import Any

from gqa_convert.errors import LaunchError, MissingExtraError

_NOT_ITS_LOSSES = {"cross_entropy": False, "fused_linear_cross_entropy": False}
"""Losses are computed from the states, the divergence among them; see `linear_loss`."""


def check_liger(device: str) -> None:
    """Refuse Liger's kernels where they can't run, before anything is loaded.

    Args:
        device: the type of this process's device.

    Raises:
        LaunchError: the device is no GPU.
        MissingExtraError: Liger is not installed.
    """
    if device != "cuda":
        raise LaunchError(f"liger needs a CUDA GPU, and this run is on {device}: set liger to false")
    if importlib.util.find_spec("liger_kernel") is None:
        raise MissingExtraError("liger needs liger-kernel, which is not installed: pip install 'gqa-convert[liger]'")


def use_liger(model: Any) -> bool:
    """Have norms, rotary embeddings and MLPs of a model use Liger's kernels.

    Args:
        model: a transformers model.

    Returns:
        Whether Liger has kernels for the model's type; if not, the model is as before.
    """
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN
    from transformers.integrations.liger import apply_liger_kernel

    if model.config.model_type not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        return False
    apply_liger_kernel(model, _NOT_ITS_LOSSES)
    return True
