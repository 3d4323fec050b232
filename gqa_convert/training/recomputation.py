"""Recomputes activations in the backward pass: whole layers, or of each layer all but products and attention."""

from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from gqa_convert.errors import RecipeError
from gqa_convert.training.recipe.schema import CheckpointingPolicy

_KEPT = {
    overload
    for name in (
        "mm",
        "addmm",
        "_grouped_mm",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_fused_attention_overrideable",
    )
    if (packet := getattr(torch.ops.aten, name, None)) is not None
    for overload in (getattr(packet, each) for each in packet.overloads())
}
"""The operators whose results are kept: nearly all of a layer's arithmetic, in a part of its memory. Batched products
are not among them, since the scores of attention that is not fused take more memory than all that is saved.
"""


def recompute(model: Any, interval: int = 1, policy: CheckpointingPolicy = "layers") -> None:
    """Recompute the activations of every `interval`-th layer in the backward pass.

    Args:
        model: a transformers model.
        interval: of the layers.
        policy: `layers` keeps only the input of a layer, `operators` also the results of its products with
            weights and of fused attention.

    Raises:
        RecipeError: the model's class recomputes all layers or none.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    options: dict[str, Any] = {"use_reentrant": False}
    if policy == "operators":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _choose)
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=options)
    else:  # older transformers
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if interval > 1 and not layers:
        raise RecipeError(
            f"checkpointing_interval is {interval}, and {type(model).__name__} recomputes all layers or none: remove it"
        )
    for number, layer in enumerate(layers):
        layer.gradient_checkpointing = number % interval == 0


def _choose(_: Any, operator: Any, *__: Any, **___: Any) -> CheckpointPolicy:
    """What happens to the result of an operator."""
    return CheckpointPolicy.MUST_SAVE if operator in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE
