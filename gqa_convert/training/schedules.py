"""Learning rates: closed forms of the step, so that a resumed run needs no state."""

import math

from gqa_convert.training.recipe import Recipe


def learning_rate(recipe: Recipe, step: int, steps: int) -> float:
    """The learning rate of a step, counted from 1, in a run of `steps` steps.

    After a linear warm-up, `constant` stays at the peak; `cosine` is half a cosine down to the recipe's
    `final_learning_rate` (Loshchilov & Hutter 2017, without restarts); `wsd` is constant and falls linearly over the
    last `decay_share` of the steps (after Hu et al. 2024, whose decay is exponential).
    """
    warmup, final = recipe.warmup(steps), recipe.final_learning_rate
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
