"""Compares every tensor of OUT with what SOURCE makes it, a few million numbers at a time."""

import math
from collections.abc import Callable, Iterator
from typing import Any

from gqa_convert.verify.geometry import Geometry, Run
from gqa_convert.verify.merging import METHODS, FreshNumbers, deviation, differing, merge, same_bits
from gqa_convert.verify.reading import Weights
from gqa_convert.verify.report import Failure

_BLOCK = 64 << 20
"""Bytes of a tensor compared at a time."""


class TensorComparison:
    """The checks on tensors.

    Args:
        source: tensors of SOURCE.
        out: tensors of OUT.
        geometry: of both.
        method: mean, first or random; of no account when heads are copied or repeated.
        seed: for random.
        progress: called with every number of bytes of OUT compared.
    """

    def __init__(self, source: Weights, out: Weights, geometry: Geometry, method: str, seed: int, progress: Callable[[int], None]) -> None:
        self._source = source
        self._out = out
        self._geometry = geometry
        self._method = method
        self._seed = seed
        self._progress = progress
        self._squares: dict[str, tuple[float, float]] = {}

    def census(self) -> str:
        """OUT holds the tensors of SOURCE, less the norms of dropped heads."""
        expected = set(self._source.homes) - self._geometry.dropped()
        missing, extra = sorted(expected - set(self._out.homes)), sorted(set(self._out.homes) - expected)
        kinds = ((missing, "missing"), (extra, "too many"))
        if missing or extra:
            raise Failure("; ".join(f"{len(names)} tensor(s) {what}: {_some(names)}" for names, what in kinds if names))
        dropped = len(self._geometry.dropped())
        return f"{len(expected)} tensors" + (f", {dropped} per-head norms dropped" if dropped else "")

    def untouched(self) -> str:
        """Every tensor without K/V heads has the source's type, shape and bytes."""
        changed = set(self._geometry.runs) | {name for names in self._geometry.lists for name in names}
        names = [name for name in self._source.homes if name not in changed]
        bad = [problem for name in names if (problem := self._compare_whole(name))]
        if bad:
            raise Failure(f"{len(bad)} of {len(names)} tensors differ: {bad[0]}")
        return f"{len(names)} tensors, bit for bit"

    def _compare_whole(self, name: str) -> str | None:
        if problem := self._headers_differ(name, self._source.shape(name)):
            return problem
        for start, stop in self._source.blocks(name, _BLOCK):
            ours, theirs = self._out.rows(name, start, stop), self._source.rows(name, start, stop)
            self._progress(ours.numel() * ours.itemsize)
            if not same_bits(ours, theirs):
                return f"{name} in {differing(ours, theirs)} number(s) of rows {start} to {stop - 1}"
        return None

    def _headers_differ(self, name: str, shape: tuple[int, ...]) -> str | None:
        if name not in self._out.homes:
            return f"{name} is missing"
        ours, theirs = self._out.dtype(name), self._source.dtype(name)
        if ours != theirs:
            return f"{name} has type {ours} where SOURCE has {theirs}"
        if self._out.shape(name) != shape:
            return f"{name} has shape {list(self._out.shape(name))} where {list(shape)} belongs"
        return None

    def merged(self) -> str:
        """Every K/V head is the merge of its group's heads; the query rows of a fused projection are the source's."""
        geometry = self._geometry
        if geometry.after < geometry.before and self._method not in METHODS:
            raise Failure(f"method {self._method!r} can't be recomputed: only {', '.join(METHODS)}")
        bad = [problem for name, runs in geometry.runs.items() if (problem := self._compare_runs(name, runs))]
        for names in geometry.lists:
            bad += [problem for problem in self._compare_list(names) if problem]
        total = len(geometry.runs) + len(geometry.lists)
        if bad:
            raise Failure(f"{len(bad)} of {total} tensors differ: {bad[0]}")
        return f"{total} tensors, {geometry.before} -> {geometry.after} K/V heads, bit for bit"

    def errors(self) -> dict[str, float]:
        """|heads - merged head| / |heads| of every merged tensor, over all its heads; full only after `merged` has passed."""
        return {name: math.sqrt(error / norm) if norm else 0.0 for name, (error, norm) in self._squares.items()}

    def _compare_runs(self, name: str, runs: tuple[Run, ...]) -> str | None:
        after = self._geometry.after
        rows = sum(after * run.width if run.merged else run.heads * run.width for run in runs)
        if problem := self._headers_differ(name, (rows, *self._source.shape(name)[1:])):
            return problem
        fresh = None
        merged = [run for run in runs if run.merged]
        if self._method == "random" and self._geometry.size > 1 and all(run.part != "norm" for run in merged):
            spread = deviation((self._heads(name, merged), self._heads(name, merged)))
            fresh = FreshNumbers(self._seed, name, spread, self._source.dtype(name))
        at = 0
        for run in runs:
            if run.merged:
                problem = self._compare_heads(name, run, at, fresh)
                at += after * run.width
            else:
                problem = self._compare_rows(name, run, at)
                at += run.heads * run.width
            if problem:
                return problem
        return None

    def _heads(self, name: str, runs: list[Run]) -> Iterator[Any]:
        for run in runs:
            for head in range(run.heads):
                yield self._source.rows(name, run.start + head * run.width, run.start + (head + 1) * run.width)

    def _compare_rows(self, name: str, run: Run, at: int) -> str | None:
        count = run.heads * run.width
        ours, theirs = self._out.rows(name, at, at + count), self._source.rows(name, run.start, run.start + count)
        self._progress(ours.numel() * ours.itemsize)
        return None if same_bits(ours, theirs) else f"{name} in {differing(ours, theirs)} number(s) of its {run.part} rows"

    def _compare_heads(self, name: str, run: Run, at: int, fresh: FreshNumbers | None) -> str | None:
        def source_head(head: int) -> Any:
            return self._source.rows(name, run.start + head * run.width, run.start + (head + 1) * run.width)

        for group in range(self._geometry.after):
            ours = self._out.rows(name, at + group * run.width, at + (group + 1) * run.width)
            self._progress(ours.numel() * ours.itemsize)
            if problem := self._compare_head(ours, group, source_head, name, fresh):
                return f"{name} in {problem} of {run.part} head {group}"
        return None

    def _compare_list(self, names: list[str]) -> Iterator[str | None]:
        def source_head(head: int) -> Any:
            return self._source.rows(names[head], 0, self._source.shape(names[head])[0])

        for group in range(min(self._geometry.after, len(names))):
            name = names[group]
            if problem := self._headers_differ(name, self._source.shape(name)):
                yield problem
                continue
            ours = self._out.rows(name, 0, self._source.shape(name)[0])
            self._progress(ours.numel() * ours.itemsize)
            problem = self._compare_head(ours, group, source_head, name, None)
            yield f"{name} in {problem}" if problem else None

    def _compare_head(self, ours: Any, group: int, source_head: Callable[[int], Any], name: str, fresh: FreshNumbers | None) -> str | None:
        """What is wrong with one merged head, counted in numbers."""
        before, after, size = self._geometry.before, self._geometry.after, self._geometry.size
        if after >= before:
            theirs = source_head(group * before // after)
            return None if same_bits(ours, theirs) else f"{differing(ours, theirs)} number(s)"
        heads = range(group * size, (group + 1) * size)  # contiguous, as every native implementation repeats them
        self._add_error(name, ours, (source_head(head) for head in heads))
        if fresh is not None:
            return None if fresh.accept(ours) else "number(s)"
        theirs = merge((source_head(head) for head in heads), "first" if self._method == "first" else "mean")
        return None if same_bits(ours, theirs) else f"{differing(ours, theirs)} number(s)"

    def _add_error(self, name: str, ours: Any, heads: Iterator[Any]) -> None:
        error, norm = self._squares.get(name, (0.0, 0.0))
        merged = ours.double()
        for head in heads:
            wide = head.double()
            norm += float((wide * wide).sum())
            error += float(((wide - merged) ** 2).sum())
        self._squares[name] = (error, norm)


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (" ..." if len(names) > 3 else "")
