"""Every JSON file that one command writes and another reads, each declared once for its writer and its readers.

The names of the fields are the keys in the file, and a file may lack any key that has a default here.
"""

from typing import Any, Self

from pydantic import JsonValue

from gqa_convert.measuring.results.stored import (
    FORMAT_VERSION,
    Count,
    Groups,
    LayerGroups,
    Number,
    StatedGroups,
    Stored,
    Strings,
    Text,
    known_numbers,
)


class Machine(Stored):
    """The machine and the software of a measurement."""

    device: Text = None
    processor: Text = None
    cores: Count = None
    memory_bytes: Number = None
    system: Text = None
    versions: dict[str, Text] | None = None


class Head(Stored):
    """What every measurement begins with: what it is, when, by which command and on what machine it was made."""

    kind: Text = None
    format_version: int = FORMAT_VERSION
    created: Text = None
    command: Strings = None
    machine: Machine | None = None

    def headed(self, head: "Head") -> Self:
        """The same file with its head."""
        return self.model_copy(update=dict(head) | {"format_version": FORMAT_VERSION})


# evaluate


class Difference(Stored):
    """How much more a model loses than another on the same text; nats per token and bits per byte."""

    to: Text = None
    loss: Number = None
    standard_error: Number = None
    bits_per_byte: Number = None
    bits_per_byte_standard_error: Number = None


class ModelScores(Stored):
    """One model of an evaluation; losses and divergences in nats per token, null where not measured."""

    model: Text = None
    revision: Text = None
    dtype: Text = None
    loss: Number = None
    loss_standard_error: Number = None
    perplexity: Number = None
    bits_per_byte: Number = None
    bits_per_byte_standard_error: Number = None
    tokens: Count = None
    bytes: Count = None
    scored_nan: Count = None
    difference: Difference | None = None
    kl: Number = None
    kl_standard_error: Number = None
    top1_agreement: Number = None
    seconds: Number = None
    note: Text = None


class ScoredText(Stored):
    """The text of an evaluation: its source and the options that it was read with."""

    source: Text = None
    split: Text = None
    name: Text = None
    revision: Text = None
    text_field: Text = None
    tokens_limit: Count = None
    source_field: Text = None
    target_field: Text = None


class EvaluationFile(Head):
    """What `evaluate` writes."""

    data: ScoredText | None = None
    objective: Text = None
    context: Count = None
    stride: Count = None
    dtype: Text = None
    seed: Count = None
    processes: Count = None
    reference: ModelScores | None = None
    results: tuple[ModelScores, ...] = ()


# benchmark


class TimedCell(Stored):
    """One number of K/V heads, or a list with that of each layer, at one batch and context; times in ms, sizes in bytes."""

    groups: LayerGroups
    batch: Count = None
    context: Count = None
    encoder_tokens: Count = None
    decode_ms_per_token: Number = None
    decode_ms_low: Number = None
    decode_ms_high: Number = None
    decode_tokens_per_second: Number = None
    prefill_ms: Number = None
    sample_ms: Number = None
    new_tokens: Count = None
    kv_bytes_per_token: Number = None
    cross_kv_bytes_per_encoder_token: Number = None
    kv_bytes: Number = None
    repetitions: Count = None
    weight_bytes: Count = None
    largest_batch: Count = None
    largest_context: Count = None


class MemoryBudget(Stored):
    """The budget that `largest_batch` and `largest_context` fill, and what is counted."""

    bytes: Count = None
    assumed: Text = None


class BenchmarkFile(Head):
    """What `benchmark` writes."""

    model: Text = None
    model_type: Text = None
    layers: Count = None
    dtype: Text = None
    heads: Count = None
    kv_heads: StatedGroups = None
    weights: Text = None
    attention: Text = None
    cache: Text = None
    threads: Count = None
    order: Text = None
    steps: Count = None
    spread: Text = None
    results: tuple[TimedCell, ...] = ()
    memory: MemoryBudget | None = None
    plot: Text = None


# inspect


class MergeErrors(Stored):
    """Relative errors (rms) of a layer's keys and values at one number of groups."""

    groups: Groups
    keys: Number = None
    values: Number = None


class PairError(Stored):
    """The errors of merging two K/V heads alone."""

    heads: tuple[int, int]
    error: Number = None
    keys: Number = None
    values: Number = None


class InspectedLayer(Stored):
    """One attention layer; `place` is its attention kind, the barriers are its folding constraints."""

    module: Text = None
    label: Text = None
    place: Text = None
    kv_heads: Count = None
    errors: tuple[MergeErrors, ...] = ()
    cheapest_pairs: tuple[PairError, ...] = ()
    key_barrier: Text = None
    value_barrier: Text = None


class InspectedText(Stored):
    """The calibration text of an inspection."""

    text: Text = None
    tokens: Count = None
    sequence_length: Count = None
    seed: Count = None
    digest: Text = None
    held_out_blocks: Count = None
    warning: Text = None


class LossAfterFit(Stored):
    """The predicted loss increase of `convert --calibration` over the source, in nats per token, and its interval."""

    increase: Number = None
    low: Number = None
    high: Number = None


class QuickFit(Stored):
    """The short fits that losses after `fit` are predicted from.

    `tokens` is the number of held-out tokens that they are judged on; `last_stage` says whether the prediction includes
    the stage of `fit` that trains all layers together, for divergences that make it worthwhile.
    """

    modules: Strings = None
    groups: tuple[Groups, ...] = ()
    steps: Count = None
    tokens: Count = None
    last_stage: bool | None = None


class GroupsLoss(Stored):
    """The loss at one number of groups and its increase over the source, in nats per token; null where not finite.

    `loss` and `increase` are those of the closed form alone, an upper bound of what `after_fit` predicts.
    """

    groups: Groups
    loss: Number = None
    increase: Number = None
    after_fit: LossAfterFit | None = None


class PredictedLoss(Stored):
    """Losses on held-out calibration text, in nats per token."""

    source: Number = None
    tokens: Count = None
    by_groups: tuple[GroupsLoss, ...] = ()
    quick_fit: QuickFit | None = None


class Advice(Stored):
    """The number of groups that an inspection recommends, the reason, and the command to run next; also the one that
    spends the same K/V cache layer by layer, null where layers may not differ.
    """

    groups: Count = None
    reason: Text = None
    command: Text = None
    by_layer: Text = None


class InspectionFile(Stored):
    """What `inspect --json` prints."""

    format_version: int = FORMAT_VERSION
    source: Text = None
    model_type: Text = None
    heads: Count = None
    kv_heads: Count = None
    groups: tuple[Groups, ...] = ()
    calibration: InspectedText | None = None
    layers: tuple[InspectedLayer, ...] = ()
    loss: PredictedLoss | None = None
    max_loss_increase: Number = None
    recommendation: Advice | None = None
    plot: Text = None


# uptrain


class RecoveredLoss(Stored):
    """Losses on the recipe's evaluation data in nats per token, and the share of the gap to the source that closed."""

    start: Number = None
    source: Number = None
    final: Number = None
    recovered_share: Number = None


# convert, as it is read here


class TrainingText(Stored):
    """A data source of a recipe."""

    source: Text = None
    name: Text = None
    split: Text = None
    revision: Text = None


class RecordedRecipe(Stored):
    """The recipe of an uptraining, as far as a model card states it."""

    data: tuple[TrainingText, ...] = ()
    objective: JsonValue = None
    optimizer: JsonValue = None
    learning_rate: JsonValue = None
    schedule: JsonValue = None
    tokens_per_step: JsonValue = None
    sequence_length: JsonValue = None
    precision: JsonValue = None
    trainable: JsonValue = None
    teacher: JsonValue = None
    distillation_weight: JsonValue = None
    seed: JsonValue = None


class TrainingRecord(Head):
    """An uptraining in the record of the conversion that it started from."""

    tokens: Count = None
    recipe: RecordedRecipe | None = None
    evaluation: RecoveredLoss | None = None
    adapters: Text = None


class FileRecord(Stored):
    """The size and the hash by which a file is known again."""

    bytes: Count = None
    sha256: Text = None


class SourceRecord(Stored):
    """What a checkpoint was converted from."""

    id: Text = None
    revision: Text = None
    files: dict[str, FileRecord] | None = None


class ResultRecord(Stored):
    """The files that a conversion or an uptraining wrote."""

    files: dict[str, FileRecord] | None = None


class BeforeAfter(Stored):
    """A quantity of the source and of the result."""

    before: Number = None
    after: Number = None


class CalibrationRecord(Stored):
    """The calibration text of a conversion, and the divergence from the source on held-out parts of it."""

    text: Text = None
    kl: BeforeAfter | None = None


class ConversionRecord(Stored):
    """`gqa_conversion.json`, as far as it is read here."""

    format_version: int = FORMAT_VERSION
    created: Text = None
    command: Strings = None
    machine: Machine | None = None
    source: SourceRecord | None = None
    model_type: Text = None
    route: Text = None
    method: Text = None
    calibration: CalibrationRecord | None = None
    heads: Count = None
    source_kv_heads: Count = None
    groups: LayerGroups
    encoder: Any = None
    merge_error: dict[str, Number] | None = None
    kv_bytes_per_token: BeforeAfter | None = None
    cross_kv_bytes_per_encoder_token: BeforeAfter | None = None
    result: ResultRecord | None = None
    uptraining: tuple[TrainingRecord, ...] = ()
    previous: Any = None
    """The record of the conversion that made the source, not yet read: the chain may be long."""

    @property
    def errors(self) -> dict[str, float]:
        """Relative merge errors by tensor, or by module and part of it."""
        return known_numbers(self.merge_error or {})


# demo


class DemoConversion(Stored):
    """A conversion of the demo, whether it passed `verify`, and its loss in nats per token."""

    groups: Groups
    out: Text = None
    method: Text = None
    kv_bytes_per_token: Number = None
    parameters: Count = None
    verified: bool | None = None
    loss: Number = None
    fit: "DemoConversion | None" = None


class DemoPoint(Stored):
    """The loss after a number of tokens of the demo's uptraining, in nats per token."""

    tokens: Count = None
    loss: Number = None


class DemoUptraining(Stored):
    """The demo's uptraining of one result."""

    groups: Groups
    recipe: Text = None
    curve: tuple[DemoPoint, ...] = ()
    model: Text = None
    tokens: Count = None
    alpha: Number = None
    evaluation: RecoveredLoss | None = None


class DemoFile(Stored):
    """What `demo` writes into `results.json` and `demo --json` prints."""

    source: Text = None
    held_out_tokens: Count = None
    calibration_tokens: Count = None
    passed: bool | None = None
    results: tuple[DemoConversion, ...] = ()
    results_file: Text = None
    plot: Text = None
    uptraining: DemoUptraining | None = None
