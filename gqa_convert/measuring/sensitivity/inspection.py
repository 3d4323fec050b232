"""Shows what merging K/V heads costs by layer and by number of K/V heads, and recommends a number; nothing is converted."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from gqa_convert.checkpoint.paths import expanded
from gqa_convert.checkpoint.results import Result
from gqa_convert.checkpoint.source import Checkpoint, open_local
from gqa_convert.checkpoint.strict_json import JsonObject
from gqa_convert.conversion.fit.batches import prepare_calibration
from gqa_convert.conversion.fit.options import CalibrationOptions, check_calibration, check_predicts
from gqa_convert.conversion.fit.source_layers import open_layers
from gqa_convert.conversion.plan import Plan, make_plan, merging_counts, spread
from gqa_convert.errors import GroupsError, OptionError
from gqa_convert.measuring import Progress, no_progress
from gqa_convert.measuring.sensitivity.kv_budget import BudgetChoice, KVBudget, numbers_text
from gqa_convert.measuring.sensitivity.layer_errors import InspectedLayer, describe_layer, merge_candidates
from gqa_convert.merging.merge_layer import Moments


@dataclass(frozen=True, slots=True)
class MergedLoss:
    """The loss with all layers merged into `groups` K/V heads by the closed form, and its increase over the source, in
    nats per token; None where not finite.
    """

    groups: int
    loss: float | None
    increase: float | None


@dataclass(frozen=True, slots=True)
class HeldOutLosses:
    """Losses on the held-out part of the calibration text, of the source in nats per token and of its merged copies."""

    source: float | None
    tokens: int
    by_groups: tuple[MergedLoss, ...]


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection(Result):
    """What `inspect --json` prints.

    Attributes:
        groups: the candidates that were tried.
        calibration: the text; None without it.
        loss: None without text.
        budget: what was measured for a budget of K/V cache, or None.
        recommendation: None where the user states neither a loss nor a budget.
    """

    format_version: int = 1
    source: str
    model_type: str
    kv_heads: int
    groups: tuple[int, ...]
    calibration: JsonObject | None
    layers: tuple[InspectedLayer, ...]
    loss: HeldOutLosses | None
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
    seed: int = 0,
    encoder: bool = False,
    revision: str | None = None,
    progress: Progress = no_progress,
) -> Inspection:
    """Measure what merging the K/V heads of a checkpoint costs: the errors of the closed form of method `factor` in every
    layer, and with text the loss that it adds, an upper bound in practice of what `fit` loses. Nothing is converted.

    Args:
        source: a local folder or a Hub id.
        calibration: text to measure on, as for `convert_checkpoint`; without it only the weights are inspected, and no
            loss is measured.
        calibration_tokens: how much of it, by default from the model's hidden_size; a fifth is held out for the losses.
        candidates: numbers of K/V heads to try; by default the divisors of the source's number below it, six of them if
            there are more.
        max_loss_increase: nats per token; recommends the smallest candidate that adds no more.
        kv_budget: recommends a number of K/V heads for each layer within this K/V cache.
        device: to run the source on where there is calibration text, such as `cpu` or `cuda:1`; by default a GPU if
            there is one.
        seed: of the choice of calibration text.
        encoder: inspect the encoder's self-attention too.
        revision: branch, tag or commit on the Hub.
        progress: called with the name of a stage, the steps done and the number of steps.

    Raises:
        GQAConvertError: one of its subclasses for every mistake of the user's.
    """
    if max_loss_increase is not None and kv_budget is not None:
        raise OptionError("--max-loss-increase and --kv-budget exclude each other: state one of them")
    if calibration is None and (max_loss_increase, kv_budget) != (None, None):
        raise OptionError(
            "--max-loss-increase and --kv-budget need text, since weights predict no loss: name a file or dataset with --calibration"
        )
    text = CalibrationOptions(calibration, calibration_tokens, seed=seed, device=device)
    check_calibration("factor", text)
    check = partial(_plan, candidates=candidates, text=text, encoder=encoder)
    checkpoint = open_local(source, revision, check)
    plan, counts = check(checkpoint)
    choice = groups = reason = described = loss = None
    if kv_budget is not None:  # first, since it refuses what takes no list
        from gqa_convert.conversion.options import ConversionOptions
        from gqa_convert.measuring.sensitivity.choosing import choose_num_kv_heads

        asked = ConversionOptions(calibration=text, revision=revision, encoder=encoder)
        choice = choose_num_kv_heads(source, kv_budget, asked, progress=progress)
        groups, reason = choice.groups, choice.reason
    if calibration is None:
        layers = _inspect_weights(plan, counts, progress)
    else:
        layers, described, loss = _inspect_on_text(plan, counts, text, progress)
        if max_loss_increase is not None:
            groups, reason = recommend_within_loss(loss.by_groups, max_loss_increase)
    recommendation = None
    if reason is not None:
        command = (
            None if groups is None else conversion_command(expanded(source), groups, calibration, encoder, revision)
        )
        recommendation = Recommendation(groups, reason, command)
    return Inspection(
        source=expanded(source),
        model_type=plan.family.model_type,
        kv_heads=plan.source_kv_heads,
        groups=tuple(counts),
        calibration=described,
        layers=tuple(sorted(layers, key=_place)),
        loss=loss,
        budget=choice,
        recommendation=recommendation,
    )


def _place(layer: InspectedLayer) -> list[Any]:
    """Sorts layer 2 before layer 10."""
    return [int(part) if part.isdigit() else part for part in layer.module.split(".")]


def recommend_within_loss(losses: Sequence[MergedLoss], limit: float) -> tuple[int | None, str]:
    """The smallest number of K/V heads whose loss by the closed form stays within a limit, None if none does; and the
    reason.

    Args:
        losses: in ascending order of their groups.
        limit: nats per token.
    """
    allowed = f"at most {limit:g} nats per token by the closed form"
    for each in losses:
        if each.increase is not None and each.increase <= limit:
            return each.groups, f"N = {each.groups} adds {allowed} ({each.increase:+.3f}), and fit loses less"
    tried = ", ".join(str(each.groups) for each in losses)
    return None, f"none of N = {tried} adds {allowed}: allow more with --max-loss-increase"


def conversion_command(
    source: str, groups: int | list[int], calibration: Any, encoder: bool, revision: str | None
) -> str:
    """The command line of a conversion; see `inspect_checkpoint`."""
    words = ["gqa-convert", "convert", source, f"{Path(source).absolute().name}-gqa", "--groups", numbers_text(groups)]
    for text in calibration if isinstance(calibration, list) else [calibration]:
        words += ["--calibration", str(text)]
    if encoder:
        words.append("--encoder")
    if revision:
        words += ["--revision", revision]
    return shlex.join(words)


def _plan(
    checkpoint: Checkpoint, *, candidates: Sequence[int] | None, text: CalibrationOptions, encoder: bool
) -> tuple[Plan, list[int]]:
    """A plan of the source, and the candidates in ascending order; refuses what can't be inspected."""
    plan = make_plan(checkpoint, 1, method="factor", encoder=encoder)
    check_predicts(plan, text, "leave --calibration out, for the errors that the weights alone show")
    kv_heads = [layer.kv_heads for layer in plan.layers]
    possible = [count for count in merging_counts(*kv_heads) if count < max(kv_heads)]
    if not possible:
        raise GroupsError(f"{checkpoint.source_id} has 1 K/V head in every attention layer: there is nothing to merge")
    counts = sorted(set(candidates or spread(possible, 6)))
    if not set(counts) <= set(possible):
        raise GroupsError(
            f"--candidates {counts} do not all merge {max(kv_heads)} K/V heads evenly: choose among {possible}"
        )
    return plan, counts


def _inspect_weights(plan: Plan, candidates: Sequence[int], progress: Progress) -> tuple[InspectedLayer, ...]:
    """Errors from the weights alone, without torch and text."""
    inspected = []
    with open_layers(plan) as read_layer:
        for layer in plan.layers:
            opened = read_layer(layer)
            errors = [error for _, error in merge_candidates(opened, candidates, Moments())]
            inspected.append(describe_layer(opened, errors))
            progress("layers", len(inspected), len(plan.layers))
    return tuple(inspected)


def _inspect_on_text(
    plan: Plan, candidates: Sequence[int], text: CalibrationOptions, progress: Progress
) -> tuple[tuple[InspectedLayer, ...], JsonObject, HeldOutLosses]:
    """Errors and losses from running the source, and a copy with all layers merged for each candidate, on text."""
    calibration = prepare_calibration(plan, text, progress)
    from gqa_convert.measuring.sensitivity.layer_merging import ClosedForm
    from gqa_convert.measuring.sensitivity.merged_copies import count_predicted, open_inputs, score_copies, tokens_of

    copies = [{layer.module: count for layer in plan.layers} for count in candidates]
    with open_inputs(plan, calibration.batches, text) as inputs:
        source, *merged = score_copies(inputs, copies, inputs.held_out, partial(progress, "layers"))
    losses = []
    for groups, score in zip(candidates, merged, strict=True):
        increase = None if score.loss is None or source.loss is None else score.loss - source.loss
        losses.append(MergedLoss(groups, score.loss, increase))
    described = {
        "text": calibration.description,
        "tokens": calibration.tokens,
        "sequence_length": calibration.sequence_length,
        "seed": text.seed,
        "digest": calibration.digest,
        "held_out_blocks": sum(len(tokens_of(batch)) for batch in inputs.held_out),
        "warning": calibration.warning,
    }
    assert isinstance(inputs.merging, ClosedForm)
    layers = tuple(inputs.merging.layers[layer.module] for layer in plan.layers)
    return layers, described, HeldOutLosses(source.loss, count_predicted(inputs.held_out), tuple(losses))
