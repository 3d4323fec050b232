"""Learning rates of single parameters, by patterns of their names."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from gqa_convert.errors import RecipeError
from gqa_convert.text.scalars import exact, shown

FROZEN = "frozen"


@dataclass(frozen=True, slots=True)
class RateRule:
    """One entry of a recipe's `learning_rates`.

    Attributes:
        pattern: a regular expression, searched in the names of parameters.
        multiplier: of the learning rate; 0 keeps the parameters as they are.
    """

    pattern: str
    multiplier: float


def read_rate_rules(where: str, value: Any) -> tuple[RateRule, ...]:
    """Rules from the value of a recipe key: a mapping of patterns to numbers or `frozen`.

    Raises:
        RecipeError: it is no mapping, a pattern is no regular expression, or a value is neither.
    """
    if isinstance(value, list | tuple) and all(isinstance(rule, Mapping) for rule in value):  # of a resolved recipe
        return tuple(RateRule(str(rule["pattern"]), float(rule["multiplier"])) for rule in value)
    if not isinstance(value, Mapping) or not value:
        raise RecipeError(
            f"{where} is {shown(value)}: it must be a mapping such as {{embed_tokens: frozen, norm: 0.1}}"
        )
    return tuple(_rule(f"{where}[{pattern}]", pattern, stated) for pattern, stated in value.items())


def _rule(where: str, pattern: Any, stated: Any) -> RateRule:
    try:
        re.compile(str(pattern))
    except re.error as problem:
        raise RecipeError(
            f"{where} is no regular expression ({problem}): write one that is searched in names"
        ) from None
    if isinstance(stated, Mapping) and dict(stated) in ({FROZEN: True}, {FROZEN: "true"}):
        stated = FROZEN
    number = 0.0 if stated == FROZEN else exact(stated)
    if number is None or not 0 <= number <= 1000:
        raise RecipeError(f"{where} is {shown(stated)}: it must be frozen, or a number at least 0 and at most 1000")
    return RateRule(str(pattern), float(number))


def multipliers(names: Iterable[str], rules: Iterable[RateRule]) -> dict[str, float]:
    """The multiplier of each parameter: that of the first rule whose pattern is found in its name, otherwise 1.

    Raises:
        RecipeError: a pattern is found in no name.
    """
    names, rules = list(names), list(rules)
    for rule in rules:
        if not any(re.search(rule.pattern, name) for name in names):
            raise RecipeError(
                f"learning_rates names {rule.pattern!r}, which is found in no trained parameter: their names are like {', '.join(names[:2])}"
            )
    return {name: next((rule.multiplier for rule in rules if re.search(rule.pattern, name)), 1.0) for name in names}
