"""The divergence of a student's predictions from the source's on a batch of calibration text."""

import torch
from torch import Tensor

from gqa_convert.conversion.fit.attention_calls import Batch
from gqa_convert.text.labels import IGNORED
from gqa_convert.text.losses import kl_loss


def summed_divergence(student: Tensor, source: Tensor, batch: Batch, *, decodes: bool) -> tuple[Tensor, Tensor]:
    """KL(source || student) of the next-token distributions, summed over a batch, in nats, and the number of positions.

    Args:
        student: logits [B, L, vocabulary], of any precision; they are overwritten.
        source: logits of the same shape.
        batch: the inputs. Positions that its mask leaves out do not count.
        decodes: whether the logits are those of a decoder beside an encoder.
    """
    labels = torch.zeros(source.shape[:2], dtype=torch.long, device=source.device)
    mask = _mask(batch, decodes=decodes)
    if mask is not None:
        labels = labels.masked_fill(~mask.to(labels.device).bool(), IGNORED)
    return kl_loss(student, source, labels, overwrite=True)


def positions(batch: Batch, *, decodes: bool) -> int:
    """The number of positions of a batch that count."""
    mask = _mask(batch, decodes=decodes)
    return batch["decoder_input_ids" if decodes else "input_ids"].numel() if mask is None else int(mask.bool().sum())


def _mask(batch: Batch, *, decodes: bool) -> Tensor | None:
    return batch.get("decoder_attention_mask" if decodes else "attention_mask")
