"""Greedy tokens and logits of a model of transformers, with which the engines are compared."""

from typing import Any

from .client import NEW_TOKENS


def greedy_tokens(model: Any, prompts: list[list[int]]) -> list[list[int]]:
    """The greedy tokens after each prompt, with the model's K/V cache; the checkpoint's generation config is ignored.

    Args:
        model: a model with `generate`. Its generation config is replaced, because it could stop at a token or penalise
            repetition.
        prompts: token ids.
    """
    import torch
    from transformers import GenerationConfig

    model.generation_config = GenerationConfig(
        max_new_tokens=NEW_TOKENS, do_sample=False, use_cache=True, pad_token_id=0
    )
    made = []
    with torch.no_grad():
        for prompt in prompts:
            ids = torch.tensor([prompt])
            made.append(model.generate(ids, attention_mask=torch.ones_like(ids))[0, len(prompt) :].tolist())
    return made


def logits_at(model: Any, sequences: list[list[int]], positions: list[list[int]]) -> list[Any]:
    """Float32 logits [positions, vocabulary] of each sequence, computed without a cache.

    Args:
        model: a model that accepts `input_ids` and `attention_mask`.
        sequences: token ids.
        positions: the positions of each sequence.
    """
    import torch

    found = []
    with torch.no_grad():
        for sequence, places in zip(sequences, positions, strict=True):
            ids = torch.tensor([sequence])
            found.append(model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0, places].float().numpy())
    return found
