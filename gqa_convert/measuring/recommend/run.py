"""Recommends a number of K/V heads from its loss, its speed and its memory."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

from gqa_convert.checkpoint.devices import chosen_device
from gqa_convert.checkpoint.machine import measurement
from gqa_convert.checkpoint.paths import expanded, local_path
from gqa_convert.checkpoint.source import Checkpoint, open_checkpoint
from gqa_convert.conversion.plan import Plan, make_plan, merging_counts
from gqa_convert.errors import GroupsError, OptionError, RemoteHeadersError
from gqa_convert.families.context_length import has_fixed_source, stated_positions
from gqa_convert.measuring.benchmark.memory import check_budget, fitting
from gqa_convert.measuring.inspect.run import inspect_checkpoint
from gqa_convert.measuring.next_command import budget_command, conversion_command
from gqa_convert.measuring.recommend.choice import Candidate, Constraints, choose, failing
from gqa_convert.measuring.recommend.recommendation import ConsideredGroups, CountedMemory, LossOrigin, Recommendation
from gqa_convert.measuring.recommend.results import Found, predicted, read_results, timing_of
from gqa_convert.measuring.recommend.speed import Setting, choose_setting, speeds, time_versions, uneven
from gqa_convert.measuring.results.schemas import InspectionFile

Progress = Callable[[str, int, int], None]
"""Called with the name of a stage, the steps done and the number of steps."""

COUNTED: Final = (
    "weights and K/V cache, exact from the shapes, in the types that SOURCE has; activations, the copy that a growing cache makes of a "
    "layer, the framework and fragmentation are not counted"
)
PREDICTED: Final = "losses are predicted for convert --calibration from short fits of a few layers; the upper end of the interval in brackets counts for the limit"
UPPER_BOUND: Final = (
    "losses are upper bounds in practice: those of the closed form on the calibration text, and convert --calibration fits more closely and "
    "loses less"
)


def recommend_groups(
    source: str | Path,
    constraints: Constraints,
    *,
    calibration: Any = None,
    calibration_tokens: int | None = None,
    groups: Sequence[int] | None = None,
    results: Sequence[str | Path] = (),
    seed: int = 0,
    revision: str | None = None,
    command: list[str] | None = None,
    progress: Progress = lambda stage, done, total: None,
) -> Recommendation:
    """Recommend a number of K/V heads for a checkpoint, with the reason; nothing is converted.

    Losses and times are read from `results`. Losses that are missing there are predicted on calibration text as in
    `inspect_checkpoint`; a decode step is timed if a speed-up is required and `results` has no times.

    Args:
        source: a local folder or a Hub id.
        constraints: of the user.
        calibration: text to predict losses on, as for `convert_checkpoint`.
        calibration_tokens: how much of it, by default from the model's hidden_size.
        groups: numbers of groups to consider; by default the divisors of the K/V-head count.
        results: folders or files with what `evaluate`, `inspect` and `benchmark` wrote.
        seed: of the choice of calibration text.
        revision: branch, tag or commit on the Hub.
        command: the command line, for the record.
        progress: called with the name of a stage, the steps done and the number of steps.

    Returns:
        The number, the reason, all candidates, and what they were made from; docs/choosing.md has every field.

    Raises:
        GQAConvertError: one of its subclasses for every mistake of the user's.
    """
    name = expanded(source)
    if calibration is None and calibration_tokens is not None:
        raise OptionError(
            f"--calibration-tokens {calibration_tokens} without text: name a text file or dataset with --calibration"
        )
    if constraints.max_loss_increase is not None and calibration is None and not results:
        raise OptionError(
            f"--max-loss-increase {constraints.max_loss_increase:g} without losses: name text to predict them on with --calibration, or "
            "measured ones with --results"
        )
    checkpoint = _open(name, revision)
    plans = _plans(checkpoint, groups)
    encoder_tokens = _encoder_tokens(plans[0], constraints)
    if constraints.memory is not None:
        check_budget(constraints.memory, {plan.groups: plan.weight_bytes_after for plan in plans})
    found = read_results([local_path(each) for each in results], name, plans[0], constraints) if results else Found()
    setting = None
    if constraints.min_speedup is not None and not found.speeds:
        setting = choose_setting(checkpoint, plans, constraints, encoder_tokens)
    inspection = _predict(name, plans, found, calibration, calibration_tokens, seed, revision, progress)
    _check_losses(constraints, found, name)
    if setting is not None:
        _time(checkpoint, plans, setting, found, progress)
    candidates = [_candidate(plan, found, constraints, encoder_tokens) for plan in plans]
    chosen, reason = choose([known for known, _ in candidates], constraints)
    options = [option for _, option in candidates]
    entry = next((option for option in options if option.groups == chosen), None)
    for kind, note in (("predicted", PREDICTED), ("upper bound", UPPER_BOUND)):
        if any(option.loss_is == kind for option in options):
            found.notes.append(note)
    found.notes += _undecided(options, constraints)
    positions = stated_positions(checkpoint.config)
    if constraints.context is not None and positions is not None and constraints.context > positions:
        found.notes.append(
            f"--context {constraints.context:,} is more than the {positions:,} positions that the model is made for"
        )
    if disorder := uneven(found.speeds):
        found.notes.append(disorder)
    if entry is None and constraints.max_loss_increase is not None:
        found.notes.append(
            "uptraining recovers a part of what merging loses: convert with a looser limit, then see gqa-convert uptrain --help"
        )
    speech = has_fixed_source(checkpoint.config)  # encoders of sound read no text to calibrate on
    if entry is not None:
        found.notes += _doubts(entry, constraints, calibrated=calibration is not None or speech)
    texts = {
        "--calibration": calibration,
        "--calibration-tokens": calibration_tokens,
        "--seed": seed or None,
        "--revision": revision,
    }
    text = inspection.calibration if inspection else None
    head = measurement("recommend", command, _device(computed=setting is not None or inspection is not None))
    following = _next(name, entry, texts, plans[-1])
    return Recommendation(
        **head.as_json(),
        source=name,
        model_type=plans[0].family.model_type,
        heads=plans[0].heads,
        kv_heads=plans[0].source_kv_heads,
        groups=chosen,
        reason=reason,
        constraints=replace(constraints, encoder_tokens=encoder_tokens),
        candidates=tuple(options),
        loss=LossOrigin(text=found.loss_text, calibration=text) if found.losses else None,
        speed=found.timing,
        memory=None if constraints.context is None else CountedMemory(counted=COUNTED),
        notes=tuple(dict.fromkeys(found.notes)),
        next=following,
        by_layer=None if following is None or entry is None else budget_command(name, plans[-1], entry.groups, texts),
    )


def _open(source: str, revision: str | None) -> Checkpoint:
    """The checkpoint's config and headers; the weights of a Hub id are not downloaded."""
    try:
        return open_checkpoint(source, revision=revision)
    except RemoteHeadersError:  # `.bin` files, which have no headers to look at before
        return open_checkpoint(source, revision=revision, download=True)


def _plans(checkpoint: Checkpoint, groups: Sequence[int] | None) -> list[Plan]:
    """A plan for each number of groups in ascending order; the last has the source's number."""
    first = make_plan(checkpoint, 1, method="factor")
    heads = sorted({layer.kv_heads for layer in first.layers})
    own = heads[-1]
    if own == 1:
        raise GroupsError(f"{checkpoint.source_id} has 1 K/V head in every attention layer: there is nothing to merge")
    if len(heads) > 1:
        counts = ", ".join(map(str, heads))
        raise GroupsError(
            f"{checkpoint.source_id} has layers with {counts} K/V heads, so that no N is its own: look at it with inspect"
        )
    if groups is None:
        groups = merging_counts(own)[:-1]
    if not groups:
        raise OptionError("--groups names no number: leave it out, or write it like 1,2,4")
    merged = [make_plan(checkpoint, count, method="factor") for count in sorted(set(groups) - {own})]
    if not merged or merged[-1].groups > own:
        raise GroupsError(f"--groups {max(groups)} merges none of the {own} K/V heads: name fewer")
    return [*merged, make_plan(checkpoint, own, method="factor")]


def _encoder_tokens(plan: Plan, constraints: Constraints) -> int | None:
    """Tokens of the encoder's output in the cross-attention's cache; None without cross-attention or without a stated
    number.
    """
    stated, made_for = constraints.encoder_tokens, plan.checkpoint.config.get("max_source_positions")
    if not plan.cache_bytes_per_token(False, "cross"):
        if stated is not None:
            raise OptionError(
                f"--encoder-tokens {stated}: a {plan.family.model_type} has no cross-attention: leave it out"
            )
        return None
    if isinstance(made_for, int):
        if stated not in (None, made_for):
            raise OptionError(f"--encoder-tokens {stated}: this encoder always gives {made_for}: leave it out")
        return made_for
    return constraints.context if stated is None else stated


def _predict(
    source: str,
    plans: Sequence[Plan],
    found: Found,
    calibration: Any,
    tokens: int | None,
    seed: int,
    revision: str | None,
    progress: Progress,
) -> InspectionFile | None:
    """Predict the losses of those N that no file has, as `inspect` does."""
    counts = [plan.groups for plan in plans[:-1] if plan.groups not in found.losses]
    if calibration is None or not counts:
        return None
    result = inspect_checkpoint(
        source,
        calibration=calibration,
        calibration_tokens=tokens,
        groups=counts,
        seed=seed,
        revision=revision,
        progress=progress,
    )
    found.losses |= predicted(result)
    texts = calibration if isinstance(calibration, list | tuple) else [calibration]
    found.loss_text = found.loss_text or " and ".join(map(str, texts))
    if result.calibration and result.calibration.warning:
        found.notes.append(result.calibration.warning)
    return result


def _check_losses(constraints: Constraints, found: Found, source: str) -> None:
    if constraints.max_loss_increase is not None and not found.losses:
        raise OptionError(
            f"--max-loss-increase {constraints.max_loss_increase:g} without losses: found none of conversions of {source} in --results, nor a "
            "finite prediction; name text with --calibration, or evaluate SOURCE beside its conversions"
        )


def _time(checkpoint: Checkpoint, plans: Sequence[Plan], setting: Setting, found: Found, progress: Progress) -> None:
    result = time_versions(checkpoint, setting, progress)
    found.speeds = speeds(result.results, plans[-1].source_kv_heads)
    found.timing = timing_of(result, result.results[0], None)
    found.notes += setting.notes


def _candidate(
    plan: Plan, found: Found, constraints: Constraints, encoder_tokens: int | None
) -> tuple[Candidate, ConsideredGroups]:
    """One N with its loss, speed and memory, for the choice and for the result."""
    is_source = plan.groups == plan.source_kv_heads
    loss, speed = found.losses.get(plan.groups), found.speeds.get(plan.groups)
    token, cross = plan.cache_bytes_per_token(True), plan.cache_bytes_per_token(True, "cross")
    increase = 0.0 if is_source else loss.increase if loss else None
    memory = None
    if constraints.context is not None:
        cache = token * constraints.context + cross * (encoder_tokens or 0)
        memory = plan.weight_bytes_after + constraints.batch * cache
    known = Candidate(
        groups=plan.groups,
        is_source=is_source,
        loss_increase=increase,
        loss_interval=loss.interval if loss and not is_source else None,
        speedup=speed.speedup if speed else None,
        memory_bytes=memory,
    )
    fails = tuple(failing(known, constraints))
    option = ConsideredGroups(
        groups=plan.groups,
        source=is_source,
        loss_increase=known.loss_increase,
        loss_is=loss.kind if loss else None,
        loss_low=loss.interval[0] if loss and loss.interval else None,
        loss_high=loss.interval[1] if loss and loss.interval else None,
        loss_standard_error=loss.standard_error if loss else None,
        model=loss.model if loss else None,
        speedup=known.speedup,
        speedup_low=speed.low if speed else None,
        speedup_high=speed.high if speed else None,
        decode_ms_per_token=speed.milliseconds if speed else None,
        kv_bytes_per_token=token,
        weight_bytes=plan.weight_bytes_after,
        memory_bytes=memory,
        fails=fails,
        fits=not fails,
    )
    if cross:
        option = option.model_copy(update={"cross_kv_bytes_per_encoder_token": cross})
    if constraints.memory is not None and constraints.context is not None:
        fit = fitting(
            constraints.memory,
            plan.weight_bytes_after,
            token,
            cross,
            batch=constraints.batch,
            context=constraints.context,
            encoder_tokens=encoder_tokens or 0,
            positions=stated_positions(plan.checkpoint.config),
        )
        option = option.model_copy(update=asdict(fit))
    return known, option


def _undecided(options: Sequence[ConsideredGroups], constraints: Constraints) -> list[str]:
    """Notes on the N that only the limit on the loss rules out and that may keep it."""
    limit = constraints.max_loss_increase
    return [
        f"N = {each.groups} may lose less than {limit:g} too: {each.loss_low:.2g} to {each.loss_high:.2g} are predicted; convert to it and evaluate "
        "the result to know"
        for each in options
        if limit is not None and each.fails == ("loss",) and each.loss_low is not None and each.loss_low <= limit
    ]


def _doubts(entry: ConsideredGroups, constraints: Constraints, *, calibrated: bool) -> list[str]:
    """Notes on the N that was chosen."""
    notes = []
    speed, low = constraints.min_speedup, entry.speedup_low
    if speed is not None and not entry.source and low is not None and low < speed:
        notes.append(
            f"--min-speedup {speed:g} lies within the quartiles of the speed-up of N = {entry.groups}, {low:.3g} to {entry.speedup_high:.3g}"
        )
    error, limit = entry.loss_standard_error, constraints.max_loss_increase
    if limit is not None and error and (entry.loss_increase or 0.0) + error > limit:
        notes.append(f"the loss of N = {entry.groups} is within one standard error, {error:.2g}, of the limit")
    if not entry.source and entry.model is None and not calibrated:
        notes.append("convert --calibration TEXT loses far less than a conversion from the weights alone")
    return notes


def _next(source: str, entry: ConsideredGroups | None, options: Mapping[str, object], plan: Plan) -> str | None:
    """The conversion command to run next; None for the source itself and for a result that exists already."""
    if entry is None or entry.source or entry.model is not None:
        return None
    folder = plan.checkpoint.folder
    out = f"{Path(source).name if folder is None else folder.resolve().name}-gqa{entry.groups}"
    return conversion_command(source, out, entry.groups, options)


def _device(*, computed: bool) -> str:
    """The device on which losses and times are computed by default."""
    if not computed:
        return "cpu"
    return chosen_device(None)
