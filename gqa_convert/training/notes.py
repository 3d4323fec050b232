"""What a user should know of a run before its first step: slow arithmetic, text that is read too
often, and switches of a launcher that have no effect.
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


def notes(recipe: Recipe, samples: Samples, device: Any) -> Iterator[str]:
    """Whole sentences, of which most runs have none."""
    if recipe.precision == "bf16" and not multiplies_bfloat16(device):
        yield "this processor is slower in bfloat16 than in float32: precision=no takes less time"
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
