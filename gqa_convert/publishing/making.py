"""How a checkpoint was made, for its card: conversions, uptraining, commands, versions."""

import json
import shlex
from dataclasses import dataclass

from gqa_convert.measuring.results.fields import printable
from gqa_convert.measuring.results.kv_heads import by_number, in_words
from gqa_convert.measuring.results.schemas import (
    CalibrationRecord,
    ConversionRecord,
    TrainingRecord,
    TrainingText,
)
from gqa_convert.merging.methods import METHODS
from gqa_convert.publishing.facts import Facts
from gqa_convert.publishing.markup import Markdown, code, number, plain, significant

_HYPERPARAMETERS = (
    "objective",
    "optimizer",
    "learning_rate",
    "schedule",
    "tokens_per_step",
    "sequence_length",
    "precision",
    "trainable",
    "teacher",
    "distillation_weight",
    "seed",
)


@dataclass(frozen=True)
class Training:
    """An uptraining run.

    Attributes:
        tokens: None where they were not recorded.
        texts: the training texts with their options.
        settings: the hyperparameters; None where no recipe was recorded.
        losses: on the evaluation text at the start and at the end, None where it was not measured.
    """

    tokens: int | None
    texts: Markdown
    settings: Markdown | None
    losses: str | None


@dataclass(frozen=True)
class Step:
    """A conversion and the uptraining after it.

    Attributes:
        heads: the K/V heads of its source and of its result, in words.
        method: that merged the heads.
        meaning: what the method does, None for a method that is unknown here.
        exact: whether the result computes exactly what its source does.
        calibrated: whether it used calibration text.
        text: what that was, None where it was not recorded.
        divergence: from the source on held-out parts of the calibration text, None where it was not measured.
        errors: rows of the table of merge errors.
        trainings: the runs after it, oldest first.
    """

    heads: str
    method: str
    meaning: str | None
    exact: bool
    calibrated: bool
    text: str | None
    divergence: str | None
    errors: tuple[tuple[str, ...], ...]
    trainings: tuple[Training, ...]


@dataclass(frozen=True)
class Making:
    """How a checkpoint was made.

    Attributes:
        steps: conversions, oldest first.
        commands: those that were recorded, as a shell takes them.
        unrecorded: which commands were not, None where all were.
        versions: of the libraries.
    """

    steps: tuple[Step, ...]
    commands: tuple[str, ...]
    unrecorded: str | None
    versions: Markdown


def making_of(facts: Facts) -> Making:
    """How a checkpoint was made, from its record and those of the conversions before."""
    commands = [command for record in facts.chain for command in _commands(record)]
    missing = sum(not command for command in commands)
    which = "The command was" if len(commands) == 1 else f"{missing} of {len(commands)} commands were"
    return Making(
        steps=tuple(_step(record, earlier) for record, earlier in zip(facts.chain, (None, *facts.chain), strict=False)),
        commands=tuple(shlex.join(map(printable, command)) for command in commands if command),
        unrecorded=which if missing else None,
        versions=_versions(facts),
    )


def _step(record: ConversionRecord, earlier: ConversionRecord | None) -> Step:
    method, calibration = record.method or "not recorded", record.calibration
    known = METHODS.get(method)  # None for a method that is unknown here
    exact = known is not None and known.is_exact
    return Step(
        heads=_heads(record, earlier),
        method=method,
        meaning=known.card_sentence if known else None,
        exact=exact,
        calibrated=calibration is not None,
        text=calibration.text if calibration else None,
        divergence=_divergence(calibration) if calibration else None,
        errors=() if exact else _merge_errors(record.errors),
        trainings=tuple(map(_training, record.uptraining)),
    )


def _heads(record: ConversionRecord, earlier: ConversionRecord | None) -> str:
    """From how many K/V heads to how many; where layers differ, with the layers of each number."""
    after, before = record.groups, number(record.source_kv_heads, 0) or "an unrecorded number of"
    if earlier is not None and not isinstance(earlier.groups, int):
        before = in_words(earlier.groups)
    if isinstance(after, int):
        return f"{before} to {after} K/V heads per layer"
    return f"{before} K/V heads per layer to {by_number(after)}"


def _divergence(calibration: CalibrationRecord) -> str | None:
    measured = calibration.kl
    start, end = (measured.before, measured.after) if measured else (None, None)
    if start is None or end is None:
        return None
    together = f", {significant(start)} before all layers were trained on it together" if end < start else ""
    return f"{significant(end)} nats per token{together}"


def _merge_errors(errors: dict[str, float]) -> tuple[tuple[str, ...], ...]:
    """A row for each kind of tensor: the last word of the tensors' names, of a bias the last two."""
    parts: dict[str, list[float]] = {}
    for name, value in errors.items():
        stem = name.removesuffix(".weight")
        parts.setdefault(".".join(stem.split(".")[-2 if stem.endswith(".bias") else -1 :]), []).append(value)
    return tuple(
        (
            code(part),
            significant(len(values), 0),
            significant(min(values)),
            significant(sum(values) / len(values)),
            significant(max(values)),
        )
        for part, values in sorted(parts.items())
    )


def _training(training: TrainingRecord) -> Training:
    recipe = training.recipe
    texts, settings = [], []
    if recipe is not None:
        texts = [f"{code(each.source or 'not recorded')}{_options(each)}" for each in recipe.data]
        values = [(key, getattr(recipe, key)) for key in _HYPERPARAMETERS]
        settings = [f"{plain(key)} {code(_plain_value(value))}" for key, value in values if value is not None]
    return Training(
        tokens=training.tokens,
        texts=Markdown(", ".join(texts) or "not recorded"),
        settings=None if recipe is None else Markdown(", ".join(settings)),
        losses=_losses(training),
    )


def _losses(training: TrainingRecord) -> str | None:
    found = training.evaluation
    if found is None or found.start is None or found.final is None:
        return None
    source, share = found.source, found.recovered_share
    return (
        f"{significant(found.start)} at the start, {significant(found.final)} at the end"
        + (f", {significant(source)} for the source" if source is not None else "")
        + " (nats per token)"
        + (f"; {share:.1%} of the gap closed" if share is not None else "")
    )


def _options(source: TrainingText) -> str:
    """The options of a dataset that are not the defaults."""
    options = (("name", source.name, None), ("split", source.split, "train"), ("revision", source.revision, None))
    stated = [f"{key} {code(value)}" for key, value, default in options if value is not None and value != default]
    return f" ({', '.join(stated)})" if stated else ""


def _plain_value(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _commands(record: ConversionRecord) -> list[tuple[str, ...] | None]:
    return [record.command, *(each.command for each in record.uptraining)]


def _versions(facts: Facts) -> Markdown:
    """The versions of each library in the order in which they were used."""
    found: dict[str, list[str]] = {}
    machines = [each.machine for each in facts.chain] + [each.machine for each in facts.trainings]
    for machine in machines:
        versions = (machine.versions if machine else None) or {}
        for name, version in versions.items():
            if version and version not in found.setdefault(name, []):
                found[name].append(version)
    named = [f"{plain(name)} {plain(' and '.join(texts))}" for name, texts in found.items()]
    return Markdown(", ".join(named) or "not recorded")
