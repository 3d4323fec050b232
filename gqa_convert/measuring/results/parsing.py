"""JSON of each command -> records."""

import shlex
from pathlib import Path
from typing import Any

from gqa_convert.errors import ReportError
from gqa_convert.measuring.results.fields import Fields, is_there, parse_json, printable
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
from gqa_convert.training.metrics import read_metrics
from gqa_convert.training.run_folder import RunFolder

MEASUREMENTS = ("evaluate", "benchmark", "uptrain")
"""Commands whose JSON says its `kind`."""


def kind_of(content: Any, path: Path) -> tuple[str | None, str]:
    """Which command wrote a file, or None and why it is left aside.

    Raises:
        ReportError: it is a measurement of a kind that is not known.
    """
    if not isinstance(content, dict):
        return None, "a JSON list or value, no object"
    keys = content.keys()
    if isinstance(content.get("kind"), str):
        if content["kind"] in MEASUREMENTS:
            return content["kind"], ""
        if content["kind"] == "recommend":
            return None, "a recommendation"
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


def origin_of(fields: Fields, path: Path, command: list[str] | None = None) -> Origin:
    """The head of a file: who, where and when."""
    command = command or (fields.strings("command") if isinstance(fields.record.get("command"), list) else None)
    return Origin(path, printable(shlex.join(command)) if command else None, _machine(fields), fields.text("created"))


def _machine(fields: Fields) -> str | None:
    """The machine in words; of older files only the software is known, which is told elsewhere."""
    machine = fields.part("machine")
    if machine is None:
        return None
    memory, cores, versions = machine.number("memory_bytes"), machine.count("cores"), machine.part("versions")
    libraries = ", ".join(f"{name} {versions.text(name)}" for name in versions.record) if versions else None
    parts = [
        machine.text("device"),
        machine.text("processor"),
        f"{cores} cores" if cores else None,
        f"{memory / 1e9:.1f} GB" if memory else None,
        machine.text("system"),
        libraries and printable(libraries),
    ]
    return "; ".join(part for part in parts if part) or None


def read_conversion(content: dict[str, Any], path: Path) -> Conversion:
    """`gqa_conversion.json`, or what `convert --json` printed."""
    fields = Fields(content, str(path))
    source = fields.part("source") if isinstance(content.get("source"), dict) else None
    calibration, bytes_ = fields.part("calibration"), fields.part("kv_bytes_per_token")
    before_after = (bytes_.number("before"), bytes_.number("after")) if bytes_ else (None, None)
    out = fields.text("out")
    types = [fields.text("model_type"), fields.text("result_model_type"), None if out else _config_type(path.parent)]
    return Conversion(
        origin_of(fields, path),
        folder=located(out, path) if out else path.parent,
        source=(source.text("id") if source else fields.text("source")) or "not recorded",
        model_types=tuple(dict.fromkeys(each for each in types if each)),
        method=fields.text("method") or "converted",
        groups=fields.need_groups(),
        heads=fields.count("heads"),
        source_kv_heads=fields.count("source_kv_heads"),
        kv_bytes=None if before_after[0] is None or before_after[1] is None else (before_after[0], before_after[1]),
        errors=fields.numbers("merge_error"),
        calibration=calibration.text("text") if calibration else None,
        uptraining_tokens=fields.count("uptraining_tokens") or 0,
    )


def located(name: str, path: Path) -> Path:
    """A folder named in a file: as it is, or beside the file where the run has moved."""
    folder = Path(name)
    return folder if is_there(folder) or not is_there(path.parent / folder.name) else path.parent / folder.name


def read_config(folder: Path) -> Fields | None:
    """The config of a checkpoint, if there is one that can be read."""
    try:
        content = parse_json(folder / "config.json")
    except ReportError:
        return None
    return Fields(content, str(folder / "config.json")) if isinstance(content, dict) else None


def _config_type(folder: Path) -> str | None:
    config = read_config(folder)
    return config.text("model_type") if config else None


def read_inspection(content: dict[str, Any], path: Path) -> Inspection:
    """What `inspect --json` printed."""
    fields = Fields(content, str(path))
    errors: dict[int, dict[str, float]] = {}
    for number, layer in enumerate(fields.parts("layers")):
        label = layer.text("module") or layer.text("label") or str(number)
        for each in layer.parts("errors"):
            for part in ("keys", "values"):
                value = each.number(part)
                if value is not None:
                    errors.setdefault(each.need_groups(), {})[f"{label}.{part}"] = value
    return Inspection(origin_of(fields, path), fields.text("source") or "not recorded", errors)


def read_run(folder: Path, summary: tuple[dict[str, Any], Path] | None, name: str) -> Run | None:
    """An uptraining run: its summary and its metrics, either of which may be missing; None if both are empty."""
    lines = read_metrics(RunFolder(folder).metrics)
    content, path = summary or ({}, RunFolder(folder).metrics)
    fields, part = Fields(content, str(path)), Fields(content, str(path)).part("evaluation")
    figures = {key: part.number(key) if part else None for key in ("start", "source", "final", "recovered_share")}
    metrics = [Fields(line, f"{RunFolder(folder).metrics} at step {line['step']}") for line in lines]
    curve = [(line.count("tokens"), line.number("evaluation_loss")) for line in metrics]
    points = [(tokens, loss) for tokens, loss in curve if tokens is not None and loss is not None]
    tokens = fields.count("tokens") or (metrics[-1].count("tokens") if metrics else None)
    if figures["start"] is not None:
        points.insert(0, (0, figures["start"]))
    if figures["final"] is not None and tokens and not any(each[0] == tokens for each in points):
        points.append((tokens, figures["final"]))
    if summary is None and not lines:
        return None
    recipe = RunFolder(folder).recipe
    command = ["gqa-convert", "uptrain", str(recipe)] if recipe.is_file() else None
    model = fields.text("model") or str(RunFolder(folder).model)
    return Run(
        origin_of(fields, path, None if fields.record.get("command") else command),
        name=printable(name),
        model=model,
        groups=_groups_of(folder, model),
        tokens=tokens,
        alpha=fields.number("alpha"),
        start=figures["start"],
        final=figures["final"] if summary else (points[-1][1] if points else None),
        source_loss=figures["source"],
        recovered=figures["recovered_share"],
        tokens_per_second=fields.number("tokens_per_second"),
        curve=tuple(points),
        finished=summary is not None,
    )


def _groups_of(folder: Path, model: str) -> int | None:
    """N of a run: from the config of its result, or of what it is made from."""
    for place in (RunFolder(folder).model, Path(model)):
        config = read_config(place)
        groups = config.count("multi_query_group_num") if config else None
        if groups:
            return groups
    return None


def read_evaluation(content: dict[str, Any], path: Path) -> Evaluation:
    """What `evaluate --json` printed or wrote; a reference that it scored is one of the models."""
    fields = Fields(content, str(path))
    whole = isinstance(content.get("reference"), dict)
    reference = fields.part("reference") if whole else None
    results = _results(fields)
    if reference and all(each.text("model") != reference.text("model") for each in results):
        results = [reference, *results]
    details = [_text_of(fields), fields.text("objective")]
    details += [f"{key} {fields.count(key)}" for key in ("context", "stride") if fields.count(key)]
    scores = tuple(_score(each) for each in results)
    name = reference.text("model") if reference else None if whole else fields.text("reference")
    return Evaluation(origin_of(fields, path), ", ".join(each for each in details if each), name, scores)


def _text_of(fields: Fields) -> str:
    """What was scored: a source as it was named, or a source with those options that are not the usual ones."""
    if not isinstance(fields.record.get("data"), dict):
        return fields.text("data") or "text that is not recorded"
    data = Fields(fields.record["data"], f"data of {fields.where}")
    usual = {"split": "train", "text_field": "text"}
    options = [
        f"{key.replace('_', ' ')} {data.text(key)}"
        for key, value in data.record.items()
        if key != "source" and value is not None and value != usual.get(key)
    ]
    return ", ".join([data.text("source") or "text that is not recorded", *options])


def _results(fields: Fields) -> list[Fields]:
    results = fields.parts("results")
    if not results:
        raise ReportError(f"{fields.where} holds no results: run the command again, or move it away")
    return results


def _score(fields: Fields) -> Score:
    model, difference = fields.text("model"), fields.part("difference")
    if model is None:
        raise ReportError(f"{fields.where} names no model: write the file again, or move it away")
    against = None
    if difference:
        against = (
            difference.text("to") or "another model",
            difference.number("loss"),
            difference.number("standard_error"),
        )
    return Score(
        model,
        loss=fields.number("loss"),
        loss_error=fields.number("loss_standard_error"),
        perplexity=fields.number("perplexity"),
        bits_per_byte=fields.number("bits_per_byte"),
        bits_error=fields.number("bits_per_byte_standard_error"),
        tokens=fields.count("tokens"),
        nan=fields.count("scored_nan") or 0,
        difference=against,
        kl=fields.number("kl"),
        kl_error=fields.number("kl_standard_error"),
        top1=fields.number("top1_agreement"),
        note=fields.text("note"),
        tasks=tuple(_tasks(fields)),
    )


def _tasks(fields: Fields) -> list[tuple[str, str, float, float | None]]:
    """lm-eval's results: `{"results": {task: {"acc,none": 0.5, "acc_stderr,none": 0.1, ...}}}`."""
    tasks = fields.part("tasks")
    results = (tasks.part("results") if tasks and "results" in tasks.record else tasks) or Fields({}, "")
    rows = []
    for task, metrics in results.record.items():
        numbers = (
            {name: value for name, value in metrics.items() if _is_number(value)} if isinstance(metrics, dict) else {}
        )
        part = Fields(numbers, f"{task} of {fields.where}")
        for name in numbers:
            metric, _, variant = name.partition(",")
            value = part.number(name)
            if value is not None and variant and not metric.endswith("_stderr"):
                rows.append((printable(task), printable(name), value, part.number(f"{metric}_stderr,{variant}")))
    return rows


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def read_benchmark(content: dict[str, Any], path: Path) -> Benchmark:
    """What `benchmark --json` printed."""
    fields = Fields(content, str(path))
    timings = []
    for each in _results(fields):
        decode = each.number("decode_ms_per_token")
        timings.append(
            Timing(
                each.need_groups(),
                each.count("batch"),
                each.count("context"),
                decode,
                each.number("decode_ms_low"),
                each.number("decode_ms_high"),
                each.number("decode_tokens_per_second"),
                each.number("prefill_ms"),
                each.number("sample_ms"),
                each.number("kv_bytes_per_token"),
            )
        )
    layers, whole = fields.count("layers"), fields.count("model_layers")
    scaled = f"{layers} of the model's {whole} layers" if layers and whole and layers != whole else None
    details = [
        scaled,
        fields.text("dtype"),
        fields.text("attention"),
        f"weights {fields.text('weights')}" if fields.text("weights") else None,
    ]
    return Benchmark(
        origin_of(fields, path),
        fields.text("model") or "model not recorded",
        fields.text("model_type"),
        fields.count("heads"),
        ", ".join(each for each in details if each),
        fields.text("spread") or "the benchmark's decode_ms_low and decode_ms_high",
        tuple(timings),
        scaled is not None,
    )


def read_demo(content: dict[str, Any], path: Path) -> tuple[Evaluation, list[Conversion]]:
    """The results of `demo`: an evaluation, and its conversions."""
    fields = Fields(content, str(path))
    results = [one for each in _results(fields) for one in (each, each.part("fit")) if one is not None]
    origin = Origin(path, "gqa-convert demo")
    whole = max(results, key=lambda each: each.need_groups())
    before, count = whole.number("kv_bytes_per_token"), whole.need_groups()
    scores, conversions = [], []
    for each in results:
        groups, method, after = (
            each.need_groups(),
            each.text("method") or "converted",
            each.number("kv_bytes_per_token"),
        )
        out = each.text("out") or f"N = {groups}, {method}"
        scores.append(Score(out, loss=each.number("loss")))
        sizes = None if before is None or after is None else (before, after)
        folder = located(out, path)
        conversions.append(
            Conversion(
                origin, folder, fields.text("source") or "", (), method, groups, source_kv_heads=count, kv_bytes=sizes
            )
        )
    tokens = fields.count("held_out_tokens")
    text = f"the demo's held-out text{f', {tokens:,} tokens' if tokens else ''}"
    return Evaluation(origin, text, None, tuple(scores)), conversions
