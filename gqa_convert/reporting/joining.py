"""Quality, time and bytes put side by side by N."""

from dataclasses import dataclass
from pathlib import Path

from gqa_convert.provenance import PROVENANCE
from gqa_convert.reporting.fields import Fields, is_there, parse_json
from gqa_convert.reporting.reading import read_config, read_conversion
from gqa_convert.reporting.records import Benchmark, Conversion, Evaluation, Material, Origin, Score, Timing

SOURCE = "source"
"""Label of a model that was not converted."""
_COUNTS = (
    "multi_query_group_num", "num_key_value_heads", "num_kv_heads", "n_head_kv", "num_attention_heads", "n_head", "n_heads", "num_heads",
    "decoder_attention_heads",
)  # fmt: skip
"""Keys of a config that say how many K/V heads there are, the most particular first."""


@dataclass(frozen=True)
class Row:
    """One model at one N; what was not measured is None.

    Attributes:
        groups: N, None where it could not be found out.
        label: the method, or `source`.
        model: as it was named in the evaluation, or else the converted folder or the benchmark's model.
        score: on the text of the table.
        timing: of the benchmark that the table is joined with.
        speedup: over the benchmark's largest N.
        kv_bytes: of a token: from the live cache if `kv_measured`, else from the shapes of the weights.
        kv_ratio: to the source's, or to the benchmark's largest N.
        source: name of what the model was made from, or of itself.
    """

    groups: int | None
    label: str
    model: str
    score: Score | None = None
    timing: Timing | None = None
    speedup: float | None = None
    kv_bytes: float | None = None
    kv_measured: bool = False
    kv_ratio: float | None = None
    source: str = ""


@dataclass(frozen=True)
class Joined:
    """One text's models beside one benchmark's times.

    Attributes:
        text: that was scored, None where nothing was evaluated.
        rows: by falling N, then method.
        benchmark: whose times these are, None without any.
        setting: its batch and context.
        origins: of quality and times.
        shapes: of the bytes that are computed.
    """

    text: str | None
    rows: tuple[Row, ...]
    benchmark: Benchmark | None
    setting: tuple[int, int] | None
    origins: tuple[Origin, ...]
    shapes: tuple[Origin, ...]


@dataclass(frozen=True)
class _Identity:
    groups: int | None
    label: str
    conversion: Conversion | None = None


def join(material: Material) -> tuple[list[Joined], list[str]]:
    """A table per text, and sentences on what contradicts itself or could not be joined."""
    notes = list(material.conflicts)
    timings, benchmark, setting = _times(material.benchmarks, notes)
    tables = []
    for text, evaluations in _by_text(material.evaluations).items():
        scored = _scores(evaluations, notes)
        notes += [f"{score.model}: {score.note}" for score, _ in scored if score.note]
        rows = [(_identify(score.model, evaluation.origin.path, material.conversions), score) for score, evaluation in scored]
        tables.append(_joined(text, rows, material, benchmark, setting, timings, notes, tuple(each.origin for each in evaluations)))
    if not tables and (material.benchmarks or material.conversions):
        tables.append(_joined(None, [], material, benchmark, setting, timings, notes, ()))
    return tables, list(dict.fromkeys(notes))


def _by_text(evaluations: list[Evaluation]) -> dict[str, list[Evaluation]]:
    texts: dict[str, list[Evaluation]] = {}
    for evaluation in evaluations:
        texts.setdefault(evaluation.text, []).append(evaluation)
    return texts


def _scores(evaluations: list[Evaluation], notes: list[str]) -> list[tuple[Score, Evaluation]]:
    """Every model once, as the newest file has it."""
    kept: dict[str, tuple[Score, Evaluation]] = {}
    for evaluation in sorted(evaluations, key=lambda each: (each.origin.created or "", str(each.origin.path))):
        for score in evaluation.scores:
            earlier = kept.get(score.model)
            if earlier and earlier[0].loss != score.loss:
                notes.append(
                    f"{earlier[1].origin.path} and {evaluation.origin.path} score {score.model} on the same text and differ, {earlier[0].loss} and "
                    f"{score.loss} nats per token: the latter is used"
                )
            kept[score.model] = (score, evaluation)
    return list(kept.values())


def _identify(model: str, named_in: Path, conversions: list[Conversion]) -> _Identity:
    """Which conversion a model of an evaluation is, by the provenance or the config in its folder."""
    places = [Path(model), named_in.parent / model, named_in.parent / Path(model).name]
    folders = [place for place in dict.fromkeys(places) if is_there(place / "config.json")]
    by_folder = {each.folder.resolve(): each for each in conversions if each.folder}
    for folder in (*folders, Path(model)):
        known = by_folder.get(folder.resolve())
        if known:
            return _Identity(known.groups, known.label, known)
        if is_there(folder / PROVENANCE):
            path = folder / PROVENANCE
            content = parse_json(path)
            if isinstance(content, dict) and "groups" in content:
                conversion = read_conversion(content, path)
                return _Identity(conversion.groups, conversion.label, conversion)
    for each in conversions:
        if model == each.source or (folders and is_there(Path(each.source)) and folders[0].resolve() == Path(each.source).resolve()):
            return _Identity(each.source_kv_heads or each.heads, SOURCE)
    for folder in folders:
        config = read_config(folder)
        groups = _count(config) if config else None
        if config and groups:
            return _Identity(groups, "converted" if config.record.get("multi_query_group_num") else SOURCE)
    same_name = [each for each in conversions if each.folder and each.folder.resolve().name == Path(model).name]
    if len(same_name) == 1:
        return _Identity(same_name[0].groups, same_name[0].label, same_name[0])
    return _Identity(None, "not known")


def _count(config: Fields) -> int | None:
    return next((config.count(key) for key in _COUNTS if isinstance(config.record.get(key), int) and config.record[key]), None)


def _times(benchmarks: list[Benchmark], notes: list[str]) -> tuple[dict[int, Timing], Benchmark | None, tuple[int, int] | None]:
    """The timings that quality is joined with: one benchmark's, at one batch and context, since others do not compare."""
    if not benchmarks:
        return {}, None, None
    kept: dict[tuple[object, ...], tuple[Timing, Benchmark]] = {}
    for benchmark in sorted(benchmarks, key=lambda each: (each.origin.created or "", str(each.origin.path))):
        for timing in benchmark.timings:
            key = (benchmark.model, benchmark.detail, benchmark.origin.machine, timing.groups, timing.setting)
            earlier = kept.get(key)
            if earlier and earlier[0].decode != timing.decode:
                notes.append(
                    f"{earlier[1].origin.path} and {benchmark.origin.path} time {benchmark.model} at N = {timing.groups}, batch {timing.batch}, "
                    f"context {timing.context} on the same machine, {earlier[0].decode} and {timing.decode} ms per token: the latter is used"
                )
            kept[key] = (timing, benchmark)

    def reach(each: tuple[Benchmark, tuple[int, int]]) -> tuple[object, ...]:
        benchmark, setting = each
        timed = {timing.groups for timing in benchmark.timings if timing.setting == setting and timing.decode is not None}
        return len(timed), benchmark.origin.created or "", setting[1], setting[0], str(benchmark.origin.path)

    settings = [(benchmark, timing.setting) for benchmark in benchmarks for timing in benchmark.timings]
    chosen, setting = max(settings, key=reach)
    notes += [
        f"{each.origin.path} is not joined with the quality, which stands beside the times in {chosen.origin.path}: see the table of times"
        for each in benchmarks
        if each is not chosen
    ]
    return {timing.groups: timing for timing in chosen.timings if timing.setting == setting}, chosen, setting


def _joined(
    text: str | None, scored: list[tuple[_Identity, Score]], material: Material, benchmark: Benchmark | None,
    setting: tuple[int, int] | None, timings: dict[int, Timing], notes: list[str], origins: tuple[Origin, ...],
) -> Joined:  # fmt: skip
    """The rows of one text, then those N that were converted or timed and not scored on it."""
    rows, taken, covered = [], set[int](), set[Path]()
    timed = timings[max(timings)] if timings else None
    for identity, score in scored:
        conversion, timing = identity.conversion, None
        if identity.groups is not None and identity.groups in timings and benchmark:
            misfit = _misfit(conversion, benchmark)
            if misfit:
                notes.append(f"{score.model} is not joined with the times in {benchmark.origin.path}: {misfit}")
            else:
                timing = timings[identity.groups]
                taken.add(identity.groups)
        if identity.groups is None:
            notes.append(
                f"{score.model} has no {PROVENANCE} or config.json that can be found from here: its N is not known, and it has no times"
            )
        if conversion and conversion.folder:
            covered.add(conversion.folder.resolve())
        rows.append(_row(identity, score.model, score, timing, timed, material.conversions))
    for conversion in material.conversions:
        if conversion.folder and conversion.folder.resolve() not in covered:
            misfit = _misfit(conversion, benchmark) if benchmark else None
            timing = None if misfit else timings.get(conversion.groups)
            taken |= {conversion.groups} if timing else set()
            identity = _Identity(conversion.groups, conversion.label, conversion)
            rows.append(_row(identity, str(conversion.folder), None, timing, timed, material.conversions))
    if benchmark:
        rows += [
            _row(_Identity(groups, "timed only"), benchmark.model, None, timings[groups], timed, [])
            for groups in sorted(set(timings) - taken)
        ]
    rows.sort(key=lambda row: (-(row.groups or 0), row.label != SOURCE, row.label, row.model))
    computed = any(row.kv_bytes is not None and not row.kv_measured for row in rows)
    shapes = tuple(each.origin for each in material.conversions if each.kv_bytes) if computed else ()
    return Joined(text, tuple(rows), benchmark, setting, (*origins, *((benchmark.origin,) if benchmark else ())), shapes)


def _misfit(conversion: Conversion | None, benchmark: Benchmark) -> str | None:
    """Why a benchmark can't be of a converted model's shape."""
    if conversion is None:
        return None
    if conversion.heads and benchmark.heads and conversion.heads != benchmark.heads:
        return f"it has {conversion.heads} query heads, what was timed has {benchmark.heads}"
    if benchmark.model_type and conversion.model_types and benchmark.model_type not in conversion.model_types:
        return f"it is of type {conversion.model_types[0]}, what was timed of {benchmark.model_type}"
    return None


def _row(
    identity: _Identity, model: str, score: Score | None, timing: Timing | None, whole: Timing | None, conversions: list[Conversion]
) -> Row:  # fmt: skip
    """A row with what follows from its parts; the source's bytes are those from which a conversion started."""
    sizes = identity.conversion.kv_bytes if identity.conversion else None
    if identity.label == SOURCE:
        starts = {each.kv_bytes[0] for each in conversions if each.kv_bytes and Path(each.source).name == Path(model).name}
        sizes = (next(iter(starts)),) * 2 if len(starts) == 1 else None
    speedup = whole.decode / timing.decode if timing and whole and timing.decode and whole.decode else None
    source = Path(identity.conversion.source if identity.conversion else model).name
    if timing and timing.kv_bytes is not None:
        ratio = timing.kv_bytes / whole.kv_bytes if whole and whole.kv_bytes else None
        return Row(identity.groups, identity.label, model, score, timing, speedup, timing.kv_bytes, True, ratio, source)
    after, ratio = (sizes[1], sizes[1] / sizes[0] if sizes[0] else None) if sizes else (None, None)
    return Row(identity.groups, identity.label, model, score, timing, speedup, after, False, ratio, source)
