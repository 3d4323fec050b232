"""Compares every tensor of OUT with what SOURCE's tensors make it.

Which tensors the conversion may touch follows from the geometry and the method alone, not from the converter's plan.
"""

import math

import torch
from torch import Tensor

from gqa_convert.verify.geometry import MERGED, HeadTensor, Module
from gqa_convert.verify.inputs import Progress
from gqa_convert.verify.report import Failure
from gqa_convert.verify.result import FACTORED, FITTED, PLAIN, Result
from gqa_convert.verify.weights import same_bits


class TensorChecks:
    """The checks on tensors; each ends at the first tensor that differs.

    Args:
        result: OUT.
        progress: called with the stage `tensors`, and how many of OUT's bytes were compared.
    """

    def __init__(self, result: Result, progress: Progress) -> None:
        self.errors: dict[str, float] = {}
        """For plain methods, |heads - merged head| / |heads| over all heads of a merged tensor."""
        self._result = result
        self._source, self._out = result.inputs.source, result.weights
        self._progress = progress
        self._done, self._total = 0, sum(tensor.nbytes for tensor in self._out.tensors.values())
        self._touched = [
            (module, tensor)
            for module in result.geometry.changed
            for tensor in module.tensors
            if not tensor.before.keys().isdisjoint({*MERGED, *result.foldable.get(module.name, ())})
        ]
        """The tensors that hold merged heads, or heads that the method may change."""

    def names(self) -> str:
        """OUT has SOURCE's tensors, except the norms of K/V heads that it does not have."""
        dropped = {name for _, tensor in self._touched for name in tensor.names[len(tensor.names_after) :]}
        expected, found = self._source.tensors.keys() - dropped, self._out.tensors.keys()
        if expected != found:
            raise Failure(f"missing: {sorted(expected - found)[:3]}, not in SOURCE: {sorted(found - expected)[:3]}")
        return f"{len(expected)} tensors"

    def untouched(self) -> str:
        """Every tensor that the conversion leaves alone has SOURCE's type, shape and bytes."""
        touched = {name for _, tensor in self._touched for name in tensor.names}
        names = [name for name in self._source.tensors if name not in touched]
        for name in names:
            theirs = self._source.tensors[name].to(self._source.result_dtype(name))
            self._check_header(name, theirs.shape)
            if not same_bits(self._out.tensors[name], theirs):
                raise Failure(f"{name} has other numbers than SOURCE's")
        return f"{len(names)} tensors, bit for bit"

    def merged(self) -> str:
        """Every K/V head is what the method makes of its group, as far as that can be said from the heads alone; query
        heads and gates that the method leaves alone are SOURCE's.
        """
        result, known = self._result, (*PLAIN, FACTORED, FITTED)
        if result.geometry.merged and result.method not in known:
            raise Failure(f"method {result.method!r} is none of {', '.join(known)}")
        for module, tensor in self._touched:
            self._check_heads(module, tensor)
        how = "finite, and means where they may not be folded" if result.folds else "bit for bit"
        return f"{len(self._touched)} tensors, {result.geometry.change()} K/V heads, {how}"

    def _check_header(self, name: str, shape: tuple[int, ...]) -> None:
        if name not in self._out.tensors:
            raise Failure(f"{name} is missing")
        tensor, dtype = self._out.tensors[name], self._source.result_dtype(name)
        self._done += tensor.nbytes
        self._progress("tensors", self._done, self._total)
        if tensor.dtype != dtype or tensor.shape != shape:
            raise Failure(f"{name} is {tensor.dtype} {list(tensor.shape)}, expected {dtype} {list(shape)}")

    def _check_heads(self, module: Module, tensor: HeadTensor) -> None:
        """Compare a tensor role by role, head by head."""
        for name in tensor.names_after:
            self._check_header(name, tensor.shape_after(self._source.tensors[name].shape))
        theirs = tensor.read(self._source.tensors, converted=False)
        squares: dict[str, list[Tensor]] = {}
        for role, ours in tensor.read(self._out.tensors, converted=True).items():
            free = role in self._result.foldable.get(module.name, ())
            size = max(1, len(theirs[role]) // len(ours))
            for head, found in enumerate(ours):
                first = head * len(theirs[role]) // len(ours)
                group = theirs[role][first : first + size]
                name = tensor.names_after[head if len(tensor.names) > 1 else 0]
                if free and not _is_finite(found):
                    raise Failure(f"{name} has NaN or Inf in {role} head {head}")
                if not free and not self._is_merge(group, found):
                    raise Failure(f"{name} has other numbers than it must in {role} head {head}")
                if not free and size > 1:
                    squares.setdefault(name, []).append(_squares(group, found))
        for name, each in squares.items():
            lost, total = torch.stack(each).sum(0).tolist()
            self.errors[name] = math.sqrt(lost / total) if total else 0.0

    def _is_merge(self, group: Tensor, ours: Tensor) -> bool:
        """Whether a head [width, ...] is what the method makes of the heads of its group [m, width, ...]: bit for bit or,
        where keys or values are means because they may not be folded, the rounded mean.
        """
        if self._result.method == "first" or len(group) == 1:
            return same_bits(ours, group[0].to(ours.dtype))
        if self._result.folds:
            limits = torch.finfo(ours.dtype)
            mean = group.double().mean(0)
            exponent = torch.frexp(mean.abs().clamp(min=limits.tiny)).exponent
            half_unit = torch.exp2(exponent.double() - 1) * (limits.eps / 2)
            return bool(((ours.double() - mean).abs() <= half_unit + 1e-12 * mean.abs()).all())
        total = group[0].to(_sum_type(ours), copy=True)
        for head in group[1:]:
            total += head
        return same_bits(ours, (total / len(group)).to(ours.dtype))


def _is_finite(tensor: Tensor) -> bool:
    return all(each.isfinite() for each in tensor.aminmax())  # 18 times as fast as isfinite().all()


def _squares(group: Tensor, ours: Tensor) -> Tensor:
    """|heads - merged head|^2 and |heads|^2."""
    wide = group.to(_sum_type(ours), copy=True)
    total = wide.flatten().dot(wide.flatten())
    lost = wide.sub_(ours.to(wide.dtype)).flatten()
    return torch.stack([lost.dot(lost), total]).double()


def _sum_type(tensor: Tensor) -> torch.dtype:
    """The type that the heads of a group are summed in."""
    return torch.float32 if tensor.itemsize == 2 else torch.float64
