"""The first lines of a model card: what the conversion saves, what it loses, and how much faster decoding is."""

from collections.abc import Iterator

from gqa_convert.publishing.facts import Facts
from gqa_convert.publishing.markup import Markdown, code, plain, significant, with_error
from gqa_convert.publishing.measurements import Measured, Scored, Timed
from gqa_convert.publishing.records import Timing

_PER_TOKEN = "kv_bytes_per_token"


def headline(facts: Facts, measured: Measured) -> tuple[Markdown, ...]:
    """Return the lines, in Markdown: the K/V cache, the loss, and the speed where it was measured."""
    return tuple(map(Markdown, [*_cache(facts), _loss(facts, measured), *_speed(facts, measured)]))


def _cache(facts: Facts) -> Iterator[str]:
    after = facts.plan.cache_bytes().get(_PER_TOKEN)
    if after is None:
        return
    recorded = facts.chain[0].kv_bytes_per_token
    before = recorded.before if recorded else None
    share = f", {after.after / before:.1%} of the source's {_size(before)}" if before else ""
    yield f"**K/V cache: {_size(after.after)} per token{share}.**"


def _loss(facts: Facts, measured: Measured) -> str:
    """Return the loss above the source's, on the first text where both are known."""
    for scored in measured.scored:
        change = _change(scored)
        if change is not None:
            return f"**Loss: {change} nats per token**, on {code(scored.evaluation.text)}."
    found = facts.trainings[-1].evaluation if facts.trainings else None
    if found is not None and found.final is not None and found.source is not None:
        change = _beside(found.final - found.source, None, found.source)
        return f"**Loss: {change} nats per token**, on the held-out text of the uptraining."
    return "**Loss: not measured.**"


def _change(scored: Scored) -> str | None:
    ours, source = scored.ours, scored.source
    if source is None or source.loss is None or ours.loss is None:
        return None
    difference = ours.difference
    if difference is not None and difference[0] == source.model and difference[1] is not None:
        return _beside(difference[1], difference[2], source.loss)
    return _beside(ours.loss - source.loss, None, source.loss)


def _beside(difference: float, error: float | None, source: float) -> str:
    above = "above" if difference >= 0 else "below"
    return f"{with_error(abs(difference), error)} {above} the source's {significant(source)}"


def _speed(facts: Facts, measured: Measured) -> Iterator[str]:
    """Yield how many times as fast a decode step is as the source's, over all batches and contexts of a benchmark."""
    for timed in measured.timed:
        factors = sorted(speedups(timed, facts).values())
        if factors:
            least, most = f"{factors[0]:.2f}", f"{factors[-1]:.2f}"
            factor = least if least == most else f"{least} to {most}"
            machine = "; ".join((timed.benchmark.origin.machine or "").split("; ")[:2])
            where = f" on {plain(machine)}" if machine else ""
            yield f"**Decode step: {factor} times as fast as the source's**{where}."
            return


def speedups(timed: Timed, facts: Facts) -> dict[tuple[int, int], float]:
    """Return the source's time of a decode step over this model's, by batch and context."""
    if facts.groups == facts.first_kv_heads:
        return {}

    def by_setting(timings: list[Timing]) -> dict[tuple[int, int], float]:
        return {each.setting: each.decode for each in timings if each.decode}

    ours = by_setting([each for each in timed.timings if each.groups == facts.groups])
    source = by_setting([each for each in timed.timings if each.groups == facts.first_kv_heads])
    return {setting: source[setting] / time for setting, time in ours.items() if setting in source}


def _size(nbytes: float) -> str:
    """Format bytes with three or four digits: 1.920 kB, 131.1 kB."""
    for unit in ("bytes", "kB"):
        if nbytes < 1000:
            return f"{nbytes:,.0f} bytes" if unit == "bytes" else f"{significant(nbytes)} {unit}"
        nbytes /= 1000
    return f"{significant(nbytes)} MB"
