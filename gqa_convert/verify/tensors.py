"""Compares every tensor of OUT with what SOURCE's tensors make it.

Which tensors the conversion may touch follows from the geometry and the method alone, not from the converter's plan.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from gqa_convert.verify.geometry import MERGED, Geometry, HeadTensor, Module, Role, heads_in
from gqa_convert.verify.report import Failure
from gqa_convert.verify.weights import Weights, differing, same_bits, same_bytes

PLAIN: Final = ("mean", "first")
"""Methods whose K/V heads are computed from SOURCE's K/V heads alone and are proven bit for bit."""
FACTORED: Final = ("factor",)
"""Methods that also change queries and outputs, and whose heads are proven to be the best possible."""
FITTED: Final = ("fit",)
"""Methods that depend on a text and are measured against mean pooling."""
CALIBRATED: Final = {"factor": "fit", "fit": "fit"}
"""By method with a calibration text, the method by whose rules the result is judged."""
_BLOCK: Final = 1 << 16
"""Numbers of a head that are widened at a time: as many as a core's cache holds."""


@dataclass
class MergeError:
    """|heads - merged head| / |heads| over all heads of a tensor."""

    squared_error: float = 0.0
    squared_norm: float = 0.0

    def value(self) -> float:
        """The error; 0 where all heads are zero."""
        return math.sqrt(self.squared_error / self.squared_norm) if self.squared_norm else 0.0


@dataclass
class TensorChecks:
    """The checks on tensors.

    Args:
        source: SOURCE's tensors.
        out: OUT's tensors.
        geometry: of both checkpoints.
        method: by whose rules OUT is judged.
        foldable: for a method that changes queries and outputs, the roles of a module that it may change.
        progress: called with the number of OUT's bytes in each block compared.
    """

    source: Weights
    out: Weights
    geometry: Geometry
    method: Any
    foldable: dict[str, frozenset[Role]]
    progress: Callable[[int], None]
    errors: dict[str, MergeError] = field(default_factory=dict)
    """The merge error of every tensor, where heads are recomputed."""

    def names(self) -> str:
        """OUT has SOURCE's tensors, except the norms of K/V heads that it does not have."""
        dropped: set[str] = set()
        for module in self.geometry.changed:
            for tensor in module.tensors:
                dropped.update(tensor.names[module.after :] if len(tensor.names) > 1 else ())
        expected = self.source.tensors.keys() - dropped
        missing, extra = sorted(expected - self.out.tensors.keys()), sorted(self.out.tensors.keys() - expected)
        if missing:
            raise Failure(f"{len(missing)} tensor(s) missing: {', '.join(missing[:3])}")
        if extra:
            raise Failure(f"{len(extra)} tensor(s) extra: {', '.join(extra[:3])}")
        return f"{len(expected)} tensors" + (f", {len(dropped)} per-head norms dropped" if dropped else "")

    def untouched(self) -> str:
        """Every tensor that the conversion leaves alone has SOURCE's type, shape and bytes."""
        touched = {name for _, tensor in self._touched() for name in tensor.names} | set(self._free_biases())
        names = [name for name in self.source.tensors if name not in touched]
        problems = [problem for name in names if (problem := self._compare_whole(name))]
        _judge(problems, len(names))
        return f"{len(names)} tensors, bit for bit"

    def merged(self) -> str:
        """Every K/V head is what the method makes of its group, as far as that can be said from the heads alone; query
        heads and gates that the method leaves alone are SOURCE's.
        """
        known = (*PLAIN, *FACTORED, *FITTED)
        if self.method not in known and any(module.after < module.before for module in self.geometry.changed):
            raise Failure(f"method {self.method!r} is none of {', '.join(known)}")
        touched = list(self._touched())
        problems = [problem for module, tensor in touched if (problem := self._compare_heads(module, tensor))]
        biases = list(self._free_biases())
        problems += [problem for name in biases if (problem := self._header_problem(name) or self._not_finite(name))]
        total = len(touched) + len(biases)
        _judge(problems, total)
        how = "each of the right shape and finite" if self.foldable else "bit for bit"
        means = [
            f"{what} of {count} modules are means"
            for what, role in (("keys", "key"), ("values", "value"))
            if self.method in FACTORED and (count := sum(role not in roles for roles in self.foldable.values()))
        ]
        return "; ".join([f"{total} tensors, {self.geometry.change()} K/V heads, {how}", *means])

    def _touched(self) -> Iterator[tuple[Module, HeadTensor]]:
        """The tensors of changed modules that hold merged heads, or heads that the method may change."""
        for module in self.geometry.changed:
            free = self.foldable.get(module.name, frozenset())
            for tensor in module.tensors:
                if any(role in MERGED or role in free for role in tensor.before):
                    yield module, tensor

    def _free_biases(self) -> Iterator[str]:
        """Biases of output projections, which hold no heads. A fit may change them."""
        if self.method not in FITTED:
            return
        for module in self.geometry.changed:
            for tensor in module.tensors:
                bias = f"{tensor.names[0].removesuffix('.weight')}.bias"
                if "output" in tensor.before and bias in self.source.tensors:
                    yield bias

    def _header_problem(self, name: str, shape: tuple[int, ...] | None = None) -> str | None:
        """What is wrong with the type or shape of OUT's tensor, which has SOURCE's shape if none is given."""
        if name not in self.out.tensors:
            return f"{name} is missing"
        stored, expected = self.out.tensors[name], shape or self.source.tensors[name].shape
        if stored.dtype != self.source.result_dtype(name):
            return f"{name} has type {stored.dtype}, expected {self.source.result_dtype(name)}"
        return None if stored.shape == expected else f"{name} has shape {list(stored.shape)}, expected {list(expected)}"

    def _compare_whole(self, name: str) -> str | None:
        problem = self._header_problem(name)
        if problem or same_bytes(self.out, self.source, name, self.progress):
            return problem
        theirs = self.source.read(name).to(self.source.result_dtype(name))
        return f"{name} in {differing(self.out.read(name), theirs)} number(s)"

    def _not_finite(self, name: str) -> str | None:
        return None if bool(self.out.read(name).isfinite().all()) else f"{name} in NaN or Inf"

    def _compare_heads(self, module: Module, tensor: HeadTensor) -> str | None:
        """Compare a tensor role by role. In OUT its parts follow one another, whatever their order in SOURCE."""
        names = tensor.names[: module.after] if len(tensor.names) > 1 else tensor.names
        for name in names:
            if problem := self._header_problem(name, tensor.shape_after(self.source.tensors[name].shape)):
                return problem
        theirs = tensor.upright(_read_all(self.source, tensor.names))
        ours = tensor.upright(_read_all(self.out, names))
        self.progress(ours.numel() * ours.itemsize)
        for role, rows in tensor.before.items():
            old, new = heads_in(theirs, rows), heads_in(ours, tensor.after[role])
            free = role in self.foldable.get(module.name, frozenset())
            for head, problem in enumerate(self._head_problems(role, old, new, free, names)):
                if problem:
                    return f"{names[head] if len(names) > 1 else name} in {problem} of {role} head {head}"
        return None

    def _head_problems(
        self, role: Role, old: torch.Tensor, new: torch.Tensor, free: bool, names: tuple[str, ...]
    ) -> Iterator[str | None]:
        """What is wrong with each head of OUT.

        Args:
            role: of the heads.
            old: SOURCE's heads.
            new: OUT's heads.
            free: whether the method may make anything of them.
            names: of the tensors, for the merge errors.
        """
        size = len(old) // len(new)
        for head, ours in enumerate(new):
            if free:
                yield None if bool(ours.isfinite().all()) else "NaN or Inf"
            elif role not in MERGED or size <= 1:
                exact = old[head * len(old) // len(new)].to(ours.dtype)
                yield None if same_bits(ours, exact) else f"{differing(ours, exact)} number(s)"
            elif self.method in PLAIN:
                error = self.errors.setdefault(names[head] if len(names) > 1 else names[0], MergeError())
                wrong = _off_merge(old[head * size : (head + 1) * size], ours, self.method, error)
                yield f"{wrong} number(s)" if wrong else None
            else:
                wrong = _off_mean(old[head * size : (head + 1) * size], ours)
                yield f"{wrong} number(s)" if wrong else None


def merge(heads: list[torch.Tensor], method: str, dtype: torch.dtype) -> torch.Tensor:
    """One head for several, in the arithmetic of the method.

    Args:
        heads: of a group, in a type that sums are kept in.
        method: one of `PLAIN`.
        dtype: to round to.
    """
    if method == "first":
        return heads[0].to(dtype)
    total = heads[0].clone()
    for head in heads[1:]:
        total += head
    return (total / len(heads)).to(dtype)


def _off_merge(heads: torch.Tensor, ours: torch.Tensor, method: str, error: MergeError) -> int:
    """How many numbers of a merged head are not the merge of its heads, bit for bit."""
    wide = torch.float32 if ours.dtype in (torch.bfloat16, torch.float16) else torch.float64
    off = 0
    flat, mine = heads.reshape(len(heads), -1), ours.reshape(-1)
    for start in range(0, mine.numel(), _BLOCK):
        blocks = [head[start : start + _BLOCK].to(wide) for head in flat]
        stored = mine[start : start + _BLOCK]
        expected = merge(blocks, method, ours.dtype)
        if not same_bits(stored, expected):
            off += differing(stored, expected)
        merged = stored.to(wide)
        for block in blocks:
            error.squared_norm += float(block.dot(block))
            rest = block - merged
            error.squared_error += float(rest.dot(rest))
    return off


def _off_mean(heads: torch.Tensor, ours: torch.Tensor) -> int:
    """How many numbers of a merged head are not the rounded mean of its heads, whatever the order of the sum."""
    mean = heads.double().mean(0)
    limits = torch.finfo(ours.dtype)
    exponent = torch.frexp(mean.abs().clamp(min=limits.tiny)).exponent
    half_unit = torch.exp2(exponent.double() - 1) * (limits.eps / 2)
    off = (ours.double() - mean).abs() > half_unit + 1e-12 * mean.abs()
    return int((off | ~ours.isfinite()).sum())


def _read_all(weights: Weights, names: tuple[str, ...]) -> torch.Tensor:
    if len(names) == 1:
        return weights.read(names[0])
    return torch.cat([weights.read(name) for name in names])


def _judge(problems: list[str], total: int) -> None:
    if problems:
        raise Failure(f"{len(problems)} of {total} tensors differ: {problems[0]}")
