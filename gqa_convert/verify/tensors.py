"""Compares every tensor of OUT with what SOURCE's tensors make it.

Which tensors the conversion may touch follows from the geometry and the method alone, not from the converter's plan.
"""

import torch
from torch import Tensor

from gqa_convert.verify.config import compare_json
from gqa_convert.verify.geometry import MERGED, HeadTensor, Role
from gqa_convert.verify.inputs import Progress
from gqa_convert.verify.report import Failure
from gqa_convert.verify.result import FACTORED, FITTED, PLAIN, Result
from gqa_convert.verify.weights import half_units, same_bits


class TensorChecks:
    """The checks on tensors; each ends at the first tensor that differs.

    Args:
        result: OUT.
        progress: called with the stage `tensors`, and how many of OUT's bytes were compared.
    """

    def __init__(self, result: Result, progress: Progress) -> None:
        self._result = result
        self._source = result.inputs.source.tensors
        self._out = result.weights.tensors
        self._progress = progress
        self._done = 0
        self._total = sum(tensor.nbytes for tensor in self._out.values())
        self._touched: list[tuple[HeadTensor, HeadTensor, set[Role]]] = []
        """The tensors that hold merged heads, or heads that the method may change, and the roles that it may change."""
        for module in result.geometry.changed:
            foldable = result.foldable.get(module.name, set())
            for before, after in module.tensors:
                if before.rows.keys() & foldable.union(MERGED):
                    self._touched.append((before, after, foldable))

    def names(self) -> str:
        """OUT has SOURCE's tensors, except the norms of K/V heads that it does not have, and its files SOURCE's metadata."""
        dropped = {name for before, after, _ in self._touched for name in before.names[len(after.names) :]}
        expected = self._source.keys() - dropped
        found = self._out.keys()
        if expected != found:
            raise Failure(f"missing: {sorted(expected - found)[:3]}, not in SOURCE: {sorted(found - expected)[:3]}")
        metadata = {"format": "pt"} | self._result.inputs.original.metadata
        compare_json("the metadata of the weight files", self._result.weights.metadata, metadata)
        return f"{len(expected)} tensors"

    def untouched(self) -> str:
        """Every tensor that the conversion leaves alone has SOURCE's type, shape and bytes."""
        touched = {name for before, _, _ in self._touched for name in before.names}
        names = [name for name in self._source if name not in touched]
        for name in names:
            theirs = self._source[name].to(self._result.inputs.result_dtype(name))
            self._check_header(name, theirs.shape)
            if not same_bits(self._out[name], theirs):
                raise Failure(f"{name} has other numbers than SOURCE's")
        return f"{len(names)} tensors, bit for bit"

    def merged(self) -> str:
        """Every K/V head is what the method makes of its group, as far as that can be said from the heads alone; query
        heads and gates that the method leaves alone are SOURCE's.
        """
        result = self._result
        known = (*PLAIN, FACTORED, FITTED)
        if result.geometry.merged and result.method not in known:
            raise Failure(f"method {result.method!r} is none of {', '.join(known)}")
        for before, after, foldable in self._touched:
            self._check_heads(before, after, foldable)
        how = "finite, and means where they may not be folded" if result.folds else "bit for bit"
        return f"{len(self._touched)} tensors, {how}"

    def _check_header(self, name: str, shape: tuple[int, ...]) -> None:
        if name not in self._out:
            raise Failure(f"{name} is missing")
        tensor = self._out[name]
        dtype = self._result.inputs.result_dtype(name)
        self._done += tensor.nbytes
        self._progress("tensors", self._done, self._total)
        if tensor.dtype != dtype or tensor.shape != shape:
            raise Failure(f"{name} is {tensor.dtype} {list(tensor.shape)}, expected {dtype} {list(shape)}")

    def _check_heads(self, before: HeadTensor, after: HeadTensor, foldable: set[Role]) -> None:
        """Compare a tensor role by role."""
        names = after.names
        for name in names:
            shape = list(self._source[name].shape)
            shape[after.axis] = sum(rows.numel() for rows in after.rows.values()) // len(names)
            self._check_header(name, tuple(shape))
        theirs = before.read(self._source)
        for role, ours in after.read(self._out).items():
            if role in foldable:
                if not ours.isfinite().all():
                    raise Failure(f"{names[0]} has NaN or Inf in a {role} head")
                continue
            repeated = theirs[role].repeat_interleave(max(1, len(ours) // len(theirs[role])), 0)
            if not self._is_merge(repeated.unflatten(0, (len(ours), -1)), ours):
                raise Failure(f"{names[0]} has other numbers than it must in a {role} head")

    def _is_merge(self, groups: Tensor, ours: Tensor) -> bool:
        """Whether heads [N, width, ...] are what the method makes of the heads of their groups [N, m, width, ...]: bit for
        bit or, where keys or values are means because they may not be folded, the rounded mean.
        """
        size = groups.shape[1]
        if self._result.method == "first" or size == 1:
            return same_bits(ours, groups[:, 0].to(ours.dtype))
        if self._result.folds:
            mean = groups.double().mean(1)
            # with a text, it was rounded to float32 first
            rounding = half_units(mean, ours.dtype) + (1e-7 if self._result.has_text else 1e-12) * mean.abs()
            return bool(((ours.double() - mean).abs() <= rounding).all())
        total = groups[:, 0].to(torch.float32 if ours.itemsize == 2 else torch.float64, copy=True)
        for head in range(1, size):
            total += groups[:, head]
        return same_bits(ours, (total / size).to(ours.dtype))
