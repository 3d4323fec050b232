"""Parses the JSON of each command into the records of a report."""

import shlex
from pathlib import Path
from typing import Any, TypeVar

from gqa_convert.errors import ReportError
from gqa_convert.measuring.results.configs import read_config
from gqa_convert.measuring.results.fields import is_there, printable
from gqa_convert.measuring.results.kv_heads import KVHeads, heads_in
from gqa_convert.measuring.results.records import (
    Benchmark,
    Conversion,
    Evaluation,
    Inspection,
    Origin,
    Run,
    Score,
    Timing,
)
from gqa_convert.measuring.results.schemas import (
    BenchmarkFile,
    ConversionRecord,
    DemoFile,
    EvaluationFile,
    Head,
    InspectionFile,
    Machine,
    MetricsLine,
    ModelScores,
    RecoveredLoss,
    RunSummary,
    ScoredText,
    SourceRecord,
)
from gqa_convert.measuring.results.stored import numbers_in
from gqa_convert.training.metrics import read_metrics
from gqa_convert.training.run_folder import RunFolder

_Result = TypeVar("_Result")

MEASUREMENTS = ("evaluate", "benchmark", "uptrain")
"""Commands whose JSON states its `kind`."""


_WEIGHTS = {"own": "the model's own weights", "random": "random weights"}
"""How a benchmark names the weights of the timed model, in words."""


def kind_of(content: Any, path: Path) -> tuple[str | None, str]:
    """The command that wrote a file, or None and the reason why a report ignores the file.

    Raises:
        ReportError: the file is a measurement of an unknown kind.
    """
    if not isinstance(content, dict):
        return None, "a JSON list or value, no object"
    keys = content.keys()
    if isinstance(content.get("kind"), str):
        if content["kind"] in MEASUREMENTS:
            return content["kind"], ""
        if "machine" in keys:
            raise ReportError(
                f"{path} holds a measurement of kind {content['kind'][:40]!r}, and known are {' and '.join(MEASUREMENTS)}: update gqa-convert, "
                "or move it away"
            )
    shapes = {
        "convert": {"groups", "merge_error", "method"},
        "uptrain": {"steps", "tokens", "evaluation", "model"},
        "inspect": {"layers", "kv_heads", "groups", "source"},
        "demo": {"held_out_tokens", "results", "source"},
    }
    for kind, needed in shapes.items():
        if needed <= keys:
            return kind, ""
    if {"error", "exit_code"} <= keys:
        return None, f"a command that failed: {printable(str(content['error']))[:200]}"
    return None, "no JSON of convert, uptrain, evaluate, benchmark, inspect or demo"


def origin_of(file: Head | ConversionRecord, path: Path, command: list[str] | None = None) -> Origin:
    """Where the results of a file come from.

    Args:
        file: its content.
        path: of the file.
        command: that wrote it, where the file does not state one.
    """
    words = command or file.command
    return Origin(path, printable(shlex.join(words)) if words else None, _machine(file.machine), file.created)


def _machine(machine: Machine | None) -> str | None:
    """The machine in words."""
    if machine is None:
        return None
    versions = ", ".join(f"{name} {version}" for name, version in (machine.versions or {}).items())
    parts = [
        machine.device,
        machine.processor,
        f"{machine.cores} cores" if machine.cores else None,
        f"{machine.memory_bytes / 1e9:.1f} GB" if machine.memory_bytes else None,
        machine.system,
        printable(versions),
    ]
    return "; ".join(part for part in parts if part) or None


def read_conversion(content: object, path: Path) -> Conversion:
    """The record of `gqa_conversion.json`, or of what `convert --json` printed.

    Raises:
        ReportError: it is damaged.
    """
    record = ConversionRecord.read(content, str(path))
    config = None if record.out else read_config(path.parent)
    types = (record.model_type, record.result_model_type, *(config.model_types[:1] if config else ()))
    sizes = record.kv_bytes_per_token
    before, after = (sizes.before, sizes.after) if sizes else (None, None)
    return Conversion(
        origin_of(record, path),
        folder=located(record.out, path) if record.out else path.parent,
        source=source_of(record) or "not recorded",
        model_types=tuple(dict.fromkeys(each for each in types if each)),
        method=record.method or "converted",
        groups=record.groups,
        heads=record.heads,
        source_kv_heads=record.source_kv_heads,
        kv_bytes=None if before is None or after is None else (before, after),
        errors=record.errors,
        calibration=record.calibration.text if record.calibration else None,
        uptraining_tokens=record.uptraining_tokens or 0,
    )


def source_of(record: ConversionRecord) -> str | None:
    """The name of what a checkpoint was converted from."""
    return record.source.id if isinstance(record.source, SourceRecord) else record.source


def located(name: str, path: Path) -> Path:
    """A folder that a file names, or the folder of that name beside the file if the folder has moved with it."""
    folder = Path(name)
    return folder if is_there(folder) or not is_there(path.parent / folder.name) else path.parent / folder.name


def read_inspection(content: object, path: Path) -> Inspection:
    """The record of what `inspect --json` printed."""
    file = InspectionFile.read(content, str(path))
    errors: dict[int, dict[str, float]] = {}
    for number, layer in enumerate(file.layers):
        label = layer.module or layer.label or str(number)
        for each in layer.errors:
            for part, value in (("keys", each.keys), ("values", each.values)):
                if value is not None:
                    errors.setdefault(each.groups, {})[f"{label}.{part}"] = value
    return Inspection(Origin(path), file.source or "not recorded", errors, file)


def read_run(folder: Path, summary: tuple[RunSummary, Path] | None, name: str) -> Run | None:
    """The record of an uptraining run.

    Args:
        folder: of the run.
        summary: its summary and the file that holds it, None for a run that has not finished.
        name: of the run.

    Returns:
        None if there is neither a summary nor a line of metrics.
    """
    own = RunFolder(folder)
    lines = [MetricsLine.read(line, f"{own.metrics} at step {line['step']}") for line in read_metrics(own.metrics)]
    if summary is None and not lines:
        return None
    file, path = summary or (RunSummary(), own.metrics)
    losses = file.evaluation or RecoveredLoss()
    points = [
        (line.tokens, line.evaluation_loss)
        for line in lines
        if line.tokens is not None and line.evaluation_loss is not None
    ]
    tokens = file.tokens or (lines[-1].tokens if lines else None)
    if losses.start is not None:
        points.insert(0, (0, losses.start))
    if losses.final is not None and tokens and not any(each[0] == tokens for each in points):
        points.append((tokens, losses.final))
    command = ["gqa-convert", "uptrain", str(own.recipe)] if own.recipe.is_file() else None
    model = file.model or str(own.model)
    return Run(
        origin_of(file, path, None if file.command else command),
        name=printable(name),
        model=model,
        groups=_groups_of(folder, model),
        tokens=tokens,
        alpha=file.alpha,
        start=losses.start,
        final=losses.final if summary else (points[-1][1] if points else None),
        source_loss=losses.source,
        recovered=losses.recovered_share,
        tokens_per_second=file.tokens_per_second,
        curve=tuple(points),
        finished=summary is not None,
    )


def _groups_of(folder: Path, model: str) -> KVHeads | None:
    """N of a run, from the config of its result or of its model."""
    configs = (read_config(place) for place in (RunFolder(folder).model, Path(model)))
    return next(
        (groups for each in configs if each and each.keys.get("multi_query_group_num") and (groups := heads_in(each))),
        None,
    )


def read_evaluation(content: object, path: Path) -> Evaluation:
    """The record of what `evaluate` wrote; a reference that was scored is one of the models."""
    file = EvaluationFile.read(content, str(path))
    results = _some(file.results, path)
    if isinstance(file.reference, ModelScores):
        name = file.reference.model
        if all(each.model != name for each in results):
            results = (file.reference, *results)
    else:
        name = file.reference  # older files name a model that they score like the others
    details = [_text_of(file), file.objective]
    details += [f"{key} {value}" for key, value in (("context", file.context), ("stride", file.stride)) if value]
    scores = tuple(_score(each, f"results[{number}] of {path}") for number, each in enumerate(results))
    return Evaluation(origin_of(file, path), ", ".join(each for each in details if each), name, scores)


def _text_of(file: EvaluationFile) -> str:
    """What was scored: the source, with those options that are not the defaults."""
    if not isinstance(file.data, ScoredText):
        return file.data or "text that is not recorded"
    defaults = {"split": "train", "text_field": "text"}
    options = [
        f"{key.replace('_', ' ')} {value}"
        for key, value in file.data
        if key != "source" and value is not None and value != defaults.get(key)
    ]
    return ", ".join([file.data.source or "text that is not recorded", *options])


def _some(results: tuple[_Result, ...], path: Path) -> tuple[_Result, ...]:
    if not results:
        raise ReportError(f"{path} holds no results: run the command again, or move it away")
    return results


def _score(file: ModelScores, where: str) -> Score:
    if file.model is None:
        raise ReportError(f"{where} names no model: write the file again, or move it away")
    against = file.difference
    return Score(
        file.model,
        loss=file.loss,
        loss_error=file.loss_standard_error,
        perplexity=file.perplexity,
        bits_per_byte=file.bits_per_byte,
        bits_error=file.bits_per_byte_standard_error,
        tokens=file.tokens,
        nan=file.scored_nan or 0,
        difference=(against.to or "another model", against.loss, against.standard_error) if against else None,
        kl=file.kl,
        kl_error=file.kl_standard_error,
        top1=file.top1_agreement,
        note=file.note,
        tasks=tuple(_tasks(file, where)),
    )


def _tasks(file: ModelScores, where: str) -> list[tuple[str, str, float, float | None]]:
    """Rows of lm-eval's results: `{"results": {task: {"acc,none": 0.5, "acc_stderr,none": 0.1, ...}}}`."""
    tasks = file.tasks or {}
    results = tasks.get("results", tasks)
    rows = []
    for task, metrics in results.items() if isinstance(results, dict) else ():
        given = metrics if isinstance(metrics, dict) else {}
        values = {name: value for name, value in given.items() if _is_number(value)}
        numbers = numbers_in(values, f"{task} of {where}")
        for name, value in numbers.items():
            metric, _, variant = name.partition(",")
            if variant and not metric.endswith("_stderr"):
                rows.append((printable(task), name, value, numbers.get(f"{metric}_stderr,{variant}")))
    return rows


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def read_benchmark(content: object, path: Path) -> Benchmark:
    """The record of what `benchmark` wrote."""
    file = BenchmarkFile.read(content, str(path))
    timings = tuple(
        Timing(
            each.groups,
            each.batch,
            each.context,
            each.decode_ms_per_token,
            each.decode_ms_low,
            each.decode_ms_high,
            each.decode_tokens_per_second,
            each.prefill_ms,
            each.sample_ms,
            each.kv_bytes_per_token,
        )
        for each in _some(file.results, path)
    )
    cut = bool(file.layers and file.model_layers and file.layers != file.model_layers)
    details = [
        f"{file.layers} of the model's {file.model_layers} layers" if cut else None,
        file.dtype,
        file.attention,
        _WEIGHTS.get(file.weights, f"{file.weights} weights") if file.weights else None,
    ]
    return Benchmark(
        origin_of(file, path),
        file.model or "model not recorded",
        file.model_type,
        file.heads,
        ", ".join(each for each in details if each),
        (file.spread or "the spread of the repetitions").removeprefix("decode_ms_low and decode_ms_high are "),
        timings,
        file,
        cut,
    )


def read_demo(content: object, path: Path) -> tuple[Evaluation, list[Conversion]]:
    """The results of `demo`: an evaluation, and its conversions."""
    file = DemoFile.read(content, str(path))
    results = [one for each in _some(file.results, path) for one in (each, each.fit) if one is not None]
    origin = Origin(path, "gqa-convert demo")
    whole = max(results, key=lambda each: each.groups)
    before = whole.kv_bytes_per_token
    scores, conversions = [], []
    for each in results:
        method, after = each.method or "converted", each.kv_bytes_per_token
        out = each.out or f"N = {each.groups}, {method}"
        scores.append(Score(out, loss=each.loss))
        conversions.append(
            Conversion(
                origin,
                located(out, path),
                file.source or "",
                (),
                method,
                each.groups,
                source_kv_heads=whole.groups,
                kv_bytes=None if before is None or after is None else (before, after),
            )
        )
    tokens = file.held_out_tokens
    text = f"the demo's held-out text{f', {tokens:,} tokens' if tokens else ''}"
    return Evaluation(origin, text, None, tuple(scores)), conversions
