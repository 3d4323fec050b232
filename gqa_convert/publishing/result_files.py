"""Finds and reads the files that evaluate and benchmark wrote."""

import os
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from gqa_convert.checkpoint.source import CONFIG
from gqa_convert.errors import ReportError
from gqa_convert.measuring.results.fields import is_there, parse_json, printable
from gqa_convert.measuring.results.schemas import BenchmarkFile, EvaluationFile, Head, Machine, ModelScores
from gqa_convert.publishing.records import Benchmark, Evaluation, Origin, Score, Timing

_Result = TypeVar("_Result")

DEPTH = 4
"""Levels of folders below a named one that are searched."""
_LARGEST = 64 << 20
"""Maximum bytes of a JSON file that is read; results are smaller, vocabularies may be larger."""
_SIDECAR_FILES = frozenset(
    {
        CONFIG,
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "vocab.json",
        "preprocessor_config.json",
        "processor_config.json",
        "chat_template.json",
        "video_preprocessor_config.json",
    }
)
"""Files of a checkpoint, which need not be strict JSON."""
_WEIGHTS = {"own": "the model's own weights", "random": "random weights"}
"""How a benchmark names the weights of the timed model, in words."""


def find_results(places: Sequence[Path]) -> tuple[list[Evaluation], list[Benchmark]]:
    """Read what evaluate and benchmark wrote; other files are left out.

    Args:
        places: JSON files, or folders to search.

    Raises:
        ReportError: a place is missing, a file is broken, or there are no results at all.
    """
    evaluations, benchmarks, seen = list[Evaluation](), list[Benchmark](), set[Path]()
    for place in places:
        if not is_there(place):
            raise ReportError(
                f"{place} does not exist: name a file that evaluate or benchmark wrote, or a folder with it"
            )
        for path in _files(place):
            if path.resolve() in seen:
                continue
            seen.add(path.resolve())
            content = parse_json(path)
            kind = content.get("kind") if isinstance(content, dict) else None
            if kind == "evaluate":
                evaluations.append(read_evaluation(content, path))
            elif kind == "benchmark":
                benchmarks.append(read_benchmark(content, path))
    if not evaluations and not benchmarks:
        raise ReportError(
            f"nothing that evaluate or benchmark wrote is in {', '.join(map(str, places))}: name files that they wrote "
            "with --json, or folders with them"
        )
    return evaluations, benchmarks


def _files(place: Path) -> Iterator[Path]:
    """The file that a place is, or the JSON files in a folder in alphabetical order, without those that are hidden, too
    large, or still empty because the command that writes them runs.
    """
    if place.is_file():
        yield place
        return

    def refuse(problem: OSError) -> None:
        raise ReportError(
            f"{problem.filename} can't be read ({problem.strerror}): make it readable, or name other folders"
        )

    for root, folders, files in os.walk(place, onerror=refuse):
        deep = len(Path(root).relative_to(place).parts) >= DEPTH
        folders[:] = [] if deep else sorted(name for name in folders if not name.startswith("."))
        companions = _SIDECAR_FILES if CONFIG in files else frozenset()
        for name in sorted(files):
            path = Path(root, name)
            wanted = name.endswith(".json") and not name.startswith(".") and name not in companions
            if wanted and path.is_file() and 0 < path.stat().st_size <= _LARGEST:
                yield path


def _origin_of(file: Head, path: Path) -> Origin:
    """Where the results of a file come from."""
    words = file.command
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


def read_evaluation(content: object, path: Path) -> Evaluation:
    """The record of what `evaluate` wrote; a reference that was scored is one of the models."""
    file = EvaluationFile.read(content, str(path))
    results = _some(file.results, path)
    name = file.reference.model if file.reference else None
    if file.reference and all(each.model != name for each in results):
        results = (file.reference, *results)
    details = [_text_of(file), file.objective]
    details += [f"{key} {value}" for key, value in (("context", file.context), ("stride", file.stride)) if value]
    scores = tuple(_score(each, f"results[{number}] of {path}") for number, each in enumerate(results))
    return Evaluation(_origin_of(file, path), ", ".join(each for each in details if each), name, scores)


def _text_of(file: EvaluationFile) -> str:
    """What was scored: the source, with those options that are not the defaults."""
    if file.data is None:
        return "text that is not recorded"
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
    )


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
        )
        for each in _some(file.results, path)
    )
    details = [
        file.dtype,
        file.attention,
        _WEIGHTS.get(file.weights, f"{file.weights} weights") if file.weights else None,
    ]
    return Benchmark(
        _origin_of(file, path),
        file.model or "model not recorded",
        ", ".join(each for each in details if each),
        (file.spread or "the spread of the repetitions").removeprefix("decode_ms_low and decode_ms_high are "),
        timings,
    )
