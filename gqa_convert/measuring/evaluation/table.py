"""The rows of a table of losses, for a terminal and for a page."""

from collections.abc import Sequence
from pathlib import Path

from gqa_convert.checkpoint.byte_sizes import size
from gqa_convert.measuring.results import AskedQuestions, Difference, EvaluationFile, ModelScores


def title(results: EvaluationFile) -> str:
    """What was scored, in one line."""
    how = f"windows of {results.context} tokens"
    if results.objective == "speech":
        how = "sounds of one window each"
    elif results.objective != "causal":
        how = f"{results.objective} of at most {results.context} tokens"
    source = "" if results.data is None else results.data.source
    return f"{results.entries()[0].tokens:,} tokens of {source}, {how}"


def short_names(entries: Sequence[ModelScores]) -> dict[str, str]:
    """The names of models, and of those compared with, by their last parts where these tell all of them apart."""
    names = {each.model for each in entries}
    names |= {each.difference.to for each in entries if each.difference}
    short = {name: Path(name).name for name in names}
    if len(set(short.values())) < len(names):
        short = {name: name for name in names}
    return short


def rows(entries: Sequence[ModelScores], names: dict[str, str]) -> list[dict[str, str]]:
    """The cells of each row by their headings, without the columns that have nothing in them. Beside a divergence, which
    takes a terminal's width, the loss is shown in one form and without its error.

    Args:
        entries: a row each.
        names: what each model is called.
    """
    found = [{"model": names[each.model], **_cells(each)} for each in entries]
    if any(row["KL"] for row in found):
        for row in found:
            row |= {"loss": row["loss"].partition(" ")[0], "perplexity": "", "bits/byte": ""}
    return filled(found)


def _cells(scores: ModelScores) -> dict[str, str]:
    return {
        "K/V/token": size(scores.kv_bytes_per_token) if scores.kv_bytes_per_token else "",
        "loss": "NaN" if scores.scored_nan else _with_error(scores, "loss"),
        "perplexity": number(scores.perplexity, ".4g"),
        "bits/byte": number(scores.bits_per_byte, ".4f"),
        "word errors": _with_error(scores, "word_error_rate"),
        "difference": _difference(scores.difference),
        "KL": _with_error(scores, "kl"),
        "top-1": number(scores.top1_agreement, ".2%"),
        "key loss": _with_error(scores, "key_loss"),
        "key KL": _with_error(scores, "key_kl"),
    }


def filled(rows: Sequence[dict[str, str]]) -> list[dict[str, str]]:
    """Rows without the columns that have nothing in them."""
    headings = [heading for heading in rows[0] if any(row[heading] for row in rows)]
    return [{heading: row[heading] for heading in headings} for row in rows]


def retrieval_title(asked: AskedQuestions) -> str:
    """What was asked, in one line."""
    lengths = ", ".join(f"{length:,}" for length in asked.lengths)
    return f"Exact answers in percent in texts of {lengths} tokens, {asked.questions} questions of each kind at each length"


def retrieval_rows(entries: Sequence[ModelScores], names: dict[str, str]) -> list[dict[str, str]]:
    """The cells of each row by their headings: shares of exact answers in percent by kind and by length, and the loss of
    the first model on what each model writes.
    """
    rows = []
    for each in entries:
        assert each.retrieval is not None
        row = {"model": names[each.model]}
        for part in each.retrieval.found:
            share = percent(part.found, part.found_standard_error)
            if part.kind is None and part.length is None:
                difference = percent(part.difference, part.difference_standard_error, "+")
                row |= {"all": share, "difference": difference}
            elif part.kind is None or part.length is None:
                row[part.kind or f"{part.length:,}"] = share
        rows.append({**row, "own text": _with_error(each.retrieval, "written_loss")})
    return filled(rows)


def _difference(other: Difference | None) -> str:
    if other is None:
        return ""
    if other.loss is None and other.bits_per_byte is not None:
        return _with_error(other, "bits_per_byte", "+") + " bits/byte"
    return _with_error(other, "loss", "+")


def _with_error(scores: object, name: str, sign: str = "") -> str:
    """A number of results with its standard error."""
    error = getattr(scores, f"{name}_standard_error")
    return number(getattr(scores, name), f"{sign}.4f") + ("" if error is None else f" ±{error:.4f}")


def number(value: float | None, form: str) -> str:
    """A number as a cell of a table; None is an empty cell."""
    return "" if value is None else format(value, form)


def percent(share: float | None, error: float | None = None, sign: str = "") -> str:
    """A share in percent with its standard error; None is an empty cell."""
    if share is None:
        return ""
    return format(100 * share, f"{sign}.0f") + ("" if error is None else f" ±{100 * error:.0f}")


def notes(entries: Sequence[ModelScores], names: dict[str, str]) -> list[str]:
    """What differences are from, and what there is to say about single models."""
    found = []
    targets = {names[each.difference.to] for each in entries if each.difference}
    if targets:
        found.append(f"differences are from {' or '.join(sorted(targets))}, paired over the same text")
    for each in entries:
        if each.scored_nan:
            found.append(f"{each.scored_nan:,} of {each.tokens:,} tokens have no finite loss: {names[each.model]}")
        if each.note:
            found.append(f"{names[each.model]}: {each.note}")
    return found
