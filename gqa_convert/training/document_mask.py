"""Documents packed into one row that do not attend to one another.

transformers builds such masks, including sliding windows and chunks, from position ids that restart with each document.
Not every model's class does, so each is tried before it is trained.
"""

import inspect
from typing import Any

import torch

from gqa_convert.errors import RecipeError
from gqa_convert.families.context_length import short_context

_LENGTH = 8
_NOISE = 0.05
"""The largest difference of logits, as a share of their standard deviation, that counts as rounding. It occurs if
experts process a different number of tokens.
"""


def check_apart(name: str, model: Any, length: int) -> None:
    """Run a model on two packed documents, and check that neither changes when the other does.

    Args:
        name: of the checkpoint, for the message.
        model: a transformers model; if it is sharded, all processes must call this.
        length: the tokens of a row.

    Raises:
        RecipeError: one document's text reaches the other.
    """
    short = short_context(model.config.to_dict())
    if short is not None and length > short:
        raise RecipeError(
            f"document_mask with a sequence_length of {length} is impossible, because {name} chooses its rotary frequencies (longrope) by the "
            f"longest document of a batch, above or below {short} tokens: lower sequence_length to {short}, or remove document_mask"
        )
    parameters = inspect.signature(model.forward).parameters.values()
    takes_positions = any(each.name == "position_ids" or each.kind == each.VAR_KEYWORD for each in parameters)
    if not takes_positions or _leaks(model):
        raise RecipeError(
            f"one document changes what {name} ({model.config.model_type}) computes for another in the same row: remove document_mask "
            "from the recipe"
        )


def _leaks(model: Any) -> bool:
    vocabulary = model.get_input_embeddings().weight.shape[0]
    ids = torch.arange(2 * _LENGTH, device=model.device).repeat(3, 1)
    ids[1, :_LENGTH] += 2 * _LENGTH
    ids[2, _LENGTH:] += 2 * _LENGTH
    positions = torch.arange(_LENGTH, device=model.device).repeat(3, 2)
    was_training = model.training
    with torch.no_grad():
        output = model.eval()(input_ids=ids % vocabulary, position_ids=positions, use_cache=False)
    model.train(was_training)
    whole, first_changed, second_changed = output.logits.float()
    # The first token of a document attends only to itself, so that a leak of text around the document shows there
    # first.
    moved = max((whole - first_changed)[_LENGTH].abs().max(), (whole - second_changed)[0].abs().max())
    return bool(moved > _NOISE * whole.std())
