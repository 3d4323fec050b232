"""What becomes of the tensors of an attention layer."""

from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING

from gqa_convert.conversion.plan.model import OutputTensor, Regrouping, TensorChange
from gqa_convert.errors import GroupsError
from gqa_convert.families.geometry import AttentionFinder, AttentionLayer
from gqa_convert.families.layouts import regrouped, separate
from gqa_convert.merging.methods import COPY, MEAN, REPEAT, MergeMethod

if TYPE_CHECKING:
    from gqa_convert.merging.absorption_limits import AbsorptionLimits


def layer_changes(
    finder: AttentionFinder,
    layer: AttentionLayer,
    groups: int,
    method: MergeMethod,
    limits: "AbsorptionLimits | None",
) -> Iterator[TensorChange]:
    """The tensors of a layer that hold K/V heads, copied ones included, and those that absorb maps.

    Args:
        finder: of the source.
        layer: one of its layers.
        groups: K/V heads of the layer in the result.
        method: that merges them.
        limits: what may be absorbed; None for methods that let nothing be absorbed.

    Raises:
        GroupsError: heads would be repeated that have a tensor each.
    """
    for name, sections in finder.sections(layer):
        entry, dtype = finder.entries[name], finder.dtype(name)
        is_transposed = finder.family.transposed and len(entry.shape) == 2
        rows = sum(section.rows for section in regrouped(sections, groups))
        after = (entry.shape[0], rows) if is_transposed else (rows, *entry.shape[1:])
        roles = {section.role for section in sections if section.merged}
        regrouping = Regrouping((name,), sections, groups, method.pooling, is_transposed)
        tensor = OutputTensor(name, dtype, after, regrouping)
        yield TensorChange(name, dtype, entry.shape, after, _applied(layer, groups, method, limits, roles), (tensor,))
    for names in finder.head_lists(layer):
        applied = _applied(layer, groups, method, limits, {"key_norm"})
        yield _head_list(finder, names, groups, method, applied)
    if limits is None or groups >= layer.kv_heads:
        return
    family = finder.family
    for constraint, projection in (
        (limits.key_constraint, family.query),
        (limits.value_constraint, family.output),
    ):
        for kind in ("weight", "bias"):
            name = f"{layer.module}.{projection}.{kind}"
            if name in finder.entries and (method.trains or not constraint):
                shape = finder.entries[name].shape
                yield TensorChange(name, finder.dtype(name), shape, shape, method.name)


def _applied(
    layer: AttentionLayer,
    groups: int,
    method: MergeMethod,
    limits: "AbsorptionLimits | None",
    roles: Collection[str],
) -> str:
    """The method that applies to heads: where nothing can be absorbed, a closed form is their mean."""
    if groups == layer.kv_heads:
        return COPY.name
    if groups > layer.kv_heads:
        return REPEAT.name
    if limits is None or method.trains:
        return method.name
    constraints = {"key_norm": True, "key": limits.key_constraint, "value": limits.value_constraint}
    return MEAN.name if all(constraints[role] for role in roles) else method.name


def _head_list(
    finder: AttentionFinder, names: Sequence[str], groups: int, method: MergeMethod, applied: str
) -> TensorChange:
    """The gains of norms that have a tensor for each K/V head."""
    shape, dtype, stem = finder.entries[names[0]].shape, finder.dtype(names[0]), names[0].rsplit(".0.", 1)[0]
    if groups > len(names):
        raise GroupsError(
            f"{stem} has one tensor per K/V head, so that heads can't be repeated here: choose at most {len(names)} groups"
        )
    size = len(names) // groups
    sections = separate("key_norm", size, shape[0])
    tensors = []
    for group in range(groups):
        sources = tuple(names[group * size : (group + 1) * size])
        tensors.append(OutputTensor(names[group], dtype, shape, Regrouping(sources, sections, 1, method.pooling)))
    return TensorChange(stem, dtype, (len(names), *shape), (groups, *shape), applied, tuple(tensors))


def constraint_notes(limits: Sequence["AbsorptionLimits"], method: MergeMethod) -> Iterator[str]:
    """Which heads are averaged, since nothing can absorb their maps, and why."""
    treatment = "start from their mean" if method.trains else "are averaged"
    key_reasons = [each.key_constraint for each in limits if each.key_constraint]
    value_reasons = [each.value_constraint for each in limits if each.value_constraint]
    for heads, reasons in (("keys", key_reasons), ("values", value_reasons)):
        if reasons:
            yield f"{heads} {treatment} in {len(reasons)} of {len(limits)} attention layers, since {reasons[0]}"
