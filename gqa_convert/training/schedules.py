"""Learning-rate schedules: the factor of the peak rate as a closed form of the step, counted from 1.

Every schedule begins with a linear warm-up, which reaches 1 at its last step. Schedules have no state, so a resumed run
needs none.

    S   steps of the run            W   steps of warm-up
    f   share that it ends at       s   the step, 1 to S
"""

import math

from gqa_convert.training.recipe import Recipe, Schedule


def constant(step: int, warmup: int) -> float:
    """s / W, then 1."""
    return min(1.0, step / max(1, warmup))


def cosine(step: int, steps: int, warmup: int, final: float) -> float:
    """After the warm-up, half a cosine from 1 down to f at the last step.

    Loshchilov & Hutter 2017 (SGDR), without restarts.
    """
    if step <= warmup:
        return step / warmup
    share = (step - warmup) / (steps - warmup)
    return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * share))


def wsd(step: int, steps: int, warmup: int, final: float, decay_share: float) -> float:
    """Warm-up, then constant at 1, then linear decay to f over the last `decay_share` of the steps.

    Hu et al. 2024 (MiniCPM), where the decay is exponential; the linear decay ends exactly at f. A warm-up that
    overlaps the decay shortens it.
    """
    if step <= warmup:
        return step / warmup
    decay = min(max(1, round(decay_share * steps)), steps - warmup)
    return final + (1 - final) * min(1.0, (steps - step) / decay)


def factor(
    schedule: Schedule, step: int, steps: int, warmup: int, *, final: float = 0.1, decay_share: float = 0.2
) -> float:
    """The learning rate of a step as a share of the peak.

    Args:
        schedule: the name of the schedule.
        step: from 1 to `steps`.
        steps: the number of steps in the whole run.
        warmup: the number of warm-up steps.
        final: the factor at which cosine and wsd end.
        decay_share: the share of the steps in which wsd decays.
    """
    if not 1 <= step <= steps or not 0 <= warmup <= steps:
        raise ValueError(f"step {step} of {steps}, {warmup} of them warm-up")
    match schedule:
        case "constant":
            return constant(step, warmup)
        case "cosine":
            return cosine(step, steps, warmup, final)
        case "wsd":
            return wsd(step, steps, warmup, final, decay_share)


def learning_rate(recipe: Recipe, step: int, steps: int) -> float:
    """The learning rate of a step, counted from 1, in a run of the recipe with this number of steps."""
    share = factor(
        recipe.schedule,
        step,
        steps,
        recipe.warmup(steps),
        final=recipe.final_learning_rate,
        decay_share=recipe.decay_share,
    )
    return recipe.learning_rate * share
