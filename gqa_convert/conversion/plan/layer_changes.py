"""What becomes of the tensors of an attention layer."""

from collections.abc import Iterator, Sequence

from gqa_convert.checkpoint.headers import TensorEntry
from gqa_convert.conversion.plan.model import TensorChange
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
    entries, family, applied = finder.entries, finder.family, method
    if groups >= layer.kv_heads:
        applied = COPY if groups == layer.kv_heads else REPEAT
    for name, sections in finder.sections(layer):
        if not any(section.merged for section in sections):
            continue
        before = entries[name].shape
        is_transposed = family.transposed and len(before) == 2
        rows = sum(section.rows for section in regrouped(sections, groups))
        after = (before[0], rows) if is_transposed else (rows, *before[1:])
        entry = TensorEntry(finder.dtype(name), after)
        yield TensorChange(
            name, before, entry, applied.name, (name,), sections, groups, is_transposed
        )
    for names in finder.head_lists(layer):
        # the gains of norms that have a tensor for each K/V head
        if groups > len(names):
            raise GroupsError(
                f"{layer.module}.{family.key_norm_name} has one tensor per K/V head, so that heads can't be repeated here: "
                f"choose at most {len(names)} groups"
            )
        size, shape = len(names) // groups, entries[names[0]].shape
        entry, sections = (
            TensorEntry(finder.dtype(names[0]), shape),
            separate("key_norm", size, shape[0]),
        )
        for group in range(groups):
            sources = tuple(names[group * size : (group + 1) * size])
            yield TensorChange(
                names[group], (size, *shape), entry, applied.name, sources, sections, groups=1
            )
    if limits is None or applied is not method:
        return
    for projection, constraint in (
        (family.query, limits.key_constraint),
        (family.output, limits.value_constraint),
    ):
        for kind in ("weight", "bias"):
            name = f"{layer.module}.{projection}.{kind}"
            if name in entries and (method.trains or not constraint):
                shape = entries[name].shape
                yield TensorChange(name, shape, TensorEntry(finder.dtype(name), shape), method.name)


def constraint_notes(limits: Sequence[AbsorptionLimits], method: MergeMethod) -> Iterator[str]:
    """Which heads are averaged, since nothing can absorb their maps, and why."""
    treatment = "start from their mean" if method.trains else "are averaged"
    keys = [each.key_constraint for each in limits if each.key_constraint]
    values = [each.value_constraint for each in limits if each.value_constraint]
    for heads, reasons in (("keys", keys), ("values", values)):
        if reasons:
            yield f"{heads} {treatment} in {len(reasons)} of {len(limits)} attention layers, since {reasons[0]}"
