"""What a plan says of each tensor that a conversion changes."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from gqa_convert.conversion.plan.model import TensorChange
from gqa_convert.conversion.plan.tensors import head_list_name, shape_after
from gqa_convert.families.geometry import AttentionFinder, AttentionLayer
from gqa_convert.families.layouts import Role
from gqa_convert.merging.methods import COPY, MEAN, REPEAT, MergeMethod

if TYPE_CHECKING:
    from gqa_convert.merging.absorption_limits import AbsorptionLimits


def kv_changes(
    finder: AttentionFinder, layer: AttentionLayer, groups: int, method: MergeMethod, limits: "AbsorptionLimits | None"
) -> Iterator[TensorChange]:
    """The tensors of a layer that hold K/V heads, copied ones included.

    Args:
        finder: of the source.
        layer: one of its layers.
        groups: K/V heads of the result.
        method: that merges heads.
        limits: what may be folded in the layer; None for methods that fold nothing.
    """
    for name, sections in finder.sections(layer):
        entry = finder.entries[name]
        roles = tuple(section.role for section in sections if section.merged)
        after = shape_after(finder, name, sections, groups)
        applied = _applied_method(layer, groups, roles, method, limits)
        yield TensorChange(name, layer.module, roles, entry.dtype, entry.shape, after, applied)
    for names in finder.head_lists(layer):
        entry = finder.entries[names[0]]
        before, after = (len(names), *entry.shape), (groups, *entry.shape)
        applied = _applied_method(layer, groups, ("key_norm",), method, limits)
        yield TensorChange(head_list_name(names), layer.module, ("key_norm",), entry.dtype, before, after, applied)


def _applied_method(
    layer: AttentionLayer,
    groups: int,
    roles: tuple[Role, ...],
    method: MergeMethod,
    limits: "AbsorptionLimits | None",
) -> str:
    """The method that applies to heads of some roles: where nothing can be folded, a closed form is their mean."""
    if groups == layer.kv_heads:
        return COPY.name
    if groups > layer.kv_heads:
        return REPEAT.name
    if limits is not None and not method.trains:
        averaged = {"key": limits.key_constraint, "value": limits.value_constraint, "key_norm": True}
        if all(averaged[role] for role in roles):
            return MEAN.name
    return method.name


def projection_changes(
    finder: AttentionFinder, layer: AttentionLayer, method: MergeMethod, limits: "AbsorptionLimits"
) -> Iterator[TensorChange]:
    """The query and output projections of a merged layer, which absorb maps."""
    family = finder.family
    absorbing: list[tuple[Role, str]] = []
    if not limits.key_constraint or method.trains:
        absorbing.append(("query", family.query))
    if not limits.value_constraint or method.trains:
        absorbing.append(("output", family.output))
    for role, projection in absorbing:
        for name in (f"{layer.module}.{projection}.weight", f"{layer.module}.{projection}.bias"):
            if name in finder.entries:
                entry = finder.entries[name]
                yield TensorChange(name, layer.module, (role,), entry.dtype, entry.shape, entry.shape, method.name)


def constraint_notes(limits: Sequence["AbsorptionLimits"], method: MergeMethod) -> Iterator[str]:
    """Which heads a method can't fold, and why."""
    treatment = "start from their mean" if method.trains else "are averaged"
    key_reasons = [each.key_constraint for each in limits if each.key_constraint]
    value_reasons = [each.value_constraint for each in limits if each.value_constraint]
    for heads, reasons in (("keys", key_reasons), ("values", value_reasons)):
        if reasons:
            layers = f"{len(reasons)} of {len(limits)} attention layers"
            yield f"{heads} {treatment} in {layers}, since {reasons[0]}"
