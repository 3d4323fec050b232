"""The optimizers by name, and the learning rates, which are closed forms of the step, so that a
resumed run needs no state.
"""

import math
from collections.abc import Mapping
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:  # recipes are read without torch
    from torch import nn
    from torch.optim import Optimizer

    from .recipe import Recipe


class OptimizerFacts(NamedTuple):
    """An optimizer.

    Attributes:
        name: its class, as `module:name`.
        options: of the class, beside parameters, rate and weight decay.
        numbers: how many numbers it keeps for each trained parameter, for the estimate of memory.
    """

    name: str
    options: Mapping[str, Any]
    numbers: int


OPTIMIZERS = {
    "adamw": OptimizerFacts(
        "torch.optim:AdamW", {"betas": (0.9, 0.95), "eps": 1e-8, "fused": True}, numbers=2
    ),
    # it keeps two vectors for a matrix
    "adafactor": OptimizerFacts("gqa_convert.training.adafactor:Adafactor", {}, numbers=0),
}


def build_optimizer(model: "nn.Module", recipe: "Recipe") -> "Optimizer":
    """The recipe's optimizer of the parameters with gradients: matrices with weight decay, vectors
    without.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [each for each in trained if each.ndim >= 2]
    vectors = [each for each in trained if each.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": recipe.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    facts = OPTIMIZERS[recipe.optimizer]
    filled = [group for group in groups if group["params"]]
    make = resolve_name(facts.name)
    return make(filled, lr=recipe.learning_rate, **facts.options)


def share_of_peak(recipe: "Recipe", step: int, steps: int, warmup: int) -> float:
    """The share of the peak learning rate at a step, counted from 1, in a run of `steps` steps.

    After a linear warm-up, `constant` stays at the peak; `cosine` is half a cosine down to the
    recipe's `final_learning_rate` (Loshchilov & Hutter 2017, without restarts); `wsd` is constant
    and falls linearly over the last `decay_share` of the steps (after Hu et al. 2024, whose decay
    is exponential).
    """
    if step <= warmup:
        return step / warmup
    if recipe.schedule == "constant":
        return 1.0
    if recipe.schedule == "cosine":
        left = 0.5 * (1 + math.cos(math.pi * ((step - warmup) / (steps - warmup))))
    else:
        decay = min(max(1, round(recipe.decay_share * steps)), steps - warmup)
        left = min(1.0, (steps - step) / decay)
    return recipe.final_learning_rate + (1 - recipe.final_learning_rate) * left
