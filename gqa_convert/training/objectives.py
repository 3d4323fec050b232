"""Chooses the objective and the sample length of a model by its config and its tokenizer."""

from collections.abc import Mapping
from typing import Any

from gqa_convert.checkpoint.strict_json import Config
from gqa_convert.data.objectives import OBJECTIVES
from gqa_convert.errors import RecipeError
from gqa_convert.families.context_length import SPAN_LENGTH, block_length, stated_positions
from gqa_convert.families.loading import TASKS, auto_class, is_encoder_decoder
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
    """The objective that a recipe names, or the first that suits the model and the data if it names none.

    Raises:
        RecipeError: the objective does not suit the model or its tokenizer; the message names the alternatives.
    """
    model, encoder_decoder = recipe.model, is_encoder_decoder(config)
    if recipe.document_mask and encoder_decoder:
        raise RecipeError(
            f"document_mask needs a decoder-only model, and {model} is an encoder-decoder: remove document_mask"
        )
    possible = possible_objectives(config, tokenizer)
    if recipe.objective != "auto":
        if recipe.objective not in possible:
            raise RecipeError(_refusal(recipe, possible, encoder_decoder=encoder_decoder))
        return recipe.objective
    if encoder_decoder and any(source.format == "chat" for source in (*recipe.data, *(recipe.evaluation_data or ()))):
        raise RecipeError(
            f"data has format chat, and {model} is an encoder-decoder, which is trained on {_FIELDS}: name pairs of texts"
        )
    pairs = recipe.data[0].holds_pairs
    for name in possible:
        if OBJECTIVES[name].reads_pairs == pairs:
            return name
    if pairs:
        raise RecipeError(
            f"data names source_field and target_field, and {model} is a decoder-only model: add `format: chat` if they are a prompt and its response, or name the text with text_field"
        )
    raise RecipeError(
        f"{model} is an encoder-decoder whose tokenizer has no sentinel tokens, which training on running text needs: "
        f"use the objective pairs, with {_FIELDS}"
    )


def _refusal(recipe: Recipe, possible: tuple[str, ...], *, encoder_decoder: bool) -> str:
    stated = OBJECTIVES[recipe.objective]
    reason = f"has no {stated.needs} in its tokenizer"
    if stated.encoder_decoder != encoder_decoder:
        reason = "is an encoder-decoder" if encoder_decoder else "is a decoder-only model"
    choices = [f"{name} (with {_FIELDS})" if OBJECTIVES[name].reads_pairs else name for name in possible]
    return f"objective is {recipe.objective} and {recipe.model} {reason}: use the objective {' or '.join(choices)}"


def sample_length(recipe: Recipe, config: Mapping[str, Any]) -> int:
    """The tokens of a sample: those that the recipe states, or else the model's context length, at most 512 for an
    encoder-decoder.

    Raises:
        RecipeError: the recipe states more than the model has positions for.
    """
    stated, context, usual = recipe.sequence_length, stated_positions(config), block_length(config)
    if stated is not None and context is not None and stated > context:
        raise RecipeError(f"sequence_length is {stated} and {recipe.model} has positions for {context}: lower it")
    return stated or (min(usual, SPAN_LENGTH) if is_encoder_decoder(config) else usual)
