"""Recipes of uptraining: a flat YAML file with `key=value` overrides, parsed into a validated, frozen `Recipe`.

Everything that can be refused without loading a model or a text is refused here. Plain YAML scalars stay text until the
key's declaration converts them, so that 1e9, 10B and 2e-4 are read as numbers and `no` as text (YAML 1.1 reads 1e9 as
text and `no` as false).
"""

from gqa_convert.text.sources import Source
from gqa_convert.training.recipe.files import conversion_command, read_recipe
from gqa_convert.training.recipe.lora import check_lora
from gqa_convert.training.recipe.making import make_recipe
from gqa_convert.training.recipe.schema import (
    BOOKKEEPING,
    BUDGET,
    CHANGEABLE,
    EXECUTION,
    KEYS,
    RECORDED,
    TRACKERS,
    Recipe,
    Schedule,
    Sharding,
    Trainable,
)

__all__ = [
    "BOOKKEEPING",
    "BUDGET",
    "CHANGEABLE",
    "EXECUTION",
    "KEYS",
    "RECORDED",
    "TRACKERS",
    "Recipe",
    "Schedule",
    "Sharding",
    "Source",
    "Trainable",
    "check_lora",
    "conversion_command",
    "make_recipe",
    "read_recipe",
]
