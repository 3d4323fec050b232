"""Shows what merging K/V heads costs by number of K/V heads; nothing is converted."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from gqa_convert.checkpoint.source import Checkpoint, open_local
from gqa_convert.conversion.calibration.batches import prepare_calibration
from gqa_convert.conversion.options import CalibrationOptions
from gqa_convert.conversion.plan import Plan, make_plan, merging_counts, spread
from gqa_convert.conversion.planning import check_calibration, check_predicts
from gqa_convert.errors import GroupsError, OptionError
from gqa_convert.measuring import Progress, no_progress
from gqa_convert.runtime.json_objects import JsonObject, Result
from gqa_convert.runtime.paths import expanded

SINK_KEPT = 0.9
"""The share of the attention sink's length below which users are warned."""


@dataclass(frozen=True)
class MergedLoss:
    """The loss with all layers merged into `kv_heads` by the closed form, and its increase over the
    source, paired block by block, in nats per token; None where not finite. One block of
    text has no standard error.

    Attributes:
        sink: the length of the attention sink, the massive state at the first position, as a share
            of the source's (`merged_copies.Score`); None where the source has none.
    """

    kv_heads: int
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
    by_kv_heads: tuple[MergedLoss, ...]


@dataclass(frozen=True, kw_only=True)
class Inspection(Result):
    """What `inspect --json` prints.

    Attributes:
        layers: the number of attention layers.
        candidates: the numbers of K/V heads that were tried.
        calibration: the text.
    """

    format_version: int = 1
    source: str
    model_type: str
    source_kv_heads: int
    layers: int
    candidates: tuple[int, ...]
    calibration: JsonObject
    loss: HeldOutLosses


def inspect_checkpoint(
    source: str | Path,
    *,
    calibration: Any = None,
    calibration_tokens: int | None = None,
    candidates: Sequence[int] | None = None,
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
        device: to run the source on, such as `cpu` or `cuda:1`; by default a GPU if there is one.
        revision: branch, tag or commit on the Hub.
        progress: called with the name of a stage, the steps done and the number of steps.

    Raises:
        GQAConvertError: one of its subclasses for every mistake of the user's.
    """
    if calibration is None:
        raise OptionError(
            "inspect measures losses on text: name a file or a dataset with --calibration, "
            "or a folder of audio files for a model that hears"
        )
    text = CalibrationOptions(calibration, calibration_tokens, device=device)
    check_calibration("factor", text)
    check = partial(_plan, candidates=candidates, text=text)
    plan, counts = check(open_local(source, revision, check))
    found = prepare_calibration(plan, text, progress)
    from gqa_convert.conversion.calibration.streams import tokens_of

    from .merged_copies import load_inputs, score_copies

    copies = [dict.fromkeys(plan.layer_kv_heads, kv_heads) for kv_heads in counts]
    inputs = load_inputs(plan, found.batches, text)
    unmerged, *scores = score_copies(inputs, copies, inputs.held_out, partial(progress, "layers"))
    losses = []
    for kv_heads, score in zip(counts, scores, strict=True):
        increase = score.loss.minus(unmerged.loss)
        losses.append(
            MergedLoss(kv_heads, score.loss.value, increase.value, increase.error, score.sink)
        )
    described = {
        "text": found.description,
        "tokens": found.tokens,
        "held_out_blocks": sum(len(tokens_of(batch)) for batch in inputs.held_out),
        "warning": found.warning,
    }
    return Inspection(
        source=expanded(source),
        model_type=plan.family.model_type,
        source_kv_heads=plan.source_kv_heads,
        layers=len(plan.layers),
        candidates=tuple(counts),
        calibration=described,
        loss=HeldOutLosses(
            unmerged.loss.value, unmerged.loss.error, unmerged.predicted, tuple(losses)
        ),
    )


def sink_warnings(losses: Sequence[MergedLoss]) -> list[str]:
    """A sentence for each number of K/V heads with which too little is left of the attention
    sink.
    """
    return [
        f"with N = {each.kv_heads} the closed form leaves {each.sink:.0%} of the attention sink's "
        "length, on which all later layers depend: leave fit its gradient steps"
        for each in losses
        if each.sink is not None and each.sink < SINK_KEPT
    ]


def _plan(
    checkpoint: Checkpoint, candidates: Sequence[int] | None, text: CalibrationOptions
) -> tuple[Plan, list[int]]:
    """A plan of the source, and the candidates in ascending order; refuses what can't be
    inspected.
    """
    plan = make_plan(checkpoint, 1, method="factor")
    check_predicts(plan, text)
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
