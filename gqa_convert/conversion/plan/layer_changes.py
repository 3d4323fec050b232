"""What becomes of the tensors of an attention layer."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gqa_convert.conversion.plan.model import OutputTensor, Regrouping, TensorChange
from gqa_convert.errors import GroupsError
from gqa_convert.families.geometry import AttentionFinder, AttentionLayer
from gqa_convert.families.layouts import Role, regrouped, separate
from gqa_convert.merging.methods import COPY, MEAN, REPEAT, MergeMethod

if TYPE_CHECKING:
    from gqa_convert.merging.absorption_limits import AbsorptionLimits

Change = tuple[TensorChange, list[OutputTensor]]
"""How a tensor changes, or a list of tensors with one head each; and what the result has in their place."""


@dataclass(frozen=True, slots=True)
class LayerChange:
    """A layer whose result has `groups` K/V heads."""

    finder: AttentionFinder
    layer: AttentionLayer
    groups: int
    method: MergeMethod
    limits: "AbsorptionLimits | None"
    """What may be absorbed; None for methods that let nothing be absorbed."""

    def kv_tensors(self) -> Iterator[Change]:
        """The tensors that hold K/V heads, copied ones included.

        Raises:
            GroupsError: heads would be repeated that have a tensor each.
        """
        for name, sections in self.finder.sections(self.layer):
            entry = self.finder.entries[name]
            transposed = self.finder.family.transposed and len(entry.shape) == 2
            rows = sum(section.rows for section in regrouped(sections, self.groups))
            after = (entry.shape[0], rows) if transposed else (rows, *entry.shape[1:])
            roles = tuple(section.role for section in sections if section.merged)
            regrouping = Regrouping((name,), sections, self.groups, self.method.pooling, transposed)
            change = self._change(name, roles, self.finder.dtype(name), entry.shape, after)
            yield change, [OutputTensor(name, change.dtype, after, regrouping)]
        for names in self.finder.head_lists(self.layer):
            yield self._head_list(names)

    def _head_list(self, names: list[str]) -> Change:
        shape, dtype, stem = (
            self.finder.entries[names[0]].shape,
            self.finder.dtype(names[0]),
            names[0].rsplit(".0.", 1)[0],
        )
        if self.groups > len(names):
            raise GroupsError(
                f"{stem} has one tensor per K/V head, so that heads can't be repeated here: choose at most {len(names)} groups"
            )
        size = len(names) // self.groups
        sections = separate("key_norm", size, shape[0])
        tensors = []
        for group in range(self.groups):
            sources = tuple(names[group * size : (group + 1) * size])
            regrouping = Regrouping(sources, sections, 1, self.method.pooling)
            tensors.append(OutputTensor(names[group], dtype, shape, regrouping))
        before, after = (len(names), *shape), (self.groups, *shape)
        return self._change(stem, ("key_norm",), dtype, before, after), tensors

    def _change(
        self, name: str, roles: tuple[Role, ...], dtype: str, before: tuple[int, ...], after: tuple[int, ...]
    ) -> TensorChange:
        """The change, by the method that applies: where nothing can be absorbed, a closed form is the heads' mean."""
        applied = self.method
        if self.groups == self.layer.kv_heads:
            applied = COPY
        elif self.groups > self.layer.kv_heads:
            applied = REPEAT
        elif self.limits is not None and not applied.trains:
            averaged = {"key_norm"}
            averaged |= {"key"} if self.limits.key_constraint else set()
            averaged |= {"value"} if self.limits.value_constraint else set()
            if averaged.issuperset(roles):
                applied = MEAN
        return TensorChange(name, self.layer.module, roles, dtype, before, after, applied.name)

    def projections(self) -> Iterator[TensorChange]:
        """The query and output projections, where they absorb maps."""
        if self.limits is None or self.groups >= self.layer.kv_heads:
            return
        family = self.finder.family
        absorbing: list[tuple[Role, str]] = []
        if not self.limits.key_constraint or self.method.trains:
            absorbing.append(("query", family.query))
        if not self.limits.value_constraint or self.method.trains:
            absorbing.append(("output", family.output))
        for role, projection in absorbing:
            for kind in ("weight", "bias"):
                entry = self.finder.entries.get(name := f"{self.layer.module}.{projection}.{kind}")
                if entry is not None:
                    yield self._change(name, (role,), self.finder.dtype(name), entry.shape, entry.shape)


def constraint_notes(limits: Sequence["AbsorptionLimits"], method: MergeMethod) -> Iterator[str]:
    """Which heads are averaged, since nothing can absorb their maps, and why."""
    treatment = "start from their mean" if method.trains else "are averaged"
    key_reasons = [each.key_constraint for each in limits if each.key_constraint]
    value_reasons = [each.value_constraint for each in limits if each.value_constraint]
    for heads, reasons in (("keys", key_reasons), ("values", value_reasons)):
        if reasons:
            layers = f"{len(reasons)} of {len(limits)} attention layers"
            yield f"{heads} {treatment} in {layers}, since {reasons[0]}"
