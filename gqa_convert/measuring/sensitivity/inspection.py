"""Shows what merging K/V heads costs by number of K/V heads, and recommends a number; nothing is
converted.
"""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from gqa_convert.checkpoint.source import Checkpoint, open_local
from gqa_convert.conversion.calibration.batches import prepare_calibration
from gqa_convert.conversion.options import CalibrationOptions, ConversionOptions, each_of
from gqa_convert.conversion.plan import Plan, make_plan, merging_counts, spread
from gqa_convert.conversion.planning import check_calibration, check_predicts
from gqa_convert.errors import GroupsError, OptionError
from gqa_convert.measuring import Progress, no_progress
from gqa_convert.measuring.sensitivity.kv_budget import BudgetChoice, KVBudget, numbers_text
from gqa_convert.measuring.tables import figure
from gqa_convert.runtime.json_objects import JsonObject, Result
from gqa_convert.runtime.paths import expanded

SINK_KEPT = 0.9
"""The share of the attention sink's length below which users are warned."""


@dataclass(frozen=True)
class MergedLoss:
    """The loss with all layers merged into `groups` K/V heads by the closed form, and its increase
    over the source, paired block by block, in nats per token; None where not finite. One block of
    text has no standard error.

    Attributes:
        sink: the length of the attention sink, the massive state at the first position, as a share
            of the source's (`merged_copies.Score`); None where the source has none.
    """

    groups: int
    loss: float | None
    increase: float | None
    increase_standard_error: float | None = None
    sink: float | None = None


@dataclass(frozen=True)
class HeldOutLosses:
    """Losses on the held-out part of the calibration text, of the source in nats per token and of
    its merged copies.
    """

    source: float | None
    source_standard_error: float | None
    tokens: int
    by_groups: tuple[MergedLoss, ...]


@dataclass(frozen=True)
class Recommendation:
    """What a user should convert to.

    Attributes:
        groups: K/V heads, or those of each layer; None where no candidate stays within the limit.
        reason: a sentence.
        command: the conversion to run next, or None.
    """

    groups: int | list[int] | None
    reason: str
    command: str | None


@dataclass(frozen=True, kw_only=True)
class Inspection(Result):
    """What `inspect --json` prints.

    Attributes:
        layers: the number of attention layers.
        groups: the candidates that were tried.
        calibration: the text.
        budget: what was measured for a budget of K/V cache, or None.
        recommendation: None where the user states neither a loss nor a budget.
    """

    format_version: int = 1
    source: str
    model_type: str
    kv_heads: int
    layers: int
    groups: tuple[int, ...]
    calibration: JsonObject
    loss: HeldOutLosses
    budget: BudgetChoice | None
    recommendation: Recommendation | None


def inspect_checkpoint(
    source: str | Path,
    *,
    calibration: Any = None,
    calibration_tokens: int | None = None,
    candidates: Sequence[int] | None = None,
    max_loss_increase: float | None = None,
    kv_budget: KVBudget | None = None,
    device: str | None = None,
    revision: str | None = None,
    progress: Progress = no_progress,
) -> Inspection:
    """Measure the loss that merging the K/V heads of a checkpoint adds by the closed form of method
    `factor`, an upper bound in practice of what `fit` loses. Nothing is converted.

    Args:
        source: a local folder or a Hub id.
        calibration: text to measure on, as for `convert_checkpoint`.
        calibration_tokens: how much of it, by default from the model's hidden_size; a fifth is held
            out for the losses.
        candidates: numbers of K/V heads to try; by default the divisors of the source's number
            below it, six of them if there are more.
        max_loss_increase: nats per token; recommends the smallest candidate that adds no more.
        kv_budget: recommends a number of K/V heads for each layer within this K/V cache.
        device: to run the source on, such as `cpu` or `cuda:1`; by default a GPU if there is one.
        revision: branch, tag or commit on the Hub.
        progress: called with the name of a stage, the steps done and the number of steps.

    Raises:
        GQAConvertError: one of its subclasses for every mistake of the user's.
    """
    if max_loss_increase is not None and kv_budget is not None:
        raise OptionError(
            "--max-loss-increase and --kv-budget exclude each other: state one of them"
        )
    if calibration is None:
        raise OptionError(
            "inspect measures losses on text: name a file or a dataset with --calibration, "
            "or a folder of audio files for a model that hears"
        )
    text = CalibrationOptions(calibration, calibration_tokens, device=device)
    check_calibration("factor", text)
    check = partial(_plan, candidates=candidates, text=text)
    plan, counts = check(open_local(source, revision, check))
    command = partial(conversion_command, expanded(source), text, revision)
    budget = recommendation = None
    if kv_budget is not None:  # first, since it refuses what takes no list
        from gqa_convert.measuring.sensitivity.choosing import choose_num_kv_heads

        options = ConversionOptions(calibration=text, revision=revision)
        budget = choose_num_kv_heads(source, kv_budget, options, progress=progress)
        recommendation = Recommendation(budget.groups, budget.reason, command(budget.groups))
    found = prepare_calibration(plan, text, progress)
    from gqa_convert.conversion.calibration.streams import tokens_of
    from gqa_convert.measuring.sensitivity.merged_copies import load_inputs, score_copies

    copies = [dict.fromkeys(plan.layer_groups, groups) for groups in counts]
    inputs = load_inputs(plan, found.batches, text)
    unmerged, *scores = score_copies(inputs, copies, inputs.held_out, partial(progress, "layers"))
    losses = []
    for groups, score in zip(counts, scores, strict=True):
        increase = score.loss.minus(unmerged.loss)
        losses.append(
            MergedLoss(groups, score.loss.value, increase.value, increase.error, score.sink)
        )
    if max_loss_increase is not None:
        advised, reason = recommend_within_loss(losses, max_loss_increase)
        follows = None if advised is None else command(advised)
        recommendation = Recommendation(advised, reason, follows)
    described = {
        "text": found.description,
        "tokens": found.tokens,
        "sequence_length": found.sequence_length,
        "digest": found.digest,
        "held_out_blocks": sum(len(tokens_of(batch)) for batch in inputs.held_out),
        "warning": found.warning,
    }
    return Inspection(
        source=expanded(source),
        model_type=plan.family.model_type,
        kv_heads=plan.source_kv_heads,
        layers=len(plan.layers),
        groups=tuple(counts),
        calibration=described,
        loss=HeldOutLosses(
            unmerged.loss.value, unmerged.loss.error, unmerged.predicted, tuple(losses)
        ),
        budget=budget,
        recommendation=recommendation,
    )


def recommend_within_loss(losses: Sequence[MergedLoss], limit: float) -> tuple[int | None, str]:
    """The smallest number of K/V heads whose loss by the closed form stays within a limit, None if
    none does; and the reason.

    Args:
        losses: in ascending order of their groups.
        limit: nats per token.
    """
    allowed = f"at most {limit:g} nats per token by the closed form"
    for each in losses:
        if each.increase is not None and each.increase <= limit:
            added = figure(each, "increase", "+.3f")
            return each.groups, f"N = {each.groups} adds {allowed} ({added}), and fit loses less"
    tried = ", ".join(str(each.groups) for each in losses)
    return None, f"none of N = {tried} adds {allowed}: allow more with --max-loss-increase"


def sink_warnings(losses: Sequence[MergedLoss]) -> list[str]:
    """A sentence for each number of K/V heads with which too little is left of the attention
    sink.
    """
    return [
        f"with N = {each.groups} the closed form leaves {each.sink:.0%} of the attention sink's "
        "length, on which all later layers depend: leave fit its gradient steps"
        for each in losses
        if each.sink is not None and each.sink < SINK_KEPT
    ]


def conversion_command(
    source: str, text: CalibrationOptions, revision: str | None, groups: int | list[int]
) -> str:
    """The command line of a conversion with the options of the inspection."""
    out = f"{Path(source).absolute().name}-gqa"
    words = ["gqa-convert", "convert", source, out, "--groups", numbers_text(groups)]
    for each in each_of(text.source):
        words += ["--calibration", str(each)]
    others = {"--calibration-tokens": text.tokens, "--device": text.device, "--revision": revision}
    for name, value in others.items():
        if value is not None:
            words += [name, str(value)]
    return shlex.join(words)


def _plan(
    checkpoint: Checkpoint, candidates: Sequence[int] | None, text: CalibrationOptions
) -> tuple[Plan, list[int]]:
    """A plan of the source, and the candidates in ascending order; refuses what can't be
    inspected.
    """
    plan = make_plan(checkpoint, 1, method="factor")
    check_predicts(plan, text, "use convert, whose method mean needs no text")
    kv_heads = [layer.kv_heads for layer in plan.layers]
    most = max(kv_heads)
    possible = [count for count in merging_counts(*kv_heads) if count < most]
    if not possible:
        raise GroupsError(
            f"{checkpoint.source_id} has 1 K/V head in every attention layer: there is nothing to "
            "merge"
        )
    counts = sorted(set(candidates or spread(possible, 6)))
    if not set(counts) <= set(possible):
        raise GroupsError(
            f"--candidates {counts} do not all merge {most} K/V heads evenly: choose among "
            f"{possible}"
        )
    return plan, counts
