"""Builds the optimizer of a run."""

from typing import Any

import torch
from torch import nn

from gqa_convert.training.adafactor import Adafactor
from gqa_convert.training.recipe import Recipe


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
