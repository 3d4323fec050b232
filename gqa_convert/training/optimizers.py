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

Groups = list[dict[str, Any]]


def trained_names(family: Family, names: Iterable[str], trainable: Trainable) -> list[str]:
    """The parameter names that the recipe's `trainable` selects, in their order.

    `attention` selects every attention projection with its bias, in encoders and cross-attention too; `kv` selects the
    key and value projections. A fused projection that holds keys and values belongs to both. It is a single tensor, so
    its query rows are trained too. Query and key norms and position biases are not selected.
    """
    if trainable == "all":
        return list(names)
    keys_values = [family.key, family.value] if family.fused is None else [family.fused]
    if family.fused is None or trainable == "attention":
        keys_values += [] if trainable == "kv" else [family.query, family.output]
    pattern = re.compile(rf"(?:.*\.)?(?:{_either(family.attention)})\.(?:{_either(keys_values)})\.(?:weight|bias)")
    return [name for name in names if pattern.fullmatch(name) and family.owns(name)]


def _either(names: Iterable[str]) -> str:
    return "|".join(re.escape(name) for name in names)


def choose_trained(model: nn.Module, trainable: Trainable) -> list[str]:
    """Enable gradients only for the parameters that `trainable` selects; parameters that the model itself freezes stay
    frozen.

    Returns:
        The names of the trained parameters.

    Raises:
        RecipeError: no parameter is selected, or the attention modules of the model's type are unknown.
    """
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    if trainable != "all":
        try:
            to_dict = getattr(getattr(model, "config", None), "to_dict", dict)
            names = trained_names(family_of(to_dict()), names, trainable)
        except UnsupportedFamilyError:
            raise RecipeError(
                f"trainable is {trainable}, and the attention modules of model type {model_type!r} are unknown: use all"
            ) from None
    if not names:
        raise RecipeError(
            f"trainable is {trainable}, and model type {model_type!r} has no parameter of that kind to train: use all"
        )
    chosen = set(names)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in chosen)
    return names


def build_optimizer(model: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    """Build the recipe's optimizer for the parameters with gradients; call `choose_trained` first."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        raise RecipeError(
            f"trainable is {recipe.trainable}, and no parameter of the model has gradients enabled: use all"
        )
    if recipe.optimizer == "adafactor":
        return Adafactor(_decay_groups(trained, recipe.weight_decay), lr=recipe.learning_rate)
    return _adamw(trained, recipe)


def _decay_groups(parameters: Iterable[nn.Parameter], weight_decay: float) -> Groups:
    """Two parameter groups: matrices with weight decay, and vectors (biases, gains) without."""
    parameters = list(parameters)
    groups: Groups = [
        {"params": [parameter for parameter in parameters if parameter.ndim >= 2], "weight_decay": weight_decay},
        {"params": [parameter for parameter in parameters if parameter.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _adamw(parameters: list[nn.Parameter], recipe: Recipe) -> torch.optim.AdamW:
    """Build AdamW (Loshchilov & Hutter 2019), with the fused kernel if every parameter's device supports it."""
    fused = all(parameter.device.type in ("cuda", "cpu") and parameter.is_floating_point() for parameter in parameters)
    groups = _decay_groups(parameters, recipe.weight_decay)
    return torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(recipe.beta1, recipe.beta2), eps=1e-8, fused=fused)
