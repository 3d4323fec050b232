"""Determines which positions of a call are padding."""

from torch import Tensor

from gqa_convert.conversion.fit.lockstep.forward_pass import Batch


def masks_of(batch: Batch, module: str, *, encoder_decoder: bool, cross: bool) -> tuple[Tensor | None, Tensor | None]:
    """The padding masks of the query side and of the key side of an attention module; None if the batch has none.

    Args:
        batch: the inputs of the model.
        module: the name of the attention module in the loaded model.
        encoder_decoder: whether the model is an encoder-decoder.
        cross: whether the module is cross-attention, whose keys come from other states than its queries.
    """
    outer = batch.get("attention_mask")
    if not encoder_decoder or "encoder" in module.split("."):
        return outer, outer
    inner = batch.get("decoder_attention_mask")
    return inner, outer if cross else inner


def as_counted(mask: Tensor | None, states: Tensor) -> Tensor | None:
    """The mask [B, L] as booleans; None if its shape does not match the states [B, L, d], or if nothing is padded."""
    if mask is None or mask.shape != states.shape[:2] or bool(mask.all()):
        return None
    return mask.bool()
