"""The common part of ONNX Runtime and OpenVINO: optimum exports the checkpoint and wraps the engine as a transformers
model.
"""

from typing import Any

from .client import Answer, NotSupportedError, Request, head_dim_from_hidden_size
from .generation import greedy_tokens, logits_at, text_ids

_AS_MANY_HEADS = ("phi",)
"""Model types for which optimum's export assumes as many K/V heads as query heads."""


def ask_exported(model_class: Any, request: Request, **options: Any) -> Answer:
    """Export in float32 and answer the request.

    Args:
        model_class: optimum's model class.
        request: the request to answer.
        options: further options of `from_pretrained`.

    Raises:
        NotSupportedError: there is no export of this model type.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    model_type = request.config["model_type"]
    if model_type not in CONFIG_MAPPING:
        raise NotSupportedError(f"the transformers beside it does not know the model type {model_type}")
    try:
        model = model_class.from_pretrained(str(request.folder), export=True, local_files_only=True, **options)
    except (ValueError, KeyError, NotImplementedError, RuntimeError) as problem:
        if model_type in _AS_MANY_HEADS and request.config.get("num_key_value_heads") != request.config.get(
            "num_attention_heads"
        ):
            raise NotSupportedError(f"its export of {model_type} assumes as many K/V heads as query heads") from None
        if any(
            words in str(problem)
            for words in ("custom or unsupported architecture", "not supported yet", "not supported to be")
        ):
            raise NotSupportedError(f"it has no export of {model_type}") from None
        raise
    with head_dim_from_hidden_size(request.config):
        return Answer(
            greedy_tokens(model, request.prompts),
            logits_at(model, request.sequences, request.positions),
            text_ids(request),
        )
