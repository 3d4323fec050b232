"""What becomes of the tensors of an attention layer."""

from collections.abc import Iterator, Sequence

from gqa_convert.checkpoint.headers import TensorEntry
from gqa_convert.conversion.plan.model import RegroupedTensor, TensorChange
from gqa_convert.errors import GroupsError
from gqa_convert.families.geometry import AttentionFinder, AttentionLayer
from gqa_convert.families.layouts import regrouped, separate
from gqa_convert.merging.absorption_limits import AbsorptionLimits
from gqa_convert.merging.methods import COPY, REPEAT, MergeMethod


def layer_changes(
    finder: AttentionFinder,
    layer: AttentionLayer,
    groups: int,
    method: MergeMethod,
    limits: AbsorptionLimits | None,
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
    applied = method
    if groups >= layer.kv_heads:
        applied = COPY if groups == layer.kv_heads else REPEAT
    for name, sections in finder.sections(layer):
        before, dtype = finder.entries[name].shape, finder.dtype(name)
        is_transposed = finder.family.transposed and len(before) == 2
        rows = sum(section.rows for section in regrouped(sections, groups))
        after = (before[0], rows) if is_transposed else (rows, *before[1:])
        entry = TensorEntry.planned(dtype, after)
        tensor = RegroupedTensor(name, entry, (name,), sections, groups, method.pooling, is_transposed)
        yield TensorChange(name, dtype, before, after, applied.name, (tensor,))
    for names in finder.head_lists(layer):
        yield _list_change(finder, names, groups, method, applied.name)
    if limits is None or groups >= layer.kv_heads:
        return
    query, output = f"{layer.module}.{finder.family.query}", f"{layer.module}.{finder.family.output}"
    for projection, constraint in ((query, limits.key_constraint), (output, limits.value_constraint)):
        for name in (f"{projection}.weight", f"{projection}.bias"):
            if name in finder.entries and (method.trains or not constraint):
                shape = finder.entries[name].shape
                yield TensorChange(name, finder.dtype(name), shape, shape, method.name)


def _list_change(
    finder: AttentionFinder, names: Sequence[str], groups: int, method: MergeMethod, applied: str
) -> TensorChange:
    """The gains of norms that have a tensor for each K/V head."""
    shape, dtype, stem = finder.entries[names[0]].shape, finder.dtype(names[0]), names[0].rsplit(".0.", 1)[0]
    if groups > len(names):
        raise GroupsError(
            f"{stem} has one tensor per K/V head, so that heads can't be repeated here: choose at most {len(names)} groups"
        )
    size = len(names) // groups
    sections, entry = separate("key_norm", size, shape[0]), TensorEntry.planned(dtype, shape)
    tensors = []
    for group in range(groups):
        sources = tuple(names[group * size : (group + 1) * size])
        tensors.append(RegroupedTensor(names[group], entry, sources, sections, 1, method.pooling))
    return TensorChange(stem, dtype, (len(names), *shape), (groups, *shape), applied, tuple(tensors))


def constraint_notes(limits: Sequence[AbsorptionLimits], method: MergeMethod) -> Iterator[str]:
    """Which heads are averaged, since nothing can absorb their maps, and why."""
    treatment = "start from their mean" if method.trains else "are averaged"
    keys, values = [each.key_constraint for each in limits], [each.value_constraint for each in limits]
    for heads, constraints in (("keys", keys), ("values", values)):
        reasons = [reason for reason in constraints if reason]
        if reasons:
            yield f"{heads} {treatment} in {len(reasons)} of {len(limits)} attention layers, since {reasons[0]}"
