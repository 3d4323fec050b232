"""Compares every tensor of OUT with what SOURCE makes it, a few million numbers at a time."""

import math
from collections.abc import Callable, Iterator
from typing import Any

from gqa_convert.verify.checkpoint_reader import Weights
from gqa_convert.verify.geometry import Counts, Cut, Geometry
from gqa_convert.verify.layout import Run
from gqa_convert.verify.proofs import RECOMPUTED
from gqa_convert.verify.recomputed_merges import FreshNumbers, deviation, differing, merge, same_bits
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

    def __init__(
        self, source: Weights, out: Weights, geometry: Geometry, method: str, seed: int, progress: Callable[[int], None]
    ) -> None:
        self._source = source
        self._out = out
        self._geometry = geometry
        self._method = method
        self._seed = seed
        self._progress = progress
        self._squares: dict[str, tuple[float, float]] = {}

    def census(self) -> str:
        """OUT holds the tensors of SOURCE, less the norms of dropped heads."""
        expected = set(self._source.file_of) - self._geometry.dropped()
        missing, extra = sorted(expected - set(self._out.file_of)), sorted(set(self._out.file_of) - expected)
        kinds = ((missing, "missing"), (extra, "too many"))
        if missing or extra:
            raise Failure("; ".join(f"{len(names)} tensor(s) {what}: {_some(names)}" for names, what in kinds if names))
        dropped = len(self._geometry.dropped())
        return f"{len(expected)} tensors" + (f", {dropped} per-head norms dropped" if dropped else "")

    def untouched(self) -> str:
        """Every tensor without K/V heads has the source's type, shape and bytes."""
        changed = self._changed()
        names = [name for name in self._source.file_of if name not in changed]
        bad = [problem for name in names if (problem := self._compare_whole(name))]
        self._judge(bad, len(names))
        return f"{len(names)} tensors, bit for bit"

    def _changed(self) -> set[str]:
        """Tensors of SOURCE that another check looks at."""
        return set(self._geometry.cuts) | {name for _, names in self._geometry.lists for name in names}

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
        if name not in self._out.file_of:
            return f"{name} is missing"
        ours, theirs = self._out.dtype(name), self._source.dtype(name)
        if ours != theirs:
            return f"{name} has type {ours} where SOURCE has {theirs}"
        if self._out.shape(name) != shape:
            return f"{name} has shape {list(self._out.shape(name))} where {list(shape)} belongs"
        return None

    def merged(self) -> str:
        """Every K/V head is the merge of its group's heads; the query heads of a fused projection are the source's."""
        geometry = self._geometry
        if any(counts.after < counts.before for counts in geometry.counts.values()) and self._method not in RECOMPUTED:
            raise Failure(f"method {self._method!r} can't be recomputed: only {', '.join(RECOMPUTED)}")
        bad = [problem for name, cut in geometry.cuts.items() if (problem := self._compare_cut(name, cut))]
        for attention_kind, names in geometry.lists:
            bad += [problem for problem in self._compare_list(geometry.counts[attention_kind], names) if problem]
        total = len(geometry.cuts) + len(geometry.lists)
        self._judge(bad, total)
        return f"{total} tensors, {geometry.before} -> {geometry.after} K/V heads, bit for bit"

    @staticmethod
    def _judge(problems: list[str], total: int) -> None:
        if problems:
            raise Failure(f"{len(problems)} of {total} tensors differ: {problems[0]}")

    def errors(self) -> dict[str, float]:
        """|heads - merged head| / |heads| of every merged tensor, over all its heads; full only after `merged` has
        passed.
        """
        return {name: math.sqrt(error / norm) if norm else 0.0 for name, (error, norm) in self._squares.items()}

    def _compare_cut(self, name: str, cut: Cut) -> str | None:
        """A tensor's heads one by one: in OUT the parts lie one behind the other, whatever their order in SOURCE."""
        counts = self._geometry.counts[cut.attention_kind]
        if counts.before == counts.after:  # nothing moves then
            return self._compare_whole(name)
        lengths = [(counts.after if run.merged else run.heads) * run.width for run in cut.runs]
        shape = self._source.shape(name)
        if problem := self._headers_differ(name, (*shape[: cut.axis], sum(lengths), *shape[cut.axis + 1 :])):
            return problem
        fresh = None
        merged = [run for run in cut.runs if run.merged]
        if self._method == "random" and counts.size > 1 and all(run.part != "norm" for run in merged):
            spread = deviation((self._heads(name, cut, merged), self._heads(name, cut, merged)))
            fresh = FreshNumbers(self._seed, name, spread, self._source.dtype(name))
        at = 0
        for run, length in zip(cut.runs, lengths, strict=True):
            heads = (
                self._compare_merged(name, cut, run, at, fresh)
                if run.merged
                else self._compare_kept(name, cut, run, at)
            )
            for head, problem in enumerate(heads):
                if problem:
                    return f"{name} in {problem} of {run.part} head {head}"
            at += length
        if fresh is not None and cut.axis:
            return self._compare_fresh_columns(name, at - sum(counts.after * run.width for run in merged), at, fresh)
        return None

    def _head(self, name: str, cut: Cut, run: Run, head: int) -> Any:
        return self._source.rows(name, run.starts[head], run.starts[head] + run.width, cut.axis)

    def _heads(self, name: str, cut: Cut, runs: list[Run]) -> Iterator[Any]:
        for run in runs:
            for head in range(run.heads):
                yield self._head(name, cut, run, head)

    def _compare_kept(self, name: str, cut: Cut, run: Run, at: int) -> Iterator[str | None]:
        """The query heads from `at` on in OUT."""
        for head in range(run.heads):
            start = at + head * run.width
            ours, theirs = self._out.rows(name, start, start + run.width, cut.axis), self._head(name, cut, run, head)
            self._progress(ours.numel() * ours.itemsize)
            yield None if same_bits(ours, theirs) else f"{differing(ours, theirs)} number(s)"

    def _compare_merged(
        self, name: str, cut: Cut, run: Run, at: int, fresh: FreshNumbers | None
    ) -> Iterator[str | None]:
        """The merged heads from `at` on in OUT; where fresh numbers lie along the rows, these are looked at as a
        whole.
        """
        counts = self._geometry.counts[cut.attention_kind]
        for group in range(counts.after):
            start = at + group * run.width
            ours = self._out.rows(name, start, start + run.width, cut.axis)
            self._progress(ours.numel() * ours.itemsize)
            if fresh is not None and cut.axis:
                self._add_error(name, ours, (self._head(name, cut, run, head) for head in _group(counts, group)))
            else:
                yield self._compare_head(
                    ours, group, counts, lambda head: self._head(name, cut, run, head), name, fresh
                )

    def _compare_fresh_columns(self, name: str, first: int, last: int, fresh: FreshNumbers) -> str | None:
        """Columns of fresh numbers, which are drawn row by row over all of them."""
        for start, stop in self._out.blocks(name, _BLOCK):
            if not fresh.accept(self._out.rows(name, start, stop)[:, first:last].contiguous()):
                return f"{name} in number(s) of its merged columns, rows {start} to {stop - 1}"
        return None

    def _compare_list(self, counts: Counts, names: list[str]) -> Iterator[str | None]:
        def source_head(head: int) -> Any:
            return self._source.rows(names[head], 0, self._source.shape(names[head])[0])

        for group in range(min(counts.after, len(names))):
            name = names[group]
            if problem := self._headers_differ(name, self._source.shape(name)):
                yield problem
                continue
            ours = self._out.rows(name, 0, self._source.shape(name)[0])
            self._progress(ours.numel() * ours.itemsize)
            problem = self._compare_head(ours, group, counts, source_head, name, None)
            yield f"{name} in {problem}" if problem else None

    def _compare_head(
        self,
        ours: Any,
        group: int,
        counts: Counts,
        source_head: Callable[[int], Any],
        name: str,
        fresh: FreshNumbers | None,
    ) -> str | None:
        """What is wrong with one merged head, counted in numbers."""
        if counts.after >= counts.before:
            theirs = source_head(group * counts.before // counts.after)
            return None if same_bits(ours, theirs) else f"{differing(ours, theirs)} number(s)"
        heads = _group(counts, group)
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


def _group(counts: Counts, group: int) -> range:
    """The heads of SOURCE that a group holds: contiguous, as every native implementation repeats them."""
    return range(group * counts.size, (group + 1) * counts.size)


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (" ..." if len(names) > 3 else "")
