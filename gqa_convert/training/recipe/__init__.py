"""Recipes of uptraining: a flat YAML file, with `key=value` overrides, made into a checked and frozen `Recipe`.

Everything that can be refused without loading a model or a text is refused here. Plain YAML scalars stay text until the
key's own reader makes a number of them, so that 1e9, 10B and 2e-4 mean what they look like (YAML 1.1 reads 1e9 as text,
and `no` as false).
"""

from gqa_convert.training.recipe.files import read_recipe
from gqa_convert.training.recipe.making import KEYS, make_recipe
from gqa_convert.training.recipe.schema import (
    BOOKKEEPING,
    BUDGET,
    EXECUTION,
    TRACKERS,
    DataSource,
    Recipe,
    Schedule,
    Trainable,
)

__all__ = [
    "BOOKKEEPING",
    "BUDGET",
    "EXECUTION",
    "KEYS",
    "TRACKERS",
    "DataSource",
    "Recipe",
    "Schedule",
    "Trainable",
    "make_recipe",
    "read_recipe",
]
