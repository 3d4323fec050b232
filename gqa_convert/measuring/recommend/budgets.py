"""Recommends a number of K/V heads for each layer within budgets of K/V cache, beside one number for all layers."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pydantic import JsonValue

from gqa_convert.checkpoint.devices import chosen_device
from gqa_convert.checkpoint.machine import measurement
from gqa_convert.checkpoint.paths import expanded
from gqa_convert.conversion.fit.calibrated import CalibrationOptions
from gqa_convert.measuring.budget.amount import KVBudget
from gqa_convert.measuring.budget.choice import BudgetChoice
from gqa_convert.measuring.budget.run import choose_groups
from gqa_convert.measuring.next_command import conversion_command
from gqa_convert.measuring.results.schemas import Head
from gqa_convert.measuring.results.stored import Text


class BudgetRecommendation(Head):
    """The numbers of K/V heads for each budget, in the order of the budgets, and the commands that convert to them."""

    source: str
    budgets: tuple[JsonValue, ...]
    next: tuple[Text, ...]


def recommend_within(
    source: str | Path,
    budgets: Sequence[KVBudget],
    *,
    calibration: Any = None,
    calibration_tokens: int | None = None,
    seed: int = 0,
    revision: str | None = None,
    command: list[str] | None = None,
    progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
) -> tuple[BudgetRecommendation, list[BudgetChoice]]:
    """Recommend the numbers of K/V heads for budgets, as `convert --kv-budget` chooses them. What each number costs in
    each layer is measured once for all budgets.

    Args:
        source: a local folder or a Hub id.
        budgets: of the K/V cache.
        calibration: text to measure on, as for `convert_checkpoint`; without it, the built-in text.
        calibration_tokens: how much of it, by default from the model's hidden_size.
        seed: of the choice of calibration text.
        revision: branch, tag or commit on the Hub.
        command: the command line, for the record.
        progress: called with the name of a stage, the steps done and the number of steps.

    Returns:
        The recommendation, and the choices that it consists of.

    Raises:
        GQAConvertError: one of its subclasses for every mistake of the user's.
    """
    name = expanded(source)
    text = CalibrationOptions(calibration, calibration_tokens, seed=seed)
    choices = choose_groups(name, None, budgets, text, revision=revision, progress=progress)
    options = {
        "--calibration": calibration,
        "--calibration-tokens": calibration_tokens,
        "--seed": seed or None,
        "--revision": revision,
    }
    following = []
    for choice in choices:
        share = choice.chosen.kv_bytes_per_token / choice.source_bytes
        out = f"{Path(name).name}-kv{100 * share:.0f}"
        groups = choice.groups
        listed = groups if isinstance(groups, int) else ",".join(map(str, groups))
        following.append(conversion_command(name, out, listed, options))
    head = measurement("recommend", command, chosen_device(None))
    made = BudgetRecommendation(
        **head.as_json(), source=name, budgets=tuple(each.as_json() for each in choices), next=tuple(following)
    )
    return made, choices
