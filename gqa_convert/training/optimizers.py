"""Builds the optimizer of a run."""

import torch
from torch import nn

from gqa_convert.training.adafactor import Adafactor
from gqa_convert.training.recipe import Recipe


def build_optimizer(model: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    """The recipe's optimizer of the parameters with gradients: matrices with weight decay, vectors without."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = {"params": [each for each in trained if each.ndim >= 2], "weight_decay": recipe.weight_decay}
    vectors = {"params": [each for each in trained if each.ndim < 2], "weight_decay": 0.0}
    groups = [group for group in (matrices, vectors) if group["params"]]
    if recipe.optimizer == "adafactor":
        return Adafactor(groups, lr=recipe.learning_rate)
    return torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(0.9, 0.95), eps=1e-8, fused=True)
