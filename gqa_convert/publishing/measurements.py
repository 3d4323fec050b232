"""Selects what evaluate and benchmark measured of this checkpoint and of its source."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gqa_convert.measuring.results.fields import is_there
from gqa_convert.measuring.results.kv_heads import in_words
from gqa_convert.measuring.results.schemas import SourceRecord
from gqa_convert.publishing.facts import Facts
from gqa_convert.publishing.markup import some
from gqa_convert.publishing.records import Benchmark, Evaluation, Origin, Score, Timing
from gqa_convert.publishing.result_files import find_results

_SMALL = 64 << 20
"""Maximum bytes of a file that is hashed to recognise it."""


@dataclass(frozen=True)
class Scored:
    """One evaluation: the scores of this checkpoint, and of its source if it was scored on the same text."""

    evaluation: Evaluation
    ours: Score
    source: Score | None


@dataclass(frozen=True)
class Timed:
    """One benchmark: the timings at this checkpoint's N and at the source's, by batch and context."""

    benchmark: Benchmark
    timings: tuple[Timing, ...]


@dataclass(frozen=True)
class Measured:
    """All results that the card states.

    Attributes:
        warnings: on files that were left out, with the reasons.
    """

    scored: tuple[Scored, ...] = ()
    timed: tuple[Timed, ...] = ()
    warnings: tuple[str, ...] = ()


def read_measurements(results: Sequence[Path], facts: Facts, names: Sequence[str]) -> Measured:
    """Read files of results and keep those of a checkpoint.

    Args:
        results: files, or folders to search.
        facts: of the checkpoint.
        names: of the checkpoint in the results, besides the path of its folder.

    Raises:
        ReportError: a file is missing or broken, or there are no results at all.
    """
    if not results:
        return Measured()
    evaluations, benchmarks = find_results(results)
    scored: list[Scored] = []
    timed: list[Timed] = []
    warnings: list[str] = []
    for evaluation in sorted(evaluations, key=lambda each: (each.text, _when(each.origin))):
        ours = [score for score in evaluation.scores if _is_ours(score.model, evaluation.origin, facts, names)]
        if not ours:
            warnings.append(
                f"{evaluation.origin.path} is left out: it scores {some([score.model for score in evaluation.scores])} and not "
                f"{facts.folder}; if one of them is this model, give that name with --evaluated-as"
            )
        elif _is_older(evaluation.origin, facts):
            warnings.append(f"{evaluation.origin.path} is left out: it is older than these weights; evaluate again")
        else:
            source = next(
                (score for score in evaluation.scores if is_source(score.model, evaluation.origin, facts)), None
            )
            scored.append(Scored(evaluation, ours[0], source))
    for benchmark in sorted(benchmarks, key=lambda each: (each.model, _when(each.origin))):
        counts = {facts.groups, facts.first_kv_heads}
        timings = tuple(timing for timing in benchmark.timings if timing.groups in counts)
        ours_too = _is_ours(benchmark.model, benchmark.origin, facts, names) or is_source(
            benchmark.model, benchmark.origin, facts
        )
        if not ours_too:
            warnings.append(
                f"{benchmark.origin.path} is left out: it times {benchmark.model}, neither this model nor its source"
            )
        elif not any(timing.groups == facts.groups for timing in timings):
            warnings.append(f"{benchmark.origin.path} is left out: it has no time at N = {in_words(facts.groups)}")
        else:
            timed.append(Timed(benchmark, timings))
    return Measured(tuple(scored), tuple(timed), tuple(warnings))


def _is_ours(name: str, origin: Origin, facts: Facts, names: Sequence[str]) -> bool:
    return name in names or _same_folder(name, origin, facts.folder)


def is_source(name: str, origin: Origin, facts: Facts) -> bool:
    """Whether a name means the first source: the recorded name, the same folder, or a folder of that name with the same
    files.
    """
    source = facts.chain[0].source
    first = source.id if source else None
    base = facts.base
    if source is None or first is None:
        return False
    if (
        name == first
        or (base is not None and name == base.repo_id)
        or (is_there(Path(first)) and _same_folder(name, origin, Path(first)))
    ):
        return True
    return any(
        _is_copy(place, Path(first), source) for place in (Path(name), origin.path.parent / name) if is_there(place)
    )


def _is_copy(folder: Path, recorded: Path, source: SourceRecord) -> bool:
    """Whether a folder can be the one that a conversion recorded by a relative path: its last names, sizes and hashes
    agree.
    """
    names = [name for name in recorded.parts if name not in (".", "..")]
    if not names or source.files is None or list(folder.resolve().parts[-len(names) :]) != names:
        return False
    for name, entry in source.files.items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != entry.bytes:
            return False
        if (
            path.stat().st_size <= _SMALL
            and entry.sha256
            and hashlib.sha256(path.read_bytes()).hexdigest() != entry.sha256
        ):
            return False
    return True


def _same_folder(name: str, origin: Origin, folder: Path) -> bool:
    places = [Path(name), origin.path.parent / name]
    return any(is_there(place) and place.resolve() == folder.resolve() for place in places)


def _is_older(origin: Origin, facts: Facts) -> bool:
    """Whether results are older than the weights and therefore of an earlier model in the same folder."""
    return origin.created is not None and origin.created < facts.made


def _when(origin: Origin) -> tuple[str, str]:
    return origin.created or "", str(origin.path)
