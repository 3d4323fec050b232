"""What a user should know of a run before its first step: work that is wasted, text that is read
too often, and switches of a launcher that have no effect.
"""

import os
from collections.abc import Iterator
from typing import Any

from gqa_convert.data.samples import Samples
from gqa_convert.runtime.machine import multiplies_bfloat16

from .recipe import Recipe

OFTEN = 4
"""Times that a text can be read before it teaches much less than as much new text (Muennighoff et
al. 2023, section 5).
"""

_SWITCHES = {
    "mixed_precision": ("no", "precision decides"),
    "gradient_accumulation_steps": ("1", "tokens_per_step and micro_batch_size decide"),
    "dynamo_backend": ("no", "compile decides"),
}
"""Of a launcher's configuration: the values that mean nothing, and what decides instead."""


def notes(recipe: Recipe, samples: Samples, processes: int, device: Any) -> Iterator[str]:
    """Whole sentences, of which most runs have none."""
    if recipe.precision == "bf16" and not multiplies_bfloat16(device):
        yield "this processor is slower in bfloat16 than in float32: precision=no takes less time"
    per_step = recipe.samples_per_step(samples.tokens_per_sample)
    if idle := fillers(per_step, processes, recipe.micro_batch_size):
        whole = processes * recipe.micro_batch_size
        tokens = round(-(-per_step // whole) * whole * samples.tokens_per_sample)
        yield (
            f"{idle} of {processes} processes compute one batch in each step that does not count, "
            f"because a step has {per_step} samples: with tokens_per_step={tokens} none would"
        )
    for text, times in zip(samples.sources, samples.times_read(recipe.budget_tokens), strict=True):
        if times > OFTEN:
            yield (
                f"{text.label} has {text.size:,} tokens and is read {times:.0f} times, and from "
                f"the {OFTEN}th time on text teaches little: add text, or lower the budget"
            )
    for switch, (neutral, deciding) in _SWITCHES.items():
        stated = os.environ.get(f"ACCELERATE_{switch.upper()}", neutral).lower()
        if stated not in (neutral, recipe.precision):
            yield f"the launcher's {switch} {stated} has no effect: the recipe's {deciding}"


def fillers(samples: int, processes: int, size: int) -> int:
    """How many processes fill their last batch of a step with what does not count.

    Args:
        samples: of the step, which the processes share one by one.
        processes: of the run.
        size: samples of a batch.
    """
    batches = [-(-len(range(rank, samples, processes)) // size) for rank in range(processes)]
    return sum(each < max(batches) for each in batches)
