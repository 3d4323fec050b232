"""Which positions of a call count, and which are padding."""

from torch import Tensor

from gqa_convert.conversion.fit.lockstep.forward_pass import Batch


def masks_of(batch: Batch, module: str, *, encoder_decoder: bool, cross: bool) -> tuple[Tensor | None, Tensor | None]:
    """The masks of the positions that ask, and of those that are read; None where the batch has none.

    Args:
        batch: what the model was called with.
        module: the loaded model's name of the attention module.
        encoder_decoder: whether the model is one.
        cross: whether the module reads something other than what asks.
    """
    outer = batch.get("attention_mask")
    if not encoder_decoder or "encoder" in module.split("."):
        return outer, outer
    inner = batch.get("decoder_attention_mask")
    return inner, outer if cross else inner


def as_counted(mask: Tensor | None, states: Tensor) -> Tensor | None:
    """The mask [B, L] as booleans; None where it has another shape than the states [B, L, d], or where all count."""
    if mask is None or mask.shape != states.shape[:2] or bool(mask.all()):
        return None
    return mask.bool()
