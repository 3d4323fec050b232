"""Losses and times that were measured before, from the files of `evaluate`, `inspect` and `benchmark`."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from gqa_convert.conversion.plan import Plan
from gqa_convert.measuring.recommend.choice import Constraints
from gqa_convert.measuring.recommend.speed import Speed, speeds
from gqa_convert.measuring.results.fields import Fields, is_there, parse_json
from gqa_convert.measuring.results.finding import find
from gqa_convert.measuring.results.identifying import SOURCE
from gqa_convert.measuring.results.joining import Row, join
from gqa_convert.measuring.results.records import Material


@dataclass(frozen=True, slots=True)
class Loss:
    """What a number of K/V heads costs, in nats per token over the source."""

    increase: float
    kind: Literal["upper bound", "measured"]
    standard_error: float | None = None
    model: str | None = None
    """The converted checkpoint that was measured."""


@dataclass
class Found:
    """What the files hold on one source."""

    losses: dict[int, Loss] = field(default_factory=dict)
    loss_text: str | None = None
    """What the losses are of."""
    speeds: dict[int, Speed] = field(default_factory=dict)
    timing: dict[str, Any] | None = None
    """Where the times are from, and what was timed."""
    notes: list[str] = field(default_factory=list)


def read_results(paths: Sequence[Path], source: str, plan: Plan, constraints: Constraints) -> Found:
    """Read what `evaluate`, `inspect` and `benchmark` wrote about a source.

    Args:
        paths: folders, searched as for a report, or files.
        source: as the user named it.
        plan: of a conversion of it.
        constraints: batch and context, which the times should be of.

    Returns:
        What was found; of an evaluation the best model of each N, and of several texts the one with the most N.

    Raises:
        ReportError: a file is broken, there is no such folder, or there are no results at all.
    """
    material = find(paths)
    found = Found()
    _predicted(material, source, plan, found)
    _measured(material, source, plan, found)
    _timed(material, source, plan, constraints, found)
    return found


def _predicted(material: Material, source: str, plan: Plan, found: Found) -> None:
    """Losses that `inspect` predicted."""
    for inspection in material.inspections:
        fields = _fields(inspection.origin.path)
        losses = fields.part("loss")
        if losses is None or not _same(inspection.source, source) or not _same_heads(fields, plan):
            continue
        for each in losses.parts("by_groups"):
            increase = each.number("increase")
            if increase is not None:
                found.losses[each.need_groups()] = Loss(increase, "upper bound")
        found.loss_text = f"inspect, {inspection.origin.path}"


def _measured(material: Material, source: str, plan: Plan, found: Found) -> None:
    """Losses of converted checkpoints beside their source's, on one text; they stand before predictions."""
    best: dict[int, Loss] = {}
    text = None
    for table in join(material)[0]:
        base = next((row for row in table.rows if _is_base(row, source, plan)), None)
        if base is None or base.score is None or base.score.loss is None:
            continue
        losses: dict[int, Loss] = {}
        for row in table.rows:
            loss = None if row is base or row.source != Path(source).name else _difference(row, base)
            if loss is not None and row.groups is not None and row.groups < plan.source_kv_heads:
                losses[row.groups] = min(loss, losses.get(row.groups, loss), key=lambda each: each.increase)
        if len(losses) > len(best):
            best, text = losses, table.text
    found.losses |= best
    if best:
        found.loss_text = text
        found.notes += [
            f"N = {groups} is {loss.model}, the best of that N on {text}" for groups, loss in sorted(best.items())
        ]


def _is_base(row: Row, source: str, plan: Plan) -> bool:
    """Whether a row is the source: by its name, or a copy of it."""
    if row.label == SOURCE:
        return _same(row.model, source)
    return row.label == "copy" and row.groups == plan.source_kv_heads and row.source == Path(source).name


def _difference(row: Row, base: Row) -> Loss | None:
    """The paired difference where the evaluation has it, else that of the means."""
    assert base.score is not None
    assert base.score.loss is not None
    if row.score is None or row.score.loss is None:
        return None
    paired = row.score.difference
    if paired is not None and paired[0] == base.model and paired[1] is not None:
        return Loss(paired[1], "measured", paired[2], row.model)
    return Loss(row.score.loss - base.score.loss, "measured", None, row.model)


def _timed(material: Material, source: str, plan: Plan, constraints: Constraints, found: Found) -> None:
    """Times of the benchmark's cell that is nearest in batch, then in context, then has the most N, then is the
    newest.
    """
    best: tuple[Any, ...] | None = None
    for benchmark in material.benchmarks:
        fields = _fields(benchmark.origin.path)
        if (
            not _same(benchmark.model, source)
            or not _same_heads(fields, plan)
            or benchmark.model_type not in (None, plan.family.model_type)
        ):
            continue
        for (batch, context), records in _cells(fields):
            timed = speeds(records, plan.source_kv_heads)
            if len(timed) < 2:
                found.notes.append(
                    f"{benchmark.origin.path} is left out at batch {batch}, context {context}: it does not time the source's own N = "
                    f"{plan.source_kv_heads} beside others"
                )
                continue
            rank = (
                -_away(batch, constraints.batch),
                -_away(context, constraints.context),
                len(timed),
                benchmark.origin.created or "",
                context,
            )
            if best is None or rank > best:
                best, found.speeds = rank, timed
                found.timing = {
                    "from": str(benchmark.origin.path),
                    "batch": batch,
                    "context": context,
                    "encoder_tokens": records[0]["encoder_tokens"],
                    "layers": fields.count("layers"),
                    "model_layers": fields.count("model_layers"),
                    "dtype": fields.text("dtype"),
                    "attention": fields.text("attention"),
                    "machine": fields.record.get("machine"),
                }
    if found.timing is not None and constraints.min_speedup is not None:
        given, asked = (found.timing["batch"], found.timing["context"]), (constraints.batch, constraints.context)
        if given[0] != asked[0] or asked[1] not in (None, given[1]):
            wanted = f"batch {asked[0]}" if asked[1] is None else f"batch {asked[0]}, context {asked[1]:,}"
            found.notes.append(
                f"{found.timing['from']} was timed at batch {given[0]}, context {given[1]:,}, and {wanted} is asked for"
            )


def _away(given: int, asked: int | None) -> float:
    """How far a batch or a context is from the one that is asked for: the logarithm of their ratio."""
    return abs(math.log(max(given, 1) / asked)) if asked else 0.0


def _cells(fields: Fields) -> Iterator[tuple[tuple[int, int], list[dict[str, Any]]]]:
    """A benchmark's results by batch and context; of several inputs of an encoder the last counts."""
    cells: dict[tuple[int, int], dict[int, dict[str, Any]]] = {}
    names = ("decode_ms_per_token", "decode_ms_low", "decode_ms_high", "estimated_decode_ms_per_token")
    for each in fields.parts("results"):
        record = {name: each.number(name) for name in names if name in each.record}
        groups = each.need_groups()
        cells.setdefault((each.count("batch") or 0, each.count("context") or 0), {})[groups] = record | {
            "groups": groups,
            "encoder_tokens": each.count("encoder_tokens"),
        }
    for setting, records in cells.items():
        yield setting, list(records.values())


def _fields(path: Path) -> Fields:
    return Fields(parse_json(path), str(path))


def _same_heads(fields: Fields, plan: Plan) -> bool:
    stated = (fields.count("heads"), plan.heads), (fields.count("kv_heads"), plan.source_kv_heads)
    return all(theirs in (None, ours) for theirs, ours in stated)


def _same(name: str, source: str) -> bool:
    """Whether two names mean the same checkpoint: the same place, or the same last part where one of them is not here
    any more.
    """
    ours, theirs = Path(source), Path(name)
    theirs = theirs.parent if theirs.name == "config.json" else theirs
    if is_there(ours) and is_there(theirs):
        return ours.resolve() == theirs.resolve()
    return ours.resolve().name == theirs.name
