"""Loads the models of a run and places them on devices; the student may be replicated or sharded."""

from pathlib import Path
from typing import Any

import torch

from gqa_convert.families.loading import check_complete
from gqa_convert.training import sharding
from gqa_convert.training.dropout import set_dropout
from gqa_convert.training.lora import add_adapters, loading_options
from gqa_convert.training.opening import NEEDS_HEAD, explained
from gqa_convert.training.optimizers import choose_trained
from gqa_convert.training.recipe import Recipe
from gqa_convert.training.recomputation import recompute


def load_student(recipe: Recipe, folder: Path, layout: sharding.Layout) -> Any:
    """The model to train, in float32 on the CPU, with the recipe's dropout and trained parameters; or with adapters, the
    only trained parameters, on weights in the type that `lora.loading_options` states.

    Raises:
        CorruptCheckpointError: transformers can't load it, or it lacks parameters.
        NoLanguageModelError: the model was saved without its language-model head.
    """
    with explained(recipe.model):
        options = {"dtype": torch.float32} if recipe.lora is None else loading_options(recipe)
        model, missing = sharding.load(folder, **options, by_first=layout.sharded)
    check_complete(recipe.model, folder, model, missing, NEEDS_HEAD)
    if recipe.gradient_checkpointing:
        recompute(model, recipe.checkpointing_interval, recipe.checkpointing_policy)
    set_dropout(model, recipe.dropout)
    if recipe.lora is None:
        choose_trained(model, recipe.trainable)
    else:
        add_adapters(model, recipe.lora)
    return model.train()


def place_student(model: Any, accelerator: Any, layout: sharding.Layout, *, bf16: bool) -> Any:
    """Place the student on the device of this process: whole for a single process, otherwise replicated or sharded."""
    if layout.sharded:
        return sharding.shard(model, accelerator.device, layout, bf16=bf16)
    if layout.processes == 1:
        return model.to(accelerator.device)
    return sharding.replicate(model, accelerator.device)


def place_fixed(model: Any, accelerator: Any, layout: sharding.Layout) -> Any:
    """Place a model without gradients, whole on every device, or sharded if the student is."""
    if layout.sharded:
        return sharding.shard(model, accelerator.device, layout, bf16=False)
    return model.to(accelerator.device)
