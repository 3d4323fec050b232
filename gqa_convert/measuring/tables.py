"""Results as tables of text: for a terminal, a page and a model card."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from gqa_convert.runtime.messages import size

from .results import BenchmarkFile, EvaluationFile, ModelScores, ScoredText

Row = dict[str, str]
"""Cells by the headings of their columns, which are the same in all rows of a table."""
Names = dict[str, str]
"""What models are called, by their names in results."""


class Table(NamedTuple):
    """A table and its title."""

    title: str
    rows: list[Row]


def figure(scores: object, key: str, form: str = ".4f") -> str:
    """A figure of results with its standard error if it has one; nothing for what was not measured.

    Args:
        scores: an entry of results.
        key: of the figure.
        form: of both numbers, as `format` takes it.
    """
    error = getattr(scores, f"{key}_standard_error", None)
    shown = number(getattr(scores, key), form)
    if error is not None:
        shown += f" ±{error:{form.removeprefix('+')}}"
    return shown


def number(value: float | None, form: str) -> str:
    """A number as a cell of a table; None is an empty cell."""
    return "" if value is None else format(value, form)


def filled(title: str, rows: list[Row]) -> Table:
    """A table of these rows without the columns that have nothing in them."""
    for heading in list(rows[0]):
        if not any(row[heading] for row in rows):
            for row in rows:
                del row[heading]
    return Table(title, rows)


def short_names(entries: Sequence[ModelScores]) -> Names:
    """The names of models by their last parts, where these tell all of them apart."""
    short = {each.model: Path(each.model).resolve().name for each in entries}
    if len(set(short.values())) < len(short):
        return {model: model for model in short}
    return short


def evaluation_tables(
    results: EvaluationFile, entries: Sequence[ModelScores], names: Names
) -> list[Table]:
    """The losses of models, and what they answered, as far as both were measured.

    Args:
        results: of the evaluation.
        entries: those of the models to show, a row each.
        names: what each model is called.
    """
    tables = []
    if results.data is not None:
        title = (
            f"{entries[0].tokens:,} tokens of {_text_name(results.data)}, {results.objective}, "
            f"at most {results.context} tokens at once"
        )
        tables.append(filled(title, [_losses(each, names) for each in entries]))
    if asked := results.questions:
        lengths = ", ".join(f"{length:,}" for length in asked.lengths)
        title = (
            f"Exact answers in texts of {lengths} tokens, {asked.questions} questions of each kind "
            "at each length"
        )
        tables.append(filled(title, [_answers(each, names) for each in entries]))
    return tables


def _text_name(text: ScoredText) -> str:
    """The source of a text; of a Hub dataset also its commit, configuration and split."""
    if text.revision is None:
        return text.source
    return " ".join(filter(None, (f"{text.source}@{text.revision[:12]}", text.name, text.split)))


def _losses(scores: ModelScores, names: Names) -> Row:
    return {
        "model": names[scores.model],
        "K/V/token": size(scores.kv_bytes_per_token) if scores.kv_bytes_per_token else "",
        "loss": figure(scores, "loss"),
        "bits/byte": number(scores.bits_per_byte, ".4f"),
        "word errors": figure(scores, "word_error_rate"),
        "difference": figure(scores.difference, "loss", "+.4f") if scores.difference else "",
        "KL": figure(scores, "kl"),
    }


def _answers(scores: ModelScores, names: Names) -> Row:
    """Shares of exact answers by kind and by length, and of how many questions they are."""
    row = {"model": names[scores.model]}
    for part in scores.retrieval or ():
        if part.kind and part.length:
            continue
        length = f"{part.length:,}" if part.length else "all"
        row[f"{part.kind or length} ({part.questions:,})"] = figure(part, "found", ".0%")
        if not (part.kind or part.length):
            row["difference"] = figure(part, "difference", "+.0%")
    return row


def notes(entries: Sequence[ModelScores], names: Names) -> list[str]:
    """What there is to say about single models."""
    found = []
    for each in entries:
        name = names[each.model]
        if each.difference:
            to = names.get(each.difference.to, Path(each.difference.to).name)
            found.append(f"{name}: differences are from {to}, paired over the same text")
        if each.scored_nan:
            found.append(
                f"{name}: {each.scored_nan:,} of {each.tokens:,} tokens have no finite loss"
            )
        if each.note:
            found.append(f"{name}: {each.note}")
    return found


def benchmark_table(result: BenchmarkFile) -> Table:
    """Times and sizes; speed is relative to the source's own number of K/V heads, if that was
    timed.
    """
    title = (
        f"{result.model}: {result.model_type}, {result.source_kv_heads} K/V heads, {result.dtype}; "
        f"transformers, attention {result.attention}; "
        f"{result.machine.processor}, {result.machine.device}. Medians (and quartiles)"
    )
    own = [cell for cell in result.results if cell.kv_heads == result.source_kv_heads]
    sources = {(cell.batch, cell.context): cell.decode_ms_per_token for cell in own}
    rows = []
    for cell in result.results:
        decode = cell.decode_ms_per_token
        source = sources.get((cell.batch, cell.context))
        row = {
            "N": str(cell.kv_heads),
            "batch": str(cell.batch),
            "context": f"{cell.context:,}",
            "ms/token": f"{decode:.3g} ({cell.decode_ms_low:.3g} to {cell.decode_ms_high:.3g})",
            "speed": f"{source / decode:.2f}x" if source else "",
            "K/V cache": size(cell.kv_bytes),
        }
        rows.append(row)
    return filled(title, rows)
