"""Compares every tensor of OUT with what SOURCE's tensors make it.

Which tensors the conversion may touch follows from the geometry and the method alone, not from the converter's plan.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from gqa_convert.verify.geometry import MERGED, Geometry, HeadTensor, Module, Role, config_value, heads_in
from gqa_convert.verify.inputs import Inputs
from gqa_convert.verify.report import Failure
from gqa_convert.verify.weights import Weights, same_bits, same_bytes

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
        return f"{name} has other numbers than SOURCE's"

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
            for head, found in enumerate(new):
                first = head * len(old) // len(new)
                group = old[first : first + max(1, len(old) // len(new))]
                place = names[head] if len(names) > 1 else names[0]
                if role in self.foldable.get(module.name, frozenset()):
                    if not bool(found.isfinite().all()):
                        return f"{place} has NaN or Inf in {role} head {head}"
                elif not self._is_merge(role, group, found, place):
                    return f"{place} has other numbers than it must in {role} head {head}"
        return None

    def _is_merge(self, role: Role, group: torch.Tensor, ours: torch.Tensor, name: str) -> bool:
        """Whether a head of OUT is what the method makes of the heads of its group, [m, width, ...].

        Args:
            role: of the heads.
            group: SOURCE's heads.
            ours: OUT's head.
            name: of the tensor, for its merge error.
        """
        if self.method in PLAIN and role in MERGED and len(group) > 1:
            return _is_plain_merge(group, ours, self.method, self.errors.setdefault(name, MergeError()))
        return same_bits(ours, group[0].to(ours.dtype)) if len(group) == 1 else _is_mean(group, ours)


def foldable_roles(method: Any, geometry: Geometry, inputs: Inputs) -> dict[str, frozenset[Role]]:
    """By module, the roles whose heads a method may make anything of; empty for the other methods.

    A fit may change all of them. Factoring folds maps of keys into queries unless a norm or clipping lies between them,
    and maps of values into outputs unless a gate, a norm or clipping does; otherwise they are means.
    """
    family, config = inputs.family, inputs.decoder_config
    clipped = config_value(config, "clip_qkv") or config_value(config, "attn_config.clip_qkv")
    found: dict[str, frozenset[Role]] = {}
    for module in geometry.changed:
        if module.after > module.before or method not in (*FACTORED, *FITTED):
            continue
        normed = family.key_norm != "none" and any(
            name.startswith(f"{module.name}.{family.key_norm_name}.") for name in inputs.source.tensors
        )
        if family.gainless_key_norm is not None:
            key, default = family.gainless_key_norm
            normed = config.get(key, default) is not False
        roles: list[Role] = []
        if method in FITTED or not (clipped or normed or family.key_constraint):
            roles += ["query", "key"]
        if method in FITTED or not (clipped or family.value_constraint):
            roles += ["value", "output"]
        found[module.name] = frozenset(roles)
    return found


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


def _is_plain_merge(heads: torch.Tensor, ours: torch.Tensor, method: str, error: MergeError) -> bool:
    """Whether a head is the merge of its group, bit for bit, block by block so that sums stay in a core's cache."""
    wide = torch.float32 if ours.dtype in (torch.bfloat16, torch.float16) else torch.float64
    same = True
    for stored, *parts in zip(*(each.reshape(-1).split(_BLOCK) for each in (ours, *heads)), strict=True):
        blocks = [part.to(wide) for part in parts]
        same = same and same_bits(stored, merge(blocks, method, ours.dtype))
        merged = stored.to(wide)
        for block in blocks:
            error.squared_norm += float(block.dot(block))
            rest = block - merged
            error.squared_error += float(rest.dot(rest))
    return same


def _is_mean(heads: torch.Tensor, ours: torch.Tensor) -> bool:
    """Whether a head is the rounded mean of its group, whatever the order of the sum."""
    mean = heads.double().mean(0)
    limits = torch.finfo(ours.dtype)
    exponent = torch.frexp(mean.abs().clamp(min=limits.tiny)).exponent
    half_unit = torch.exp2(exponent.double() - 1) * (limits.eps / 2)
    return bool(((ours.double() - mean).abs() <= half_unit + 1e-12 * mean.abs()).all())


def _read_all(weights: Weights, names: tuple[str, ...]) -> torch.Tensor:
    if len(names) == 1:
        return weights.read(names[0])
    return torch.cat([weights.read(name) for name in names])


def _judge(problems: list[str], total: int) -> None:
    if problems:
        raise Failure(f"{len(problems)} of {total} tensors differ: {problems[0]}")
