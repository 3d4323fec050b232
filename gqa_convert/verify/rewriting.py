"""The tensors of a translated OUT, computed anew from SOURCE's in torch: one formula each, a layer at a time.

Shape legend: H heads of SOURCE, N K/V heads of OUT, c rows of a head, d model width; a linear weight is [out, in].
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from gqa_convert.verify.checkpoint_reader import Weights
from gqa_convert.verify.recomputed_merges import fresh_heads, merge_groups, wide_dtype
from gqa_convert.verify.report import Failure
from gqa_convert.verify.sizes import Sizes, query_scale
from gqa_convert.verify.target_architectures import TargetArchitecture

ROLES = ("query", "key", "value")

_RANDOM_SLACK = {"float32": 5e-7, "float64": 1e-13}
"""By how much two correct standard deviations may make random numbers differ, relative, by the type of the sums."""

_ROWS = 1024
"""Rows of a weight that are multiplied at a time: a whole one in float64 would be several times its size on disk."""


@dataclass(frozen=True, slots=True)
class Expected:
    """What a tensor of OUT must be: `value` rounded to `dtype`, bit for bit unless there is a `slack`.

    With one, OUT may be off by half a unit in the last place, as any rounding is, and by `slack` (absolute, number for
    number).
    """

    value: Any
    dtype: Any
    slack: Any = None


Formula = Callable[[], Expected]


def split_heads(target_architecture: TargetArchitecture, tensor: Any, heads: int) -> dict[str, Any]:
    """Views of the queries, keys and values in a tensor of SOURCE's fused projection, [..., c, (d)], whose flat order
    is that of heads.
    """
    if target_architecture.conv and tensor.dim() == 2:
        tensor = tensor.T
    if target_architecture.layout == "per head":
        view = tensor.unflatten(0, (heads, 3, -1))
        return {role: view[:, part] for part, role in enumerate(ROLES)}
    if target_architecture.layout == "quarters":
        view = tensor.unflatten(0, (4, 3, heads // 4, -1))
        return {role: view[:, part] for part, role in enumerate(("query", "value", "key"))}
    view = tensor.unflatten(0, (3, heads, -1))
    return {role: view[part] for part, role in enumerate(ROLES)}


def to_halves(heads: Any, rotated: int) -> Any:
    """Heads [n, c, ...] whose rotary rows (2j, 2j + 1) become (j, j + rotated / 2)."""
    import torch

    pairs = heads[:, :rotated].unflatten(1, (rotated // 2, 2)).transpose(1, 2).flatten(1, 2)
    return torch.cat([pairs, heads[:, rotated:]], 1)


def to_pairs(heads: Any, rotated: int) -> Any:
    """The reverse of `to_halves`."""
    import torch

    halves = heads[:, :rotated].unflatten(1, (2, rotated // 2)).transpose(1, 2).flatten(1, 2)
    return torch.cat([halves, heads[:, rotated:]], 1)


class Rewriting:
    """All of OUT's tensors by name.

    Args:
        source: tensors of SOURCE.
        config: its config.
        home: which types are SOURCE's and OUT's.
        sizes: the counts of SOURCE.
        groups: K/V heads of OUT.
        method: mean, first or random; of no account when heads are copied.
        seed: for random.
    """

    def __init__(
        self,
        source: Weights,
        config: dict[str, Any],
        target_architecture: TargetArchitecture,
        sizes: Sizes,
        groups: int,
        method: Any,
        seed: int,
    ) -> None:
        self.source, self.config, self.target_architecture, self.sizes = source, config, target_architecture, sizes
        self.groups, self.method, self.seed = groups, method, seed
        old = target_architecture.old
        inside = f"{old.prefix}{old.embedding}.weight" in source.file_of
        self.old_prefix = old.prefix if inside else ""
        """A checkpoint of the model without its head has no prefix, nor have some with it."""
        self.new_prefix = target_architecture.new.prefix if inside else ""
        self.biased = target_architecture.biased and bool(config.get("attention_bias", True))
        self.squares: dict[str, tuple[float, float]] = {}
        """Of each tensor of OUT with merged heads: squared errors and norms, full once its formula was evaluated."""
        self.used: set[str] = set()

    def whole(self, name: str) -> Any:
        """A tensor of SOURCE."""
        if name not in self.source.file_of:
            raise Failure(f"SOURCE has no {name}, from which OUT's tensors follow")
        shape = self.source.shape(name)
        return self.source.rows(name, 0, shape[0] if shape else 1)

    def layer(self, number: int) -> "Layer":
        return Layer(self, number)

    def parts(self) -> Iterator[dict[str, Formula]]:
        """The formulas of each layer, then of everything else; naming them reads nothing."""
        for number in range(self.sizes.layers):
            yield self.layer(number).formulas()
        yield self._outside()

    def _outside(self) -> dict[str, Formula]:
        old, new = self.target_architecture.old, self.target_architecture.new
        formulas = self.copy(f"{self.old_prefix}{old.embedding}", f"{self.new_prefix}{new.embedding}", ("weight",))
        if old.positions:
            formulas |= self.copy(f"{self.old_prefix}{old.positions}", f"{self.new_prefix}{new.positions}", ("weight",))
        formulas |= self.copy(
            f"{self.old_prefix}{old.last_norm}", f"{self.new_prefix}{new.last_norm}", ("weight", "bias")
        )
        head = next((name for name in old.logits if f"{name}.weight" in self.source.file_of), None)
        if head:
            formulas |= self.copy(head, new.logits[0], ("weight",))
        if self.target_architecture.logits_bias and (head or self.old_prefix):
            name = f"{head or new.logits[0]}.bias"
            if self.target_architecture.source != "gpt_neox" and name in self.source.file_of:
                formulas |= self.copy(name.removesuffix(".bias"), new.logits[0], ("bias",))
            else:
                like = f"{head}.weight" if head else f"{self.old_prefix}{old.embedding}.weight"
                formulas[f"{new.logits[0]}.bias"] = lambda: self.constant(0.0, like)
        return formulas

    def copy(self, old: str, new: str, kinds: tuple[str, ...]) -> dict[str, Formula]:
        self.used.update(f"{old}.{kind}" for kind in kinds)
        return {f"{new}.{kind}": lambda kind=kind: self._same(f"{old}.{kind}") for kind in kinds}  # type: ignore[misc]

    def _same(self, name: str) -> Expected:
        tensor = self.whole(name)
        return Expected(tensor, tensor.dtype)

    def constant(self, value: float, like: str, numbers: int | None = None) -> Expected:
        """As many equal numbers as a tensor of SOURCE has rows, in its type."""
        import torch

        dtype = self.source.dtype(like)
        return Expected(torch.full((numbers or self.source.shape(like)[0],), value, dtype=dtype), dtype)

    def leftovers(self) -> tuple[list[str], list[str]]:
        """Tensors of SOURCE that none of OUT's comes from: known buffers, and others. To be asked for once `parts` is
        exhausted.
        """
        target_architecture = self.target_architecture
        known = re.compile(
            rf"(?:.*\.)?{target_architecture.old.layers}\.\d+\.{target_architecture.old.attention}\.(?:{'|'.join(re.escape(name) for name in target_architecture.buffers)})"
        )
        left = sorted(set(self.source.file_of) - self.used)
        return [name for name in left if known.fullmatch(name)], [name for name in left if not known.fullmatch(name)]


class Layer:
    """One layer; of SOURCE it holds what was read of its attention.

    Args:
        whole: what it belongs to.
        number: of the layer.
    """

    def __init__(self, whole: Rewriting, number: int) -> None:
        target_architecture = whole.target_architecture
        self._all, self._target, self._sizes = whole, target_architecture, whole.sizes
        self.old = f"{whole.old_prefix}{target_architecture.old.layers}.{number}."
        self.new = f"{whole.new_prefix}{target_architecture.new.layers}.{number}."
        self.scale = query_scale(whole.config, whole.sizes, number)
        self.norm = f"{self.old}{target_architecture.old.norm}"
        self._second = (
            f"{self.old}{target_architecture.old.second_norm}" if target_architecture.old.second_norm else self.norm
        )

    def formulas(self) -> dict[str, Formula]:
        target_architecture, whole = self._target, self._all
        found: dict[str, Formula] = {}
        if target_architecture.folded:
            whole.used.update(f"{norm}.{kind}" for norm in (self.norm, self._second) for kind in ("weight", "bias"))
            for kind, value in (("weight", 1.0), ("bias", 0.0)):
                norm = f"{self.norm}.{kind}"
                found[f"{self.new}{target_architecture.new.norm}.{kind}"] = lambda norm=norm, value=value: (
                    whole.constant(value, norm)
                )  # type: ignore[misc]
        else:
            found |= whole.copy(self.norm, f"{self.new}{target_architecture.new.norm}", ("weight", "bias"))
            if target_architecture.old.second_norm:
                found |= whole.copy(
                    self._second, f"{self.new}{target_architecture.new.second_norm}", ("weight", "bias")
                )
        found |= self._attention()
        attention = (
            f"{target_architecture.old.attention}.{target_architecture.old.output}",
            f"{target_architecture.new.attention}.{target_architecture.new.output}",
        )
        found |= self._linear(*attention, biased=whole.biased)
        found |= self._linear(target_architecture.old.down, target_architecture.new.down)
        found |= self._linear(
            target_architecture.old.up, target_architecture.new.up, self._second if target_architecture.folded else None
        )
        return found

    def _linear(self, old: str, new: str, norm: str | None = None, *, biased: bool = True) -> dict[str, Formula]:
        """A projection whose rows stay where they are."""
        name, target = f"{self.old}{old}", f"{self.new}{new}"
        self._all.used.update({f"{name}.weight", f"{name}.bias"} if biased else {f"{name}.weight"})

        def weight() -> Any:
            tensor = self._all.whole(f"{name}.weight")
            return tensor.T if self._target.conv else tensor

        def folded() -> Expected:
            native = weight()
            return self._with_gain(native.to(wide_dtype(native.dtype)), native.dtype, norm)

        def bias() -> Expected:
            native = weight()
            own = self._all.whole(f"{name}.bias") if biased else None
            if norm is None:
                return (
                    Expected(own, own.dtype)
                    if own is not None
                    else Expected(native.new_zeros(native.shape[0]), native.dtype)
                )
            assert own is not None
            wide = native.to(wide_dtype(native.dtype))
            return self._with_shift(own.to(wide_dtype(own.dtype)), wide, own.dtype, norm)

        return {f"{target}.weight": folded, f"{target}.bias": bias}

    def _with_gain(self, wide: Any, dtype: Any, norm: str | None) -> Expected:
        """A weight times the gain of the norm in front, which is then OUT's no more."""
        if norm is None:
            return Expected(wide, dtype)
        return Expected(wide * self._all.whole(f"{norm}.weight").to(wide.dtype), dtype)

    def _with_shift(self, own: Any, weight: Any, dtype: Any, norm: str) -> Expected:
        """A bias plus what the norm's bias brings through the weight: the order in which such a product is summed is
        free.
        """
        import torch

        shift = self._all.whole(f"{norm}.bias").double()
        value, size = own.double(), own.double().abs()
        for first in range(0, len(weight), _ROWS):
            rows = weight[first : first + _ROWS].double()
            value[first : first + _ROWS] += rows @ shift
            size[first : first + _ROWS] += rows.abs() @ shift.abs()
        coarse = max(torch.finfo(own.dtype).eps, torch.finfo(weight.dtype).eps)
        return Expected(value, dtype, 2 * coarse * weight.shape[1] ** 0.5 * size)

    def _attention(self) -> dict[str, Formula]:
        target_architecture, whole = self._target, self._all
        whole.used.update(
            f"{self.old}{target_architecture.old.attention}.{name}.{kind}"
            for name in target_architecture.old.heads
            for kind in (("weight", "bias") if whole.biased else ("weight",))
        )
        targets: list[tuple[tuple[str, ...], str]] = [(ROLES, target_architecture.new.heads[0])]
        if len(target_architecture.new.heads) > 1:
            targets = [((role,), name) for role, name in zip(ROLES, target_architecture.new.heads, strict=True)]
        found: dict[str, Formula] = {}
        for roles, projection in targets:
            name = f"{self.new}{target_architecture.new.attention}.{projection}"
            found[f"{name}.weight"] = lambda roles=roles, name=name: self._projection(roles, f"{name}.weight")  # type: ignore[misc]
            found[f"{name}.bias"] = lambda roles=roles, name=name: self._projection_bias(roles, f"{name}.bias")  # type: ignore[misc]
        return found

    def source_name(self, role: str, kind: str) -> str:
        """The tensor of SOURCE that holds a role."""
        names = self._target.old.heads
        return f"{self.old}{self._target.old.attention}.{names[ROLES.index(role) if len(names) > 1 else 0]}.{kind}"

    @cached_property
    def _read(self) -> dict[str, Any]:
        return {}

    def heads(self, role: str, kind: str) -> Any:
        """SOURCE's heads [H, c, (d)] of a role in OUT's rotary order, in their own type."""
        name = self.source_name(role, kind)
        if name not in self._read:
            self._read[name] = self._all.whole(name)
        tensor = self._read[name]
        sizes = self._sizes
        if self._target.layout == "alone":
            heads = tensor.unflatten(0, (sizes.heads, sizes.width))
        else:
            view = split_heads(self._target, tensor, sizes.heads)[role]
            heads = view.reshape(sizes.heads, sizes.width, *([sizes.hidden] if kind == "weight" else []))
        return to_halves(heads, sizes.rotated) if self._target.interleaved and role != "value" else heads

    def merged(self, role: str, kind: str) -> Any:
        """The heads that OUT has of a role, [N or H, c, (d)], neither folded nor rounded."""
        whole, sizes = self._all, self._sizes
        heads = self.heads(role, kind)
        wide = heads.to(wide_dtype(heads.dtype))
        if role == "query":
            return wide * self.scale if self.scale != 1.0 else wide
        if whole.groups == sizes.heads:
            return wide
        if whole.method == "random":
            return fresh_heads(whole.seed, f"{self.source_name(role, kind)}:{role}", heads, whole.groups)
        return merge_groups(wide, whole.groups, whole.method)

    def in_sources_order(self, role: str, kind: str) -> Any:
        """The merged heads, each as often as SOURCE has heads, rounded to SOURCE's type and in its rotary order."""
        dtype = self.heads(role, kind).dtype
        heads = self.merged(role, kind).to(dtype).repeat_interleave(self._sizes.heads // self._all.groups, 0)
        return to_pairs(heads, self._sizes.rotated) if self._target.interleaved and role == "key" else heads

    def _projection(self, roles: tuple[str, ...], name: str) -> Expected:
        import torch

        merged = torch.cat([self._accounted(role, "weight", name).flatten(0, 1) for role in roles])
        expected = self._with_gain(
            merged, self.heads(roles[0], "weight").dtype, self.norm if self._target.folded else None
        )
        return Expected(expected.value, expected.dtype, self._random_slack(roles, expected.value))

    def _projection_bias(self, roles: tuple[str, ...], name: str) -> Expected:
        import torch

        weights = [self.heads(role, "weight") for role in roles]
        folded = self._target.folded
        if not self._all.biased:
            dtype = weights[0].dtype
            rows = sum(self._count(role) for role in roles) * self._sizes.width
            own = torch.zeros(rows, dtype=wide_dtype(dtype))
        else:
            dtype = self.heads(roles[0], "bias").dtype
            own = torch.cat([self._accounted(role, "bias", name).flatten(0, 1) for role in roles])
        slack = self._random_slack(roles, own)
        if not folded:
            return Expected(own, dtype, slack)
        weight = torch.cat([self.merged(role, "weight").flatten(0, 1) for role in roles])
        expected = self._with_shift(own, weight, dtype, self.norm)
        if slack is None:
            return expected
        shift = self._all.whole(f"{self.norm}.bias").double().abs()
        drawn = self._random_slack(roles, weight).double() @ shift
        return Expected(expected.value, dtype, expected.slack + slack.double() + drawn)

    def _count(self, role: str) -> int:
        return self._sizes.heads if role == "query" else self._all.groups

    def _random_slack(self, roles: tuple[str, ...], value: Any) -> Any:
        """None unless random numbers are among the rows; queries before them are exact even then."""
        if self._all.method != "random" or self._all.groups == self._sizes.heads or roles == ("query",):
            return None
        slack = value.abs() * _RANDOM_SLACK[str(value.dtype).removeprefix("torch.")]
        if roles[0] == "query":
            slack[: self._sizes.hidden] = 0
        return slack

    def _accounted(self, role: str, kind: str, name: str) -> Any:
        """Merged heads, and the error of SOURCE's against them, once rounded, put to a tensor's account."""
        merged, whole = self.merged(role, kind), self._all
        if role != "query" and whole.groups != self._sizes.heads:
            heads = self.heads(role, kind)
            error, norm = whole.squares.get(name, (0.0, 0.0))
            for group, made in enumerate(merged.to(heads.dtype)):
                size = self._sizes.heads // whole.groups
                for head in heads[group * size : (group + 1) * size]:
                    wide = head.double()
                    norm += float(wide.square().sum())
                    error += float((wide - made.double()).square().sum())
            whole.squares[name] = (error, norm)
        return merged
