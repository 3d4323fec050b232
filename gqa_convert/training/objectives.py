"""Chooses the objective and the sample length of a model by its config and its tokenizer."""

from collections.abc import Mapping, Sequence
from typing import Any

from gqa_convert.checkpoint.strict_json import Config
from gqa_convert.errors import RecipeError
from gqa_convert.families.context_length import SPAN_LENGTH, block_length, stated_positions
from gqa_convert.families.loading import TASKS, auto_class, is_encoder_decoder
from gqa_convert.text.objectives import CAUSAL, OBJECTIVES, PAIRS
from gqa_convert.training.recipe import Recipe

_FIELDS = "source_field and target_field in data"


def check_input(name: str, config: Config) -> None:
    """Refuse models whose input is not text.

    Raises:
        RecipeError: the model reads audio.
    """
    if is_encoder_decoder(config) and auto_class(config) == TASKS[2]:
        raise RecipeError(
            f"{name} reads audio, and uptrain trains on text: use the conversion without training, or train it on speech with transformers' Trainer"
        )


def possible_objectives(config: Mapping[str, Any], tokenizer: Any) -> tuple[str, ...]:
    """The names of the objectives that suit a model with text input, in the order of preference.

    Args:
        config: the content of config.json.
        tokenizer: the model's tokenizer.
    """
    encoder_decoder = is_encoder_decoder(config)
    return tuple(
        name for name, each in OBJECTIVES.items() if each.encoder_decoder == encoder_decoder and each.suits(tokenizer)
    )


def choose_objective(recipe: Recipe, config: Mapping[str, Any], tokenizer: Any) -> str:
    """The objective that a recipe names, or the default if it names none.

    Raises:
        RecipeError: the objective does not suit the model or its tokenizer; the message names the alternatives.
    """
    possible, pairs = possible_objectives(config, tokenizer), recipe.data[0].holds_pairs
    if recipe.document_mask and possible != (CAUSAL,):
        raise RecipeError(
            f"document_mask needs a decoder-only model, and {recipe.model} is an encoder-decoder: remove document_mask"
        )
    if recipe.objective != "auto":
        if recipe.objective not in possible:
            raise RecipeError(_refusal(recipe, possible))
        return recipe.objective
    if possible == (CAUSAL,):
        if pairs:
            raise RecipeError(
                f"data names source_field and target_field, and {recipe.model} is a decoder-only model: add `format: chat` if they are a prompt and its response, or name the text with text_field"
            )
        return CAUSAL
    if any(source.format == "chat" for source in (*recipe.data, *(recipe.evaluation_data or ()))):
        raise RecipeError(
            f"data has format chat, and {recipe.model} is an encoder-decoder, which is trained on {_FIELDS}: name pairs of texts"
        )
    if pairs:
        return PAIRS
    if possible == (PAIRS,):
        raise RecipeError(
            f"{recipe.model} is an encoder-decoder whose tokenizer has no sentinel tokens, which training on running text needs: "
            f"use the objective pairs, with {_FIELDS}"
        )
    return possible[0]


def _refusal(recipe: Recipe, possible: Sequence[str]) -> str:
    objective, named = recipe.objective, f"objective is {recipe.objective} and {recipe.model}"
    if possible == (CAUSAL,):
        return f"{named} is a decoder-only model: use the objective causal, or remove objective"
    instead = f"use {_either([*possible[:-1], f'{PAIRS} (with {_FIELDS})'])}"
    if objective == CAUSAL:
        return f"{named} is an encoder-decoder: {instead}"
    return f"{named} has no {OBJECTIVES[objective].needs} in its tokenizer: {instead}"


def _either(choices: Sequence[str]) -> str:
    return " or ".join([", ".join(choices[:-1]), choices[-1]]) if len(choices) > 1 else choices[0]


def sample_length(recipe: Recipe, config: Mapping[str, Any]) -> int:
    """The tokens of a sample: those that the recipe states, or else the model's context length, at most 512 for an
    encoder-decoder.

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
