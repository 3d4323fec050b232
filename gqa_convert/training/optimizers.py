"""Selects the parameters to train and builds the optimizer that trains them."""

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from gqa_convert.errors import RecipeError, UnsupportedFamilyError
from gqa_convert.families.table import Family, family_of
from gqa_convert.training.adafactor import Adafactor
from gqa_convert.training.recipe import Recipe, Trainable


def trained_names(family: Family, names: Iterable[str], trainable: Trainable) -> list[str]:
    """The parameter names that the recipe's `trainable` selects, in their order.

    `attention` selects every attention projection with its bias, in encoders and cross-attention too; `kv` selects the
    key and value projections. A fused projection that holds keys and values belongs to both. It is a single tensor, so
    its query rows are trained too. Query and key norms and position biases are not selected.
    """
    if trainable == "all":
        return list(names)
    projections = [family.key, family.value] if family.fused is None else [family.fused]
    if trainable == "attention":
        projections += [family.query, family.output]
    pattern = re.compile(rf"(?:.*\.)?(?:{_either(family.attention)})\.(?:{_either(projections)})\.(?:weight|bias)")
    return [name for name in names if pattern.fullmatch(name) and family.owns(name)]


def _either(names: Iterable[str]) -> str:
    return "|".join(re.escape(name) for name in names)


def choose_trained(model: Any, trainable: Trainable) -> list[str]:
    """Enable gradients only for the parameters that `trainable` selects; parameters that the model itself freezes stay
    frozen.

    Returns:
        The names of the trained parameters.

    Raises:
        RecipeError: no parameter is selected, or the attention modules of the model's type are unknown.
    """
    chosen = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    if trainable != "all":
        try:
            chosen = trained_names(family_of(model.config.to_dict()), chosen, trainable)
        except UnsupportedFamilyError:
            chosen = []
    if not chosen:
        model_type = getattr(getattr(model, "config", None), "model_type", None)
        raise RecipeError(
            f"trainable is {trainable}, and model type {model_type!r} has no parameters that are known to be of that kind: use all"
        )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in chosen)
    return chosen


def build_optimizer(model: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    """The recipe's optimizer of the parameters with gradients: matrices with weight decay, vectors without."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trained if parameter.ndim >= 2]
    vectors = [parameter for parameter in trained if parameter.ndim < 2]
    groups: list[dict[str, Any]] = []
    if matrices:
        groups.append({"params": matrices, "weight_decay": recipe.weight_decay})
    if vectors:
        groups.append({"params": vectors, "weight_decay": 0.0})
    if recipe.optimizer == "adafactor":
        return Adafactor(groups, lr=recipe.learning_rate)
    fused = all(parameter.device.type in ("cuda", "cpu") for parameter in trained)
    return torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(0.9, 0.95), eps=1e-8, fused=fused)
