"""transformers 4.57, which reads the config keys from before version 5."""

from .client import Answer, NotSupportedError, Request
from .generation import greedy_tokens, logits_at, text_ids


def answer(request: Request) -> Answer:
    """Load the checkpoint in float32 and answer the request.

    Raises:
        NotSupportedError: this version does not know the model type.
    """
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    model_type = request.config["model_type"]
    if model_type not in CONFIG_MAPPING:
        raise NotSupportedError(f"this version does not know the model type {model_type}")
    model, info = AutoModelForCausalLM.from_pretrained(
        request.folder,
        dtype=torch.float32,
        local_files_only=True,
        output_loading_info=True,
        attn_implementation="eager",
    )
    if absent := [*info["missing_keys"], *info["mismatched_keys"]]:
        raise ValueError(f"{len(absent)} parameters have no matching tensor, the first is {absent[0]}")
    model.eval()
    return Answer(
        greedy_tokens(model, request.prompts), logits_at(model, request.sequences, request.positions), text_ids(request)
    )
