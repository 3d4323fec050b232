"""Whether a model can keep documents apart that are packed into one row: by its config, before it is loaded, and by
what it computes.
"""

from collections.abc import Mapping
from typing import Any, Final

import torch

from gqa_convert.errors import RecipeError
from gqa_convert.families.table import FAMILIES
from gqa_convert.training.masks import model_inputs

_ATTENTION: Final = frozenset({"attention", "full_attention", "sliding_attention"})
"""Kinds of layers in which tokens meet through attention alone."""
_LENGTH: Final = 8
_NOISE: Final = 0.05
"""Logits may differ by rounding, where experts take other numbers of tokens: by this share of their standard deviation
at most.
"""


def refuse_mixing(name: str, config: Mapping[str, Any], length: int) -> None:
    """Refuse a checkpoint that is known to mix packed documents.

    Args:
        name: of the checkpoint, for the message.
        config: what its config.json holds.
        length: tokens of a row.

    Raises:
        RecipeError: it does.
    """
    short = _short_context(config)
    if short is not None and length > short:
        raise RecipeError(
            f"document_mask with a sequence_length of {length} is impossible, since {name} chooses its rotary frequencies (longrope) by the "
            f"longest document of a batch, one above {short} tokens or none: lower sequence_length to {short}, or leave document_mask out"
        )
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None:
        return
    reasons = [reason for key, reason in family.document_constrained_when if config.get(key)]
    kinds = config.get("layer_types")
    if family.document_constraint and not (isinstance(kinds, list) and kinds and _ATTENTION.issuperset(kinds)):
        reasons.append(family.document_constraint)
    if reasons:
        raise _refusal(
            f"{name} is of model type {family.model_type}, and document_mask is impossible since {reasons[0]}"
        )


def _short_context(config: Mapping[str, Any]) -> int | None:
    """The length from which on LongRoPE takes its other frequencies, for all documents of a batch at once; None for
    other positions.
    """
    for key in ("rope_parameters", "rope_scaling"):
        rotary = config.get(key)
        if isinstance(rotary, Mapping) and rotary.get("rope_type", rotary.get("type")) in ("longrope", "su"):
            stated = config.get("original_max_position_embeddings") or rotary.get("original_max_position_embeddings")
            return stated if isinstance(stated, int) else None
    return None


def check_apart(name: str, model: Any) -> None:
    """Run a model on two packed documents, and see that neither changes when the other does.

    This catches what `refuse_mixing` can't know of: model types without a record, and versions of transformers that
    build other masks.

    Args:
        name: of the checkpoint, for the message.
        model: a model of transformers; on all processes at once, where it is sharded.

    Raises:
        RecipeError: one document's text reaches the other.
    """
    vocabulary = model.get_input_embeddings().weight.shape[0]
    ids = torch.arange(2 * _LENGTH, device=model.device).repeat(3, 1)
    ids[1, :_LENGTH] += 2 * _LENGTH
    ids[2, _LENGTH:] += 2 * _LENGTH
    places = torch.arange(2 * _LENGTH, device=model.device).repeat(3, 1)
    batch = {"input_ids": ids % vocabulary, "position_ids": places % _LENGTH, "document_ids": places // _LENGTH}
    was_training = model.training
    with torch.no_grad():
        logits = model.eval()(**model_inputs(model, batch), use_cache=False).logits.float()
    model.train(was_training)
    whole, first_changed, second_changed = logits
    # The first token of a document sees itself alone: text before or behind the document reaches it first.
    moved = max((whole - first_changed)[_LENGTH].abs().max(), (whole - second_changed)[0].abs().max())
    if moved > _NOISE * whole.std():
        raise _refusal(
            f"one document changes what {name} ({model.config.model_type}) computes for another in the same row"
        )


def _refusal(what: str) -> RecipeError:
    return RecipeError(f"{what}: leave document_mask out of the recipe")
