"""Chooses the objective and the sample length of a model by its config and its tokenizer."""

from collections.abc import Mapping
from typing import Any

from gqa_convert.data.objectives import OBJECTIVES, ModelKind
from gqa_convert.data.sources import KINDS
from gqa_convert.errors import RecipeError
from gqa_convert.families.context_length import SPAN_LENGTH, block_length, stated_positions
from gqa_convert.families.loading import hears, is_encoder_decoder
from gqa_convert.training.recipe import Recipe


def model_kind(config: Mapping[str, Any]) -> ModelKind:
    """The kind of a model with this config.json."""
    if hears(dict(config)):
        return "a model that hears"
    return "an encoder-decoder" if is_encoder_decoder(config) else "a decoder-only model"


def possible_objectives(config: Mapping[str, Any], tokenizer: Any) -> tuple[str, ...]:
    """The names of the objectives that suit a model, in the order of preference.

    Args:
        config: the content of config.json.
        tokenizer: the model's tokenizer.
    """
    kind = model_kind(config)
    return tuple(name for name, each in OBJECTIVES.items() if each.models == kind and each.load().suits(tokenizer))


def choose_objective(recipe: Recipe, config: Mapping[str, Any], tokenizer: Any) -> str:
    """The objective that a recipe names, or the first that suits the model and the data if it names none.

    Raises:
        RecipeError: the objective does not suit the model or its tokenizer; the message names the alternatives.
    """
    kind, possible = model_kind(config), possible_objectives(config, tokenizer)
    held = recipe.data[0].kind
    for name in possible:
        if recipe.objective == name or (recipe.objective == "auto" and held in OBJECTIVES[name].reads):
            return name
    stated = f"data holds {KINDS[held]}" if recipe.objective == "auto" else f"objective is {recipe.objective}"
    missing = [
        f", whose tokenizer has no {each.needs} for {name}"
        for name, each in OBJECTIVES.items()
        if each.models == kind and name not in possible
    ]
    choices = " or ".join(
        f"{name}, on {' or '.join(KINDS[held] for held in OBJECTIVES[name].reads)}" for name in possible
    )
    raise RecipeError(f"{stated} and {recipe.model} is {kind}{''.join(missing)}: use the objective {choices}")


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
