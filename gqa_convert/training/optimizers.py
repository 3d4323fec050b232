"""What is trained, the optimizer, and its learning rates, which are closed forms of the step, so that a resumed run needs
no state.
"""

import math
from typing import Any

import torch
from torch import nn

from gqa_convert.families.composite import is_composite
from gqa_convert.training.adafactor import Adafactor
from gqa_convert.training.recipe import Recipe


def modules_of_text(model: Any) -> set[nn.Module]:
    """The modules of a model that text passes; in a composite model, its decoder and the output layer.

    Other parameters would get no gradient, which DDP takes for an error, and the optimizer would let them decay.
    """
    if not is_composite({"model_type": model.config.model_type}):
        return set(model.modules())
    decoder = model.get_decoder()
    found = {*decoder.modules(), model.get_output_embeddings()}
    for layer in decoder.modules():
        if hasattr(layer, "cross_attn"):  # Mllama's layers that look at a picture
            found -= set(layer.modules())
    return found


def fix_towers(model: Any) -> None:
    """Exclude from training what text does not pass."""
    for module in set(model.modules()) - modules_of_text(model):
        for parameter in module.parameters(recurse=False):
            parameter.requires_grad_(False)


def build_optimizer(model: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    """The recipe's optimizer of the parameters with gradients: matrices with weight decay, vectors without."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = {"params": [each for each in trained if each.ndim >= 2], "weight_decay": recipe.weight_decay}
    vectors = {"params": [each for each in trained if each.ndim < 2], "weight_decay": 0.0}
    groups = [group for group in (matrices, vectors) if group["params"]]
    if recipe.optimizer == "adafactor":
        return Adafactor(groups, lr=recipe.learning_rate)
    return torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(0.9, 0.95), eps=1e-8, fused=True)


def learning_rate(recipe: Recipe, step: int, steps: int) -> float:
    """The learning rate of a step, counted from 1, in a run of `steps` steps.

    After a linear warm-up, `constant` stays at the peak; `cosine` is half a cosine down to the recipe's
    `final_learning_rate` (Loshchilov & Hutter 2017, without restarts); `wsd` is constant and falls linearly over the
    last `decay_share` of the steps (after Hu et al. 2024, whose decay is exponential).
    """
    warmup = recipe.warmup(steps)
    final = recipe.final_learning_rate
    share = 1.0
    if step <= warmup:
        share = step / warmup
    elif recipe.schedule == "cosine":
        done = (step - warmup) / (steps - warmup)
        share = final + (1 - final) * 0.5 * (1 + math.cos(math.pi * done))
    elif recipe.schedule == "wsd":
        decay = min(max(1, round(recipe.decay_share * steps)), steps - warmup)
        share = final + (1 - final) * min(1.0, (steps - step) / decay)
    return recipe.learning_rate * share
