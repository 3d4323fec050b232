"""The tensors of one layer of a translated OUT, computed from SOURCE's.

Shape legend: H heads of SOURCE, N K/V heads of OUT, c head_dim, d hidden_size; a linear weight is [out, in].
"""

from typing import Any

from gqa_convert.verify.exact.merges import merge_groups
from gqa_convert.verify.numbers import wide_dtype
from gqa_convert.verify.proofs import FOLDING
from gqa_convert.verify.translated.sizes import query_scale
from gqa_convert.verify.translated.source_heads import ROLES, split_heads, to_halves, to_pairs
from gqa_convert.verify.translated.source_tensors import Expected, Formula, SourceTensors

_ROWS = 1024
"""Rows of a weight that are multiplied at a time. A whole weight in float64 would be several times its size on disk."""


class Layer:
    """One layer. It keeps the attention tensors of SOURCE that it has read.

    Args:
        tensors: SOURCE's tensors.
        number: the layer's number.
    """

    def __init__(self, tensors: SourceTensors, number: int) -> None:
        target = tensors.target
        self._tensors, self._target, self._sizes = tensors, target, tensors.sizes
        self.old = f"{tensors.old_prefix}{target.old.layers}.{number}."
        self.new = f"{tensors.new_prefix}{target.new.layers}.{number}."
        self.scale = query_scale(tensors.config, tensors.sizes, number)
        self.norm = f"{self.old}{target.old.norm}"
        self._second_norm = f"{self.old}{target.old.second_norm}" if target.old.second_norm else self.norm
        self._read: dict[str, Any] = {}

    def formulas(self) -> dict[str, Formula]:
        """The formula of each of OUT's tensors."""
        old, new = self._target.old, self._target.new
        found = self._norms() | self._attention()
        found |= self._linear(
            f"{old.attention}.{old.output}", f"{new.attention}.{new.output}", biased=self._tensors.biased
        )
        found |= self._linear(old.down, new.down)
        found |= self._linear(old.up, new.up, self._second_norm if self._target.folded else None)
        return found

    def _norms(self) -> dict[str, Formula]:
        old, new, tensors = self._target.old, self._target.new, self._tensors
        if not self._target.folded:
            found = tensors.copy(self.norm, f"{self.new}{new.norm}", ("weight", "bias"))
            if old.second_norm:
                found |= tensors.copy(self._second_norm, f"{self.new}{new.second_norm}", ("weight", "bias"))
            return found
        tensors.used.update(f"{norm}.{kind}" for norm in (self.norm, self._second_norm) for kind in ("weight", "bias"))
        return {
            f"{self.new}{new.norm}.weight": lambda: tensors.constant(1.0, f"{self.norm}.weight"),
            f"{self.new}{new.norm}.bias": lambda: tensors.constant(0.0, f"{self.norm}.bias"),
        }

    def _linear(self, old: str, new: str, norm: str | None = None, *, biased: bool = True) -> dict[str, Formula]:
        """The formulas of a projection whose rows keep their places."""
        name, target = f"{self.old}{old}", f"{self.new}{new}"
        self._tensors.used.update({f"{name}.weight", f"{name}.bias"} if biased else {f"{name}.weight"})

        def native() -> Any:
            tensor = self._tensors.whole(f"{name}.weight")
            return tensor.T if self._target.conv else tensor

        def weight() -> Expected:
            tensor = native()
            return self._with_gain(tensor.to(wide_dtype(tensor.dtype)), tensor.dtype, norm)

        def bias() -> Expected:
            tensor = native()
            if not biased:
                return Expected(tensor.new_zeros(tensor.shape[0]), tensor.dtype)
            own = self._tensors.whole(f"{name}.bias")
            if norm is None:
                return Expected(own, own.dtype)
            wide = tensor.to(wide_dtype(tensor.dtype))
            return self._with_shift(own.to(wide_dtype(own.dtype)), wide, own.dtype, norm)

        return {f"{target}.weight": weight, f"{target}.bias": bias}

    def _with_gain(self, wide: Any, dtype: Any, norm: str | None) -> Expected:
        """A weight times the gain of the norm before it, which OUT's norm does not have."""
        if norm is None:
            return Expected(wide, dtype)
        return Expected(wide * self._tensors.whole(f"{norm}.weight").to(wide.dtype), dtype)

    def _with_shift(self, own: Any, weight: Any, dtype: Any, norm: str) -> Expected:
        """A bias plus the weight times the norm's bias. The order in which that product is summed is free."""
        import torch

        shift = self._tensors.whole(f"{norm}.bias").double()
        value, size = own.double(), own.double().abs()
        for first in range(0, len(weight), _ROWS):
            rows = weight[first : first + _ROWS].double()
            value[first : first + _ROWS] += rows @ shift
            size[first : first + _ROWS] += rows.abs() @ shift.abs()
        coarse = max(torch.finfo(own.dtype).eps, torch.finfo(weight.dtype).eps)
        return Expected(value, dtype, 2 * coarse * weight.shape[1] ** 0.5 * size)

    def _attention(self) -> dict[str, Formula]:
        old, new = self._target.old, self._target.new
        kinds = ("weight", "bias") if self._tensors.biased else ("weight",)
        self._tensors.used.update(f"{self.old}{old.attention}.{name}.{kind}" for name in old.heads for kind in kinds)
        projections: list[tuple[tuple[str, ...], str]] = [(ROLES, new.heads[0])]
        if len(new.heads) > 1:
            projections = [((role,), name) for role, name in zip(ROLES, new.heads, strict=True)]
        found: dict[str, Formula] = {}
        for roles, projection in projections:
            name = f"{self.new}{new.attention}.{projection}"
            found[f"{name}.weight"] = lambda roles=roles, name=name: self._weight(roles, f"{name}.weight")  # type: ignore[misc]
            found[f"{name}.bias"] = lambda roles=roles, name=name: self._bias(roles, f"{name}.bias")  # type: ignore[misc]
        return found

    def source_name(self, role: str, kind: str) -> str:
        """The tensor of SOURCE that holds a role."""
        names = self._target.old.heads
        name = names[ROLES.index(role) if len(names) > 1 else 0]
        return f"{self.old}{self._target.old.attention}.{name}.{kind}"

    def heads(self, role: str, kind: str) -> Any:
        """SOURCE's heads [H, c, (d)] of a role in their own type, rotary rows in OUT's order."""
        name = self.source_name(role, kind)
        if name not in self._read:
            self._read[name] = self._tensors.whole(name)
        tensor, sizes = self._read[name], self._sizes
        if self._target.layout == "separate":
            heads = tensor.unflatten(0, (sizes.heads, sizes.head_dim))
        else:
            view = split_heads(self._target, tensor, sizes.heads)[role]
            heads = view.reshape(sizes.heads, sizes.head_dim, *([sizes.hidden_size] if kind == "weight" else []))
        return to_halves(heads, sizes.rotary_dim) if self._target.interleaved and role != "value" else heads

    def merged(self, role: str, kind: str) -> Any:
        """OUT's heads of a role, [N or H, c, (d)], before folding and rounding."""
        tensors = self._tensors
        heads = self.heads(role, kind)
        wide = heads.to(wide_dtype(heads.dtype))
        if role == "query":
            return wide * self.scale if self.scale != 1.0 else wide
        if not tensors.changed:
            return wide
        # the result of a method that folds is compared as a function; mean pooling gives its type and shape
        return merge_groups(wide, tensors.groups, "mean" if tensors.method in FOLDING else tensors.method)

    def repeated(self, role: str, kind: str) -> Any:
        """The merged heads, rounded to SOURCE's type, repeated to H heads, rotary rows in SOURCE's order."""
        dtype = self.heads(role, kind).dtype
        heads = self.merged(role, kind).to(dtype).repeat_interleave(self._sizes.heads // self._tensors.groups, 0)
        return to_pairs(heads, self._sizes.rotary_dim) if self._target.interleaved and role == "key" else heads

    def _weight(self, roles: tuple[str, ...], name: str) -> Expected:
        """The weight `name` of OUT, which holds the heads of `roles`."""
        import torch

        merged = torch.cat([self._accounted(role, "weight", name).flatten(0, 1) for role in roles])
        norm = self.norm if self._target.folded else None
        return self._with_gain(merged, self.heads(roles[0], "weight").dtype, norm)

    def _bias(self, roles: tuple[str, ...], name: str) -> Expected:
        """The bias `name` of OUT, which holds the heads of `roles`."""
        import torch

        if self._tensors.biased:
            dtype = self.heads(roles[0], "bias").dtype
            own = torch.cat([self._accounted(role, "bias", name).flatten(0, 1) for role in roles])
        else:
            dtype = self.heads(roles[0], "weight").dtype
            rows = sum(self._count(role) for role in roles) * self._sizes.head_dim
            own = torch.zeros(rows, dtype=wide_dtype(dtype))
        if not self._target.folded:
            return Expected(own, dtype)
        weight = torch.cat([self.merged(role, "weight").flatten(0, 1) for role in roles])
        return self._with_shift(own, weight, dtype, self.norm)

    def _count(self, role: str) -> int:
        return self._sizes.heads if role == "query" else self._tensors.groups

    def _accounted(self, role: str, kind: str, name: str) -> Any:
        """The merged heads of a role, whose error against SOURCE's heads, once rounded, is added to OUT's tensor."""
        merged, tensors = self.merged(role, kind), self._tensors
        if role != "query" and tensors.changed:
            heads = self.heads(role, kind)
            size = self._sizes.heads // tensors.groups
            for group, made in enumerate(merged.to(heads.dtype)):
                tensors.errors.add(name, heads[group * size : (group + 1) * size], made)
        return merged
