"""Makes a recipe from plain data: reads each key by its declaration, then checks the keys against one another."""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gqa_convert.errors import RecipeError
from gqa_convert.text.keys import REQUIRED, read_keys
from gqa_convert.text.objectives import OBJECTIVES
from gqa_convert.text.scalars import shown
from gqa_convert.training.recipe.pairs import check_pairs
from gqa_convert.training.recipe.schema import KEYS, Recipe


def make_recipe(values: Mapping[str, Any]) -> Recipe:
    """A recipe from plain data, such as `Recipe.resolved()` returns.

    Raises:
        RecipeError: a key is unknown, missing, malformed, or contradicts another.
    """
    read = read_keys(Recipe, values)
    for name, declared in KEYS.items():
        if declared.default is REQUIRED and name not in read:
            raise RecipeError(f"the recipe has no key {name!r}: {_as_advice(declared.help)}")
    recipe = Recipe(**read)
    if recipe.teacher is not None and recipe.distillation_weight is None:
        recipe = dataclasses.replace(recipe, distillation_weight=1.0)
    _check_budget(recipe)
    _check_own_text(recipe)
    _check_folders(recipe)
    _check_teacher(recipe)
    check_pairs(recipe)
    if recipe.lora is not None and recipe.trainable != "all":
        raise RecipeError(
            f"lora trains adapters alone, and trainable is {recipe.trainable}: remove trainable, and choose with lora.targets"
        )
    if recipe.document_mask and recipe.objective != "auto" and not OBJECTIVES[recipe.objective].masks_documents:
        raise RecipeError(
            f"document_mask belongs to the causal objective, and objective is {recipe.objective}: remove one of them"
        )
    if recipe.shard_size is not None and recipe.sharding != "hybrid":
        raise RecipeError(
            f"shard_size is {recipe.shard_size} and sharding is {recipe.sharding}: set sharding to hybrid, or remove shard_size"
        )
    if recipe.evaluate_every is not None and recipe.evaluation_data is None:
        raise RecipeError(
            f"evaluate_every is {recipe.evaluate_every} and there is no evaluation_data: name text to evaluate on"
        )
    return recipe


def _as_advice(help_text: str) -> str:
    """Advice on the value to give, from the first clause of a key's help."""
    meaning = help_text.rstrip(".").split(":")[0].split(";")[0]
    return f"give {meaning[0].lower()}{meaning[1:]}"


def _check_budget(recipe: Recipe) -> None:
    if recipe.tokens is not None and (recipe.alpha is not None or recipe.pretraining_tokens is not None):
        second = "alpha" if recipe.alpha is not None else "pretraining_tokens"
        raise RecipeError(f"tokens and {second} both state the budget: keep tokens, or alpha with pretraining_tokens")
    if recipe.tokens is None and (recipe.alpha is None or recipe.pretraining_tokens is None):
        if recipe.alpha is None and recipe.pretraining_tokens is None:
            raise RecipeError("the recipe states no budget: give tokens (such as 2B), or alpha with pretraining_tokens")
        given, missing = (
            ("alpha", "pretraining_tokens") if recipe.pretraining_tokens is None else ("pretraining_tokens", "alpha")
        )
        raise RecipeError(f"{given} is given without {missing}: give both, or tokens alone")
    if recipe.sequence_length is not None and recipe.tokens_per_step < recipe.sequence_length:
        raise RecipeError(
            f"tokens_per_step is {recipe.tokens_per_step} and sequence_length is {recipe.sequence_length}: "
            "a step must hold at least one sequence"
        )
    if recipe.budget_tokens < recipe.tokens_per_step:
        raise RecipeError(
            f"the budget is {recipe.budget_tokens} tokens and tokens_per_step is {recipe.tokens_per_step}: "
            "raise the budget or lower tokens_per_step"
        )


def _check_own_text(recipe: Recipe) -> None:
    if any(source.is_self for source in recipe.evaluation_data or ()):
        raise RecipeError(
            "evaluation_data is self, text that the source writes: name real text, on which a loss means something"
        )


def _check_folders(recipe: Recipe) -> None:
    output = _resolved("output", recipe.output)
    for name in ("model", "teacher"):
        value = getattr(recipe, name)
        if value is None:
            continue
        folder = _resolved(name, value)
        if folder == output:
            raise RecipeError(f"output and {name} are the same folder {value}: name another folder for output")
        if folder.is_dir() and (folder in output.parents or output in folder.parents):
            raise RecipeError(
                f"output {recipe.output} and {name} {value} are nested: name a separate folder for output"
            )
    if output.exists() and not output.is_dir():
        raise RecipeError(f"output {recipe.output} is a file: name a folder")
    if recipe.teacher is not None and os.path.normpath(recipe.teacher) == os.path.normpath(recipe.model):
        raise RecipeError(
            f"teacher and model are both {recipe.model}: the teacher is the checkpoint that the model was converted from"
        )


def _resolved(name: str, path: str) -> Path:
    try:
        found = Path(path).resolve()
        found.exists()
    except (OSError, RuntimeError) as problem:  # a name that is too long, a loop of links
        raise RecipeError(
            f"{name} {shown(path)} is not a path: {getattr(problem, 'strerror', None) or problem}"
        ) from None
    return found


def _check_teacher(recipe: Recipe) -> None:
    if recipe.teacher is not None:
        return
    for name, declared in KEYS.items():
        if declared.needs_teacher and getattr(recipe, name) != declared.default:
            raise RecipeError(
                f"{name} is given without a teacher: name the source checkpoint as teacher, or remove {name}"
            )
