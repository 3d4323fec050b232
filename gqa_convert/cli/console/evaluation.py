"""The results of an evaluation."""

from pathlib import Path

from gqa_convert.measuring.results.schemas import Difference, EvaluationFile, ModelScores, ScoredText

from .screen import number, print_note, stdout_console, styled
from .tables import Column, show_table


def show_evaluation(results: EvaluationFile, output: Path | None) -> None:
    """Print a row for each model, then notes."""
    console = stdout_console()
    reference = [results.reference] if results.reference else []
    entries = [*reference, *results.results]
    if results.data is not None:
        console.print(_title(results, results.data, entries[0]), soft_wrap=True)
        compared = [each.difference for each in entries if each.difference]
        by_byte = any(difference.loss is None for difference in compared)
        near = any(each.kl is not None for each in entries)
        headings = _headings(compared=bool(compared), by_byte=by_byte, near=near)
        show_table(
            ["model", *(Column(heading, "right") for heading in headings)],
            [_row(each, compared=bool(compared), by_byte=by_byte, near=near) for each in entries],
        )
        if compared:
            console.print(f"Differences are from {compared[0].to}, paired over the same text.", soft_wrap=True)
    for each in entries:
        if each.scored_nan:
            console.print(
                styled(
                    ("NaN", "bold red"),
                    f"  {each.scored_nan:,} of {each.tokens:,} tokens have no finite loss: {each.model}",
                ),
                soft_wrap=True,
            )
        if each.note:
            print_note(f"{each.model}: {each.note}")
    if output is not None:
        console.print(f"results  {output}", soft_wrap=True)


def _title(results: EvaluationFile, data: ScoredText, first: ModelScores) -> str:
    read = {
        "causal": f"windows of {results.context} tokens, stride {results.stride}",
        "spans": f"span corruption, {results.context} encoder tokens",
        "pairs": "pairs of texts",
    }
    nbytes = "" if first.bytes is None else f" ({first.bytes:,} bytes)"
    return f"{first.tokens:,} tokens{nbytes} of {data.source}, {read[results.objective or 'causal']}"


def _headings(*, compared: bool, by_byte: bool, near: bool) -> list[str]:
    found = ["loss", "perplexity", "bits/byte"]
    found += ["difference"] if compared else []
    found += ["in bits/byte"] if by_byte else []
    return [*found, "KL", "same top-1"] if near else found


def _row(each: ModelScores, *, compared: bool, by_byte: bool, near: bool) -> list[str]:
    loss = "NaN" if each.scored_nan else _with_error(each.loss, each.loss_standard_error, "")
    cells = [each.model or "", loss, number(each.perplexity, ".4g"), number(each.bits_per_byte, ".4f")]
    other = each.difference or Difference()
    if compared:
        cells.append(_with_error(other.loss, other.standard_error, "+"))
    if by_byte:
        cells.append(_with_error(other.bits_per_byte, other.bits_per_byte_standard_error, "+"))
    if near:
        cells += [_with_error(each.kl, each.kl_standard_error, ""), number(each.top1_agreement, ".2%")]
    return cells


def _with_error(value: float | None, error: float | None, sign: str) -> str:
    return number(value, f"{sign}.4f") + ("" if error is None else f" ± {error:.4f}")
