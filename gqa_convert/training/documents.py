"""Checks that a model keeps documents of a row apart: by its config before loading, and by a trial run."""

from collections.abc import Mapping
from typing import Any, Final

import torch

from gqa_convert.errors import RecipeError
from gqa_convert.families.context_length import short_context
from gqa_convert.families.table import FAMILIES
from gqa_convert.training.masks import model_inputs

_ATTENTION: Final = frozenset({"attention", "full_attention", "sliding_attention"})
"""Kinds of layers in which tokens interact only through attention."""
_LENGTH: Final = 8
_NOISE: Final = 0.05
"""The largest difference of logits, as a share of their standard deviation, that counts as rounding. It occurs if
experts process a different number of tokens.
"""


def refuse_mixing(name: str, config: Mapping[str, Any], length: int) -> None:
    """Refuse a checkpoint that is known to mix packed documents.

    Args:
        name: of the checkpoint, for the message.
        config: what its config.json holds.
        length: the tokens per row.

    Raises:
        RecipeError: the checkpoint mixes documents.
    """
    short = short_context(config)
    if short is not None and length > short:
        raise RecipeError(
            f"document_mask with a sequence_length of {length} is impossible, because {name} chooses its rotary frequencies (longrope) by the "
            f"longest document of a batch, above or below {short} tokens: lower sequence_length to {short}, or remove document_mask"
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
            f"{name} is of model type {family.model_type}, and document_mask is impossible because {reasons[0]}"
        )


def check_apart(name: str, model: Any) -> None:
    """Run a model on two packed documents, and check that neither changes when the other does.

    This covers cases that `refuse_mixing` can't know: model types without a record, and versions of transformers that
    build different masks.

    Args:
        name: of the checkpoint, for the message.
        model: a transformers model; if it is sharded, all processes must call this.

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
    # The first token of a document attends only to itself, so that a leak of text around the document shows there
    # first.
    moved = max((whole - first_changed)[_LENGTH].abs().max(), (whole - second_changed)[0].abs().max())
    if moved > _NOISE * whole.std():
        raise _refusal(
            f"one document changes what {name} ({model.config.model_type}) computes for another in the same row"
        )


def _refusal(what: str) -> RecipeError:
    return RecipeError(f"{what}: remove document_mask from the recipe")
