"""ONNX Runtime, through optimum-onnx."""

from .client import Answer, Request
from .optimum import ask_exported


def answer(request: Request) -> Answer:
    """Export the checkpoint to ONNX in float32, load the result and answer the request.

    Raises:
        NotSupportedError: there is no export of this model type.
    """
    import torch
    from optimum.onnxruntime import ORTModelForCausalLM

    return ask_exported(ORTModelForCausalLM, request, use_cache=True, dtype=torch.float32)
