"""Compares every tensor of OUT with what SOURCE's tensors make it, a few million numbers at a time."""

from collections.abc import Callable, Iterator
from typing import Any

from gqa_convert.verify.checkpoint_reader import Weights
from gqa_convert.verify.exact.merge_errors import MergeErrors
from gqa_convert.verify.exact.merges import merge_blocks
from gqa_convert.verify.exact.same_bytes import same_bytes
from gqa_convert.verify.geometry import Counts, Cut, Geometry
from gqa_convert.verify.layout import Run
from gqa_convert.verify.numbers import bits_differ
from gqa_convert.verify.proofs import RECOMPUTED
from gqa_convert.verify.report import Failure, Finding

_BLOCK = 64 << 20
"""Bytes of a tensor that are compared at a time."""


class TensorComparison:
    """The checks on tensors where OUT has SOURCE's tensor names.

    Args:
        source: SOURCE's tensors.
        out: OUT's tensors.
        geometry: of both checkpoints.
        method: mean or first; ignored where heads are copied or repeated.
        progress: called with the number of OUT's bytes in each block compared.
    """

    def __init__(
        self, source: Weights, out: Weights, geometry: Geometry, method: str, progress: Callable[[int], None]
    ) -> None:
        self._source = source
        self._out = out
        self._geometry = geometry
        self._method = method
        self._progress = progress
        self._errors = MergeErrors()

    def names(self) -> Finding:
        """OUT has SOURCE's tensors, except the norms of K/V heads that it does not have."""
        expected = self._source.file_of.keys() - self._geometry.dropped()
        missing, extra = sorted(expected - self._out.file_of.keys()), sorted(self._out.file_of.keys() - expected)
        kinds = ((missing, "missing"), (extra, "extra"))
        if missing or extra:
            raise Failure("; ".join(f"{len(names)} tensor(s) {what}: {_some(names)}" for names, what in kinds if names))
        dropped = len(self._geometry.dropped())
        detail = f"{len(expected)} tensors" + (f", {dropped} per-head norms dropped" if dropped else "")
        return Finding(detail, {"tensors": len(expected), "dropped": dropped})

    def untouched(self) -> Finding:
        """Every tensor that the conversion leaves alone has SOURCE's type, shape and bytes."""
        changed = self._changed()
        names = [name for name in self._source.file_of if name not in changed]
        self._judge([problem for name in names if (problem := self._compare_whole(name))], len(names))
        return Finding(f"{len(names)} tensors, bit for bit", {"tensors": len(names)})

    def merged(self) -> Finding:
        """Every K/V head is the merge of its group, and the query heads of a fused projection are SOURCE's."""
        geometry = self._geometry
        if any(counts.after < counts.before for counts in geometry.every) and self._method not in RECOMPUTED:
            raise Failure(f"method {self._method!r} cannot be recomputed: only {', '.join(RECOMPUTED)} can")
        problems = self._merge_problems()
        total = len(geometry.cuts) + len(geometry.lists)
        self._judge(problems, total)
        return Finding(f"{total} tensors, {geometry.change()} K/V heads, bit for bit", {"tensors": total})

    def errors(self) -> dict[str, float]:
        """The merge error of every merged tensor; complete only after `merged` has passed."""
        return self._errors.values()

    def _merge_problems(self) -> list[str]:
        """What is wrong with tensors that hold K/V heads, one line per tensor."""
        problems = [problem for name, cut in self._geometry.cuts.items() if (problem := self._compare_cut(name, cut))]
        for norms in self._geometry.lists:
            counts = self._geometry.of(norms.names[0], norms.attention_kind)
            problems += [problem for problem in self._compare_list(counts, norms.names) if problem]
        return problems

    def _changed(self) -> set[str]:
        """Tensors of SOURCE that another check compares."""
        return set(self._geometry.cuts) | {name for norms in self._geometry.lists for name in norms.names}

    def _compare_whole(self, name: str) -> str | None:
        """What differs in a tensor that must have SOURCE's bytes."""
        if problem := self._headers_differ(name, self._source.shape(name)):
            return problem
        ours, exact = self._out.byte_range(name), self._source.byte_range(name)
        if ours and exact and same_bytes(ours, exact, self._progress):
            return None
        for start, stop in self._source.blocks(name, _BLOCK):
            theirs = self._source.rows(name, start, stop).to(self._source.result_dtype(name))
            if problem := bits_differ(self._ours(name, start, stop), theirs):
                return f"{name} in {problem} of rows {start} to {stop - 1}"
        return None

    def _headers_differ(self, name: str, shape: tuple[int, ...]) -> str | None:
        """What is wrong with the type or shape of OUT's tensor."""
        if name not in self._out.file_of:
            return f"{name} is missing"
        ours, theirs = self._out.dtype(name), self._source.result_dtype(name)
        if ours != theirs:
            return f"{name} has type {ours}, SOURCE has {theirs}"
        if self._out.shape(name) != shape:
            return f"{name} has shape {list(self._out.shape(name))}, expected {list(shape)}"
        return None

    @staticmethod
    def _judge(problems: list[str], total: int) -> None:
        if problems:
            raise Failure(
                f"{len(problems)} of {total} tensors differ: {problems[0]}",
                {"tensors": total, "differing": len(problems)},
            )

    def _ours(self, name: str, start: int, stop: int, axis: int = 0) -> Any:
        """Rows or columns of OUT's tensor, which count as progress."""
        rows = self._out.rows(name, start, stop, axis)
        self._progress(rows.numel() * rows.itemsize)
        return rows

    def _head(self, name: str, cut: Cut, run: Run, head: int) -> Any:
        """A head of SOURCE."""
        return self._source.rows(name, run.starts[head], run.starts[head] + run.head_dim, cut.axis)

    def _heads(self, name: str, cut: Cut, runs: list[Run]) -> Iterator[Any]:
        return (self._head(name, cut, run, head) for run in runs for head in range(run.heads))

    def _compare_cut(self, name: str, cut: Cut) -> str | None:
        """Compare a tensor head by head. In OUT its parts follow one another, whatever their order in SOURCE."""
        counts = self._geometry.of(name, cut.attention_kind)
        if counts.before == counts.after:  # a copy keeps SOURCE's order
            return self._compare_whole(name)
        lengths = [(counts.after if run.merged else run.heads) * run.head_dim for run in cut.runs]
        shape = self._source.shape(name)
        if problem := self._headers_differ(name, (*shape[: cut.axis], sum(lengths), *shape[cut.axis + 1 :])):
            return problem
        start = 0
        for run, length in zip(cut.runs, lengths, strict=True):
            if run.merged:
                problems = self._compare_merged(name, cut, run, start)
            else:
                problems = self._compare_kept(name, cut, run, start)
            for head, problem in enumerate(problems):
                if problem:
                    return f"{name} in {problem} of {run.part} head {head}"
            start += length
        return None

    def _compare_kept(self, name: str, cut: Cut, run: Run, start: int) -> Iterator[str | None]:
        """Compare the query heads, which begin at row `start` in OUT."""
        for head in range(run.heads):
            at = start + head * run.head_dim
            ours = self._ours(name, at, at + run.head_dim, cut.axis)
            yield bits_differ(ours, self._head(name, cut, run, head).to(ours.dtype))

    def _compare_merged(self, name: str, cut: Cut, run: Run, start: int) -> Iterator[str | None]:
        """Compare the merged heads, which begin at row `start` in OUT."""
        counts = self._geometry.of(name, cut.attention_kind)
        for group in range(counts.after):
            at = start + group * run.head_dim
            ours = self._ours(name, at, at + run.head_dim, cut.axis)
            yield self._compare_head(name, ours, counts, group, lambda head: self._head(name, cut, run, head))

    def _compare_list(self, counts: Counts, names: list[str]) -> Iterator[str | None]:
        """Compare norms that have one tensor per K/V head."""
        for group in range(min(counts.after, len(names))):
            name = names[group]
            if problem := self._headers_differ(name, self._source.shape(name)):
                yield problem
                continue
            ours = self._ours(name, 0, self._source.shape(name)[0])
            problem = self._compare_head(name, ours, counts, group, lambda head: self._source.whole(names[head]))
            yield f"{name} in {problem}" if problem else None

    def _compare_head(
        self, name: str, ours: Any, counts: Counts, group: int, source_head: Callable[[int], Any]
    ) -> str | None:
        """How many numbers of a merged head are wrong, in words."""
        if counts.after >= counts.before:
            return bits_differ(ours, source_head(group * counts.before // counts.after).to(ours.dtype))
        heads = [source_head(head) for head in counts.group(group)]
        self._errors.add(name, heads, ours)
        return bits_differ(ours, merge_blocks(heads, self._method, ours.dtype))


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (" ..." if len(names) > 3 else "")
