"""Inspects a checkpoint: fitted errors per layer, pairs of heads that merge cheaply, and the predicted loss by groups."""

import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gqa_convert.checkpoint.devices import chosen_device
from gqa_convert.checkpoint.paths import expanded, local_path
from gqa_convert.checkpoint.source import Checkpoint, open_local
from gqa_convert.checkpoint.source_files import SourceFiles
from gqa_convert.conversion.fit.calibrated import CalibrationOptions, calibrate, check_calibration, check_predicts
from gqa_convert.conversion.fit.source_layer import SourceReader, attention_of
from gqa_convert.conversion.plan import Plan, make_plan, merging_counts, spread
from gqa_convert.errors import GroupsError, OptionError
from gqa_convert.families.geometry import AttentionLayer
from gqa_convert.measuring.inspect.layers import LayerInspection
from gqa_convert.measuring.inspect.picture import draw_errors
from gqa_convert.measuring.next_command import budget_command, conversion_command
from gqa_convert.measuring.pictures import check_picture
from gqa_convert.measuring.results.schemas import (
    Advice,
    GroupsLoss,
    InspectedLayer,
    InspectedText,
    InspectionFile,
    PredictedLoss,
)
from gqa_convert.measuring.results.stored import FORMAT_VERSION

_MAX_LOSS_INCREASE = 0.1
"""The loss increase in nats per token that is allowed where the user states no limit."""
_MOST_GROUPS = 6
"""Maximum number of group counts that are tried by default."""

Progress = Callable[[str, int, int], None]
"""Called with the name of a stage, the steps done and the number of steps."""


def inspect_checkpoint(
    source: str | Path,
    *,
    calibration: Any = None,
    calibration_tokens: int | None = None,
    groups: Sequence[int] | None = None,
    max_loss_increase: float | None = None,
    device: str | None = None,
    seed: int = 0,
    encoder: bool = False,
    revision: str | None = None,
    plot: str | Path | None = None,
    progress: Progress = lambda stage, done, total: None,
) -> InspectionFile:
    """Predict the cost of merging the K/V heads of a checkpoint: the errors of the closed form of method `factor` in every
    layer, and with text the loss after `fit`; nothing is converted.

    Args:
        source: a local folder or a Hub id.
        calibration: text to measure on, as for `convert_checkpoint`; without it only the weights are inspected, and no
            loss is predicted.
        calibration_tokens: how much of it, by default from the model's hidden_size; a fifth is held out for the losses.
        groups: numbers of groups to try; by default the divisors of the K/V-head count below it, six of them if there
            are more.
        max_loss_increase: nats per token that the recommended number of groups may cost, by default 0.1.
        device: to run the source on where there is calibration text, such as `cpu` or `cuda:1`; by default a GPU if
            there is one.
        seed: of the choice of calibration text.
        encoder: inspect the encoder's self-attention too.
        revision: branch, tag or commit on the Hub.
        plot: a picture to draw (.png, .svg or .pdf).
        progress: called with the name of a stage, the steps done and the number of steps.

    Returns:
        `layers`, each with `errors` by groups and `cheapest_pairs`; `loss` and
        `recommendation`, None without text; and the inputs.

    Raises:
        GQAConvertError: one of its subclasses for every mistake of the user's.
    """
    text = CalibrationOptions(calibration, calibration_tokens, seed=seed, device=device)
    check_calibration("factor", text)
    if device is not None:
        chosen_device(device)  # one alone
    limit = _limit(max_loss_increase, calibrated=calibration is not None)
    picture = None if plot is None else local_path(plot)
    if picture is not None:
        check_picture(picture)
    checkpoint = open_local(
        source,
        revision,
        lambda remote: _plan(remote, groups, text, encoder=encoder),
    )
    plan, counts = _plan(checkpoint, groups, text, encoder=encoder)
    finder, advice = attention_of(plan), None
    with ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gqa-inspect-")))
        read = SourceReader(checkpoint, SourceFiles(checkpoint, work, stack))

        def inspection(layer: AttentionLayer) -> LayerInspection:
            return LayerInspection(finder, layer, read)

        if calibration is None:
            measured = _from_weights(finder.layers, inspection, counts, progress)
        else:
            measured = _on_text(plan, inspection, counts, text, progress)
            options = {
                "--calibration": calibration,
                "--calibration-tokens": calibration_tokens,
                "--device": device,
                "--seed": seed or None,
                "--revision": revision,
            }
            assert measured.loss is not None
            advice = recommend(measured.loss.by_groups, limit, expanded(source), options, encoder=encoder)
            if advice.groups is not None:
                by_layer = budget_command(expanded(source), plan, advice.groups, options)
                advice = advice.model_copy(update={"by_layer": by_layer})
    result = InspectionFile(
        format_version=FORMAT_VERSION,
        source=expanded(source),
        model_type=plan.family.model_type,
        heads=plan.heads,
        kv_heads=plan.source_kv_heads,
        groups=tuple(counts),
        calibration=measured.text,
        layers=tuple(measured.layers),
        loss=measured.loss,
        max_loss_increase=None if calibration is None else limit,
        recommendation=advice,
        plot=None if picture is None else str(picture),
    )
    if picture is not None:
        draw_errors(result, picture)
    return result


def recommend(
    losses: Sequence[GroupsLoss], limit: float, source: str, options: Mapping[str, object], *, encoder: bool = False
) -> Advice:
    """The smallest number of groups whose loss increase stays within the limit: the upper end of the increase that is
    predicted after `fit`, or that of the closed form where there is no such prediction.

    Args:
        losses: entries of `loss.by_groups`, in order of their groups.
        limit: nats per token.
        source: the checkpoint.
        options: of the command to run next; those that are None are left out.
        encoder: convert its encoder too.

    Returns:
        `groups`, None if none qualifies; `reason`, a sentence; and `command`, to run next, or None.
    """
    known = [(each, highest) for each in losses if (highest := _highest(each)) is not None]
    tried = ", ".join(str(each.groups) for each in losses)
    fitting = next((each for each, highest in known if highest <= limit), None)
    if fitting is None:
        best = min(known, key=lambda each: each[1], default=None)
        nearest = "no loss is finite" if best is None else f"N = {best[0].groups} comes nearest with {_words(best[0])}"
        reason = (
            f"none of N = {tried} stays within {limit:g} nats per token: {nearest}. Try more groups, or allow more with "
            "--max-loss-increase and uptrain the result"
        )
        return Advice(groups=None, reason=reason, command=None)
    chosen = fitting.groups
    out = f"{Path(source).absolute().name}-gqa{chosen}"
    command = conversion_command(source, out, chosen, {**options, "--encoder": encoder})
    reason = f"N = {chosen} is the smallest of {tried} within {limit:g} nats per token: {_words(fitting)}"
    return Advice(groups=chosen, reason=reason, command=command)


def _highest(loss: GroupsLoss) -> float | None:
    """The loss increase that counts for a limit."""
    return loss.increase if loss.after_fit is None else loss.after_fit.high


def _words(loss: GroupsLoss) -> str:
    after = loss.after_fit
    if after is None:
        return f"{loss.increase:+.3f} by the closed form"
    return f"{after.increase:+.3f} ({after.low:.3f} to {after.high:.3f}) predicted after fit"


@dataclass(frozen=True)
class _Measured:
    """The layers and, where text was given, the text and the losses on it."""

    layers: Sequence[InspectedLayer]
    text: InspectedText | None = None
    loss: PredictedLoss | None = None


def _from_weights(
    layers: Sequence[AttentionLayer],
    inspection: Callable[[AttentionLayer], LayerInspection],
    counts: Sequence[int],
    progress: Progress,
) -> _Measured:
    """Errors from the weights alone, without torch and text."""
    records = []
    for layer in layers:
        begun = inspection(layer)
        for _ in begun.merged(counts, None):
            pass
        records.append(begun.record(None))
        progress("layers", len(records), len(layers))
    return _Measured(records)


def _on_text(
    plan: Plan,
    inspection: Callable[[AttentionLayer], LayerInspection],
    counts: Sequence[int],
    text: CalibrationOptions,
    progress: Progress,
) -> _Measured:
    """Errors and losses from running the source on text."""
    calibration = calibrate(plan, text, progress)
    from gqa_convert.conversion.fit.lockstep import open_model
    from gqa_convert.conversion.fit.whole_model import affordable, common_rank
    from gqa_convert.measuring.inspect.trials import run_trials, split

    measured, held_out = split(calibration.batches)
    assert plan.checkpoint.folder is not None
    model = open_model(plan.checkpoint.folder, device=chosen_device(text.device))
    # a text that is used up leaves none to hold out, without which `fit` skips its last stage
    rank = common_rank(plan, model, calibration.batches, text.kl_rank)
    last_stage = calibration.warning is None and affordable(plan, model, calibration.batches, rank)
    records, loss = run_trials(
        model,
        plan.layers,
        inspection,
        counts,
        measured,
        held_out,
        seed=text.seed,
        last_stage=last_stage,
        progress=progress,
    )
    noted = InspectedText(
        text=calibration.description,
        tokens=calibration.tokens,
        sequence_length=calibration.sequence_length,
        seed=text.seed,
        digest=calibration.digest,
        held_out_blocks=sum(len(batch["input_ids"]) for batch in held_out),
        warning=calibration.warning,
    )
    return _Measured(records, noted, loss)


def _limit(stated: float | None, *, calibrated: bool) -> float:
    if stated is None:
        return _MAX_LOSS_INCREASE
    if not calibrated:
        raise OptionError(
            f"--max-loss-increase {stated:g} without text, and weights predict no loss: name a text file or dataset with --calibration"
        )
    if not math.isfinite(stated) or stated < 0:
        raise OptionError(
            f"--max-loss-increase {stated:g} is not a loss: give nats per token, such as {_MAX_LOSS_INCREASE:g}"
        )
    return stated


def _plan(
    checkpoint: Checkpoint, groups: Sequence[int] | None, text: CalibrationOptions, *, encoder: bool
) -> tuple[Plan, list[int]]:
    """A plan of the source, and the numbers of groups to try in ascending order; refuses what can't be inspected."""
    plan = make_plan(checkpoint, 1, method="factor", encoder=encoder)
    if text.source is not None and not plan.family.native and plan.family.modeling is None:
        raise OptionError(
            f"--calibration runs the source, and transformers has no class of type {plan.family.model_type}: leave it out, for the errors "
            "that the weights alone show"
        )
    check_predicts(plan, text, "leave --calibration out, for the errors that the weights alone show")
    heads = sorted({layer.kv_heads for layer in plan.layers})
    if heads[-1] == 1:
        raise GroupsError(f"{checkpoint.source_id} has 1 K/V head in every attention layer: there is nothing to merge")
    if groups is None:
        counts = [count for count in merging_counts(*heads) if count < heads[-1]]
        return plan, spread(counts, _MOST_GROUPS)
    if not groups:
        raise OptionError("--groups names no number: leave it out, or write it like 1,2,4")
    for count in sorted(set(groups)):
        make_plan(checkpoint, count, method="factor", encoder=encoder)
        if count >= heads[-1]:
            raise GroupsError(f"--groups {count} merges none of the {heads[-1]} K/V heads: name fewer")
    return plan, sorted(set(groups))
