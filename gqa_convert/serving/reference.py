"""What transformers computes on a checkpoint, with which the engines are compared."""

from pathlib import Path

import numpy as np

from gqa_convert.checkpoint.strict_json import JsonObject
from gqa_convert.errors import CorruptCheckpointError
from gqa_convert.families.context_length import stated_positions
from gqa_convert.families.loading import check_complete, explained, load_model

from .request import NEW_TOKENS, TokenIds
from .worker import OK, Outcome

NEEDS_HEAD = "engines are compared by its predictions; convert the language model that the checkpoint was made from"
"""Advice for a checkpoint that was saved without its language-model head."""
_LENGTHS = (5, 48, 320)
"""Tokens of the prompts: with some hundred, a wrong rotary base shows."""


def make_prompts(config: JsonObject) -> TokenIds:
    """Prompts of random tokens and of increasing length, which leave room for the new tokens."""
    room = (stated_positions(config) or max(_LENGTHS) + NEW_TOKENS) - NEW_TOKENS
    first = min(8, config["vocab_size"] - 1)  # the first ids are often special tokens
    ids = np.random.default_rng(0).integers(first, config["vocab_size"], max(_LENGTHS)).tolist()
    return [ids[:length] for length in sorted({max(1, min(length, room)) for length in _LENGTHS})]


def ask_transformers(folder: Path) -> tuple[TokenIds, Outcome]:
    """Prompts, and the greedy tokens and the logits of a checkpoint in float32, with eager attention.

    The tokens are decoded with the K/V cache, and the logits from which each is chosen are computed without one.

    Raises:
        CorruptCheckpointError: transformers can't run the checkpoint, or its logits are not finite.
        NoLanguageModelError: it was saved without its language-model head.
    """
    import torch
    from transformers import GenerationConfig

    with explained(str(folder)), torch.inference_mode():
        model, missing = load_model(folder, torch.float32, attn_implementation="eager")
        check_complete(str(folder), folder, missing, NEEDS_HEAD)
        prompts = make_prompts(model.config.get_text_config().to_dict())
        # the checkpoint's own generation config could stop at a token or penalise repetition
        model.generation_config = GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)
        tokens, logits = [], []
        for prompt in prompts:
            made = model.generate(torch.tensor([prompt]))
            tokens.append(made[0, len(prompt) :].tolist())
            read = model(input_ids=made[:, :-1]).logits
            logits.append(read[0, len(prompt) - 1 :].float().numpy())
    if not all(np.isfinite(each).all() for each in logits):
        raise CorruptCheckpointError(
            f"{folder}: transformers computes logits that are not finite, so nothing can be compared with them"
        )
    return prompts, Outcome(OK, tokens=tokens, logits=logits)
