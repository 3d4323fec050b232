"""The objectives and sample lengths that suit a model, by its config and its tokenizer."""

from collections.abc import Mapping, Sequence
from typing import Any

from gqa_convert.errors import RecipeError
from gqa_convert.families.context_length import SPAN_LENGTH, block_length, stated_positions
from gqa_convert.families.loading import TASKS, auto_class, is_encoder_decoder
from gqa_convert.text.objectives import CAUSAL, OBJECTIVES, PAIRS
from gqa_convert.training.recipe import Recipe

_FIELDS = "source_field and target_field in data"


def check_input(name: str, config: dict[str, Any]) -> None:
    """Refuse models that do not read text.

    Raises:
        RecipeError: the model reads sound.
    """
    if is_encoder_decoder(config) and auto_class(config) == TASKS[2]:
        raise RecipeError(
            f"{name} reads sound, and uptrain trains on text: use the conversion without training, or train it on speech with transformers' Trainer"
        )


def possible_objectives(config: Mapping[str, Any], tokenizer: Any) -> tuple[str, ...]:
    """The names of the objectives that suit a model that reads text, in the order of preference.

    Args:
        config: what config.json holds.
        tokenizer: the model's.
    """
    encoder_decoder = is_encoder_decoder(config)
    return tuple(
        name for name, each in OBJECTIVES.items() if each.encoder_decoder == encoder_decoder and each.suits(tokenizer)
    )


def choose_objective(recipe: Recipe, config: Mapping[str, Any], tokenizer: Any) -> str:
    """The objective that a recipe names or leaves open.

    Raises:
        RecipeError: the model or its tokenizer can't be trained like that; the message names what can be done.
    """
    possible, pairs = possible_objectives(config, tokenizer), recipe.data[0].holds_pairs
    if recipe.document_mask and possible != (CAUSAL,):
        raise RecipeError(
            f"document_mask is for decoders alone, and {recipe.model} is an encoder-decoder: leave document_mask out"
        )
    if recipe.objective != "auto":
        if recipe.objective not in possible:
            raise RecipeError(_refusal(recipe, possible))
        return recipe.objective
    if possible == (CAUSAL,):
        if pairs:
            raise RecipeError(
                f"data names source_field and target_field, and {recipe.model} is a decoder alone: name the text with text_field instead"
            )
        return CAUSAL
    if pairs:
        return PAIRS
    if possible == (PAIRS,):
        raise RecipeError(
            f"{recipe.model} is an encoder-decoder whose tokenizer has neither sentinel tokens nor a mask token to train on running text with: "
            f"use the objective pairs, with {_FIELDS}"
        )
    return possible[0]


def _refusal(recipe: Recipe, possible: Sequence[str]) -> str:
    objective, named = recipe.objective, f"objective is {recipe.objective} and {recipe.model}"
    if possible == (CAUSAL,):
        return f"{named} is a decoder alone: use the objective causal, or leave objective out"
    instead = f"use {_either([*possible[:-1], f'{PAIRS} (with {_FIELDS})'])}"
    if objective == CAUSAL:
        return f"{named} is an encoder-decoder: {instead}"
    return f"{named} has no {OBJECTIVES[objective].needs} in its tokenizer: {instead}"


def _either(choices: Sequence[str]) -> str:
    return " or ".join([", ".join(choices[:-1]), choices[-1]]) if len(choices) > 1 else choices[0]


def sample_length(recipe: Recipe, config: Mapping[str, Any]) -> int:
    """Tokens of a sample, where the recipe leaves them open: as many as the model reads, of an encoder-decoder up to
    512.

    Raises:
        RecipeError: the recipe states more than the model has positions for.
    """
    context = stated_positions(config)
    if recipe.sequence_length is not None and context is not None and recipe.sequence_length > context:
        raise RecipeError(
            f"sequence_length is {recipe.sequence_length} and {recipe.model} has positions for {context}: lower it"
        )
    return recipe.sequence_length or min(
        block_length(config), SPAN_LENGTH if is_encoder_decoder(config) else block_length(config)
    )
