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


def columns(entries: Sequence[ModelScores], names: dict[str, str]) -> dict[str, list[str]]:
    """The cells of each column by its heading, without the columns that have nothing in them. Beside a divergence, which
    takes a terminal's width, the loss is shown in one form and without its error.

    Args:
        entries: a row each.
        names: what each model is called.
    """
    found: dict[str, list[str]] = {}
    for row, each in enumerate(entries):
        cells = {
            "model": names[each.model],
            "K/V/token": size(each.kv_bytes_per_token) if each.kv_bytes_per_token else "",
            "loss": "NaN" if each.scored_nan else _with_error(each.loss, each.loss_standard_error),
            "perplexity": number(each.perplexity, ".4g"),
            "bits/byte": number(each.bits_per_byte, ".4f"),
            "word errors": _with_error(each.word_error_rate, each.word_error_rate_standard_error),
            "difference": _difference(each.difference),
            "KL": _with_error(each.kl, each.kl_standard_error),
            "top-1": number(each.top1_agreement, ".2%"),
            "key loss": _with_error(each.key_loss, each.key_loss_standard_error),
            "key KL": _with_error(each.key_kl, each.key_kl_standard_error),
        }
        for heading, cell in cells.items():
            found.setdefault(heading, [""] * len(entries))[row] = cell
    if any(found["KL"]):
        del found["perplexity"], found["bits/byte"]
        found["loss"] = [cell.partition(" ")[0] for cell in found["loss"]]
    return {heading: cells for heading, cells in found.items() if any(cells)}


def retrieval_title(asked: AskedQuestions) -> str:
    """What was asked, in one line."""
    lengths = ", ".join(f"{length:,}" for length in asked.lengths)
    return f"Exact answers in percent in texts of {lengths} tokens, {asked.questions} questions of each kind at each length"


def retrieval_columns(entries: Sequence[ModelScores], names: dict[str, str]) -> dict[str, list[str]]:
    """The cells of each column by its heading: shares of exact answers in percent by kind and by length, and the loss of
    the first model on what each model writes.
    """
    found: dict[str, list[str]] = {}
    for each in entries:
        assert each.retrieval is not None
        found.setdefault("model", []).append(names[each.model])
        for part in each.retrieval.found:
            if part.kind is None or part.length is None:
                heading = part.kind or (f"{part.length:,}" if part.length else "all")
                found.setdefault(heading, []).append(percent(part.found, part.standard_error))
                if heading == "all":
                    cell = percent(part.difference, part.difference_standard_error, "+")
                    found.setdefault("difference", []).append(cell)
        written = _with_error(each.retrieval.written_loss, each.retrieval.written_loss_standard_error)
        found.setdefault("own text", []).append(written)
    return {heading: cells for heading, cells in found.items() if any(cells)}


def _difference(other: Difference | None) -> str:
    if other is None:
        return ""
    if other.loss is None and other.bits_per_byte is not None:
        return _with_error(other.bits_per_byte, other.bits_per_byte_standard_error, "+") + " bits/byte"
    return _with_error(other.loss, other.standard_error, "+")


def _with_error(value: float | None, error: float | None, sign: str = "") -> str:
    return number(value, f"{sign}.4f") + ("" if error is None else f" ±{error:.4f}")


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
