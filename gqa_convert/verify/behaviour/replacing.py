"""Gives the loaded SOURCE the merged heads, each repeated for its group, so that it must compute what OUT computes."""

from typing import Any

from gqa_convert.families.family import Family
from gqa_convert.verify.checkpoint_reader import Weights
from gqa_convert.verify.exact.merges import merge
from gqa_convert.verify.geometry import Counts, Geometry, attention_kind_of
from gqa_convert.verify.layout import Run, axis_of, fused, separate
from gqa_convert.verify.proofs import FOLDING
from gqa_convert.verify.report import Failure


def holds_heads(name: str, family: Family) -> bool:
    """Whether a parameter in memory belongs to K/V heads. Its name ends like that on disk; prefixes may differ."""
    parts = (family.fused,) if family.fused else (family.key, family.value)
    endings = tuple(f".{part}.{kind}" for part in parts for kind in ("weight", "bias"))
    found = name.endswith(endings) or (family.key_norm != "none" and f".{family.key_norm_name}." in name)
    return found and attention_kind_of(name, family) is not None


def folds_maps(name: str, family: Family) -> bool:
    """Whether a parameter in memory belongs to an attention's separate query projection or its output projection."""
    endings = tuple(f".{part}.{kind}" for part in (family.query, family.output) for kind in ("weight", "bias"))
    return name.endswith(endings) and attention_kind_of(name, family) is not None


def pool_heads(model: Any, family: Family, geometry: Geometry) -> int:
    """Give every K/V head of the loaded SOURCE the mean of its group, and return how many parameters changed."""
    return replace_heads(model, None, family, geometry, "mean")


def replace_heads(
    model: Any, ours: dict[str, Any] | None, family: Family, geometry: Geometry, method: Any, spacing: float = 0.0
) -> int:
    """Give every K/V head of the loaded SOURCE the merged head of its group, and return how many parameters changed.

    The merged heads are computed from the loaded SOURCE's own heads, and OUT's must be close to them. Random heads, and
    heads whose maps are folded into queries and outputs, can only be OUT's; the queries and outputs are OUT's then too.

    Args:
        model: the loaded SOURCE, whose fused projections have the family's layout.
        ours: parameters of the loaded OUT, whose fused projections are [q | k | v]: those with K/V heads and those
            into which maps are folded. None if merged heads are not to be compared with OUT's.
        family: SOURCE's family.
        geometry: of both checkpoints.
        method: how the heads were merged.
        spacing: the smallest distance of two numbers of K/V heads on disk. OUT's are rounded to it, however small they
            are.

    Raises:
        Failure: a parameter has no counterpart in the loaded OUT, or OUT's head is not the merge of SOURCE's.
    """
    import torch

    if not any(counts.size > 1 for counts in geometry.every):
        return 0
    replacer = _Replacer(dict(model.named_parameters()), ours, family, method, spacing)
    with torch.no_grad():
        for name in replacer.theirs:
            counts = _counts_of(name, family, geometry)
            if counts is not None and counts.size > 1:
                replacer.replace(name, counts)
        for name in replacer.folding if method in FOLDING else ():
            counts = _counts_of(name, family, geometry)
            if counts is not None and counts.size > 1:
                replacer.copy(name)
    if not replacer.replaced:
        raise Failure("the loaded SOURCE has no parameters with K/V heads")
    return len(replacer.replaced)


def _counts_of(name: str, family: Family, geometry: Geometry) -> Counts | None:
    """The heads of a parameter's module; None if it stayed unchanged."""
    kind = attention_kind_of(name, family) or "decoder"
    return geometry.of(name, kind) if kind in geometry.counts else None


class _Replacer:
    """Replaces the parameters of one model; the arguments are those of `replace_heads`."""

    def __init__(
        self, parameters: dict[str, Any], ours: dict[str, Any] | None, family: Family, method: Any, spacing: float
    ) -> None:
        self.theirs = {name: parameter for name, parameter in parameters.items() if holds_heads(name, family)}
        self.folding = {name: parameter for name, parameter in parameters.items() if folds_maps(name, family)}
        self.replaced: set[str] = set()
        self._ours = ours
        self._family = family
        self._method = method
        self._spacing = spacing

    def replace(self, name: str, counts: Counts) -> None:
        """Replace the K/V heads of a parameter."""
        family = self._family
        norm = family.key_norm != "none" and f".{family.key_norm_name}." in name
        if name in self.replaced or (norm and family.key_norm == "shared"):
            return
        if norm and family.key_norm == "per_head_list":
            self._replace_list(name, counts)
            return
        theirs = self.theirs[name]
        transposed = bool(axis_of(family, theirs.shape))
        if transposed:
            theirs = theirs.T  # a view: writing to it changes the parameter
        before, after = self._runs(name, theirs.shape[0], counts)
        if self._ours is None:
            for run in before:
                if run.merged:
                    self._merge(
                        [theirs[start : start + run.head_dim] for start in run.starts], [None] * counts.after, counts
                    )
            self.replaced.add(name)
            return
        if name not in self._ours:
            raise Failure(f"{name} is in the loaded SOURCE but not in the loaded OUT")
        ours = self._ours[name].T if transposed else self._ours[name]
        rows = sum(run.heads * run.head_dim for run in after)
        if ours.shape != (rows, *theirs.shape[1:]):
            shapes = f"{list(self._ours[name].shape)} in the loaded OUT, {list(self.theirs[name].shape)} in the loaded SOURCE"
            raise Failure(f"{name} has shape {shapes}, which do not match")
        for old, new in zip(before, after, strict=True):
            if old.merged:
                heads = [theirs[start : start + old.head_dim] for start in old.starts]
                self._merge(heads, [ours[start : start + new.head_dim] for start in new.starts], counts)
            elif self._method in FOLDING:
                for start, at in zip(old.starts, new.starts, strict=True):
                    theirs[start : start + old.head_dim] = ours[at : at + new.head_dim]
        self.replaced.add(name)

    def copy(self, name: str) -> None:
        """Give a parameter without K/V heads OUT's numbers."""
        theirs, ours = self.folding[name], (self._ours or {}).get(name)
        if ours is None or ours.shape != theirs.shape:
            raise Failure(f"{name} is missing in the loaded OUT or has another shape there")
        theirs.copy_(ours)
        self.replaced.add(name)

    def _runs(self, name: str, rows: int, counts: Counts) -> tuple[tuple[Run, ...], tuple[Run, ...]]:
        """The layouts of a parameter in SOURCE and in OUT."""
        family = self._family
        if family.fused is None or f".{family.fused}." not in name:
            head_dim = rows // counts.before
            return separate("key", counts.before, head_dim), separate("key", counts.after, head_dim)
        heads = 0 if attention_kind_of(name, family) == "cross" else counts.heads
        head_dim = rows // (heads + 2 * counts.before)
        before = fused(family.fused_layout, heads, counts.before, head_dim)
        return before, fused("blocks", heads, counts.after, head_dim)

    def _replace_list(self, name: str, counts: Counts) -> None:
        """Replace the norms that have one parameter per head."""
        stem, _, ending = name.rpartition(f".{self._family.key_norm_name}.")
        kind = ending.split(".", 1)[1]
        names = [f"{stem}.{self._family.key_norm_name}.{head}.{kind}" for head in range(counts.before)]
        ours = self._ours or {}
        self._merge([self.theirs[one].data for one in names], [ours.get(one) for one in names[: counts.after]], counts)
        self.replaced.update(names)

    def _merge(self, heads: list[Any], ours: list[Any], counts: Counts) -> None:
        """Write the merged heads over the `heads` that they are merged from."""
        for group in range(counts.after):
            own = [heads[head] for head in counts.group(group)]
            copies = [head.clone() for head in own]
            if self._ours is None:
                made = merge(copies, "mean")
            else:
                made = merged_head(copies, self._method, ours[group], self._spacing)
            for head in own:
                head.copy_(made)


def merged_head(heads: list[Any], method: Any, ours: Any, spacing: float) -> Any:
    """OUT's merged head, after a check that it is close to the merge of SOURCE's heads, which has more digits than OUT
    on disk.

    Args:
        heads: SOURCE's heads of a group.
        method: how they were merged.
        ours: OUT's head; None if the loaded OUT does not have it.
        spacing: the smallest distance of two numbers on disk.

    Raises:
        Failure: OUT's head is not close to it.
    """
    if method in FOLDING:
        return ours
    made = merge(heads, method)
    spread = float(max(head.abs().max() for head in heads))
    if ours is None or not float((made - ours).abs().max()) <= 2.0**-8 * spread + 0.501 * spacing:
        raise Failure("a K/V head of the loaded OUT is not the merge of the loaded SOURCE's")
    return ours


def smallest_distance(weights: Weights, geometry: Geometry) -> float:
    """The smallest distance of two numbers in tensors with K/V heads: that of subnormal numbers.

    It is 6e-8 in float16 and negligible in other types.
    """
    import torch

    names = {*geometry.cuts, *(name for norms in geometry.lists for name in norms.names)}
    return max((torch.finfo(dtype).tiny * torch.finfo(dtype).eps for dtype in map(weights.dtype, names)), default=0.0)
