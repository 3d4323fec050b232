"""Gives the loaded SOURCE the merged heads, each as often as its group has heads, so that it must compute what OUT
computes.
"""

from typing import Any

from gqa_convert.families.table import Family
from gqa_convert.verify.geometry import Counts, Geometry, attention_kind_of
from gqa_convert.verify.layout import Run, alone, axis_of, fused
from gqa_convert.verify.proofs import FOLDING
from gqa_convert.verify.recomputed_merges import merge
from gqa_convert.verify.report import Failure


def holds_heads(name: str, family: Family) -> bool:
    """Whether a parameter in memory belongs to K/V heads. Prefixes differ from those on disk; the ends are the same."""
    parts = (family.fused,) if family.fused else (family.key, family.value)
    endings = tuple(f".{part}.{kind}" for part in parts for kind in ("weight", "bias"))
    ours = name.endswith(endings) or (family.key_norm != "none" and f".{family.key_norm_name}." in name)
    return ours and attention_kind_of(name, family) is not None


def folds_maps(name: str, family: Family) -> bool:
    """Whether a parameter in memory is of an attention's own query projection or of its output projection."""
    endings = tuple(f".{part}.{kind}" for part in (family.query, family.output) for kind in ("weight", "bias"))
    return name.endswith(endings) and attention_kind_of(name, family) is not None


def pool_heads(model: Any, family: Family, geometry: Geometry) -> int:
    """Give every K/V head of the loaded source the mean of its group; returns how many parameters changed."""
    return replace_heads(model, None, family, geometry, "mean")


def replace_heads(
    model: Any, ours: dict[str, Any] | None, family: Family, geometry: Geometry, method: Any, spacing: float = 0.0
) -> int:
    """Give every K/V head of the loaded source the merged head of its group; returns how many parameters changed.

    The merged heads are made of the loaded source's own heads, except where they can only be OUT's: fresh numbers, and
    heads whose maps queries and outputs have absorbed, which are OUT's then too.

    Args:
        model: SOURCE, loaded; a fused projection has its family's layout there.
        ours: the parameters with K/V heads of the loaded OUT, whose fused projections are [q | k | v], and those that
            absorb maps;
            without them a merged head is not compared with OUT's.
        family: of SOURCE.
        geometry: of both.
        method: how the heads were merged.
        spacing: the smallest distance of two numbers of the K/V heads on disk: OUT's are rounded to it, however small
            they are.
    """
    import torch

    if not any(counts.size > 1 for counts in geometry.counts.values()):
        return 0
    replacer = _Replacer(dict(model.named_parameters()), ours, family, method, spacing)
    with torch.no_grad():
        for name in replacer.theirs:
            counts = geometry.counts.get(attention_kind_of(name, family) or "decoder")
            if counts is not None and counts.size > 1:
                replacer.replace(name, counts)
        for name in replacer.folding if method in FOLDING else ():
            counts = geometry.counts.get(attention_kind_of(name, family) or "decoder")
            if counts is not None and counts.size > 1:
                replacer.copy(name)
    if not replacer.replaced:
        raise Failure("the loaded SOURCE has no parameters with K/V heads")
    return len(replacer.replaced)


class _Replacer:
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
        family = self._family
        norm = family.key_norm != "none" and f".{family.key_norm_name}." in name
        if name in self.replaced or (norm and family.key_norm == "shared"):
            return
        if norm and family.key_norm == "per_head_list":
            self._replace_list(name, counts)
            return
        theirs = self.theirs[name]
        turned = bool(axis_of(family, theirs.shape))
        if turned:
            theirs = theirs.T  # a view: what is written into it, the parameter holds
        before, after = self._runs(name, theirs.shape[0], counts)
        if self._ours is None:
            for run in before:
                if run.merged:
                    self._merge(
                        [theirs[start : start + run.width] for start in run.starts], [None] * counts.after, counts
                    )
            self.replaced.add(name)
            return
        if name not in self._ours:
            raise Failure(f"{name} exists in the loaded SOURCE and not in the loaded OUT")
        ours = self._ours[name].T if turned else self._ours[name]
        rows = sum(run.heads * run.width for run in after)
        if ours.shape != (rows, *theirs.shape[1:]):
            shapes = f"{list(self._ours[name].shape)} in the loaded OUT, {list(self.theirs[name].shape)} in the loaded SOURCE"
            raise Failure(f"{name} is {shapes}, which does not fit")
        for old, new in zip(before, after, strict=True):
            if old.merged:
                heads = [theirs[start : start + old.width] for start in old.starts]
                self._merge(heads, [ours[start : start + new.width] for start in new.starts], counts)
            elif self._method in FOLDING:
                for start, at in zip(old.starts, new.starts, strict=True):
                    theirs[start : start + old.width] = ours[at : at + new.width]
        self.replaced.add(name)

    def copy(self, name: str) -> None:
        """Give a parameter that has no K/V heads OUT's numbers."""
        theirs, ours = self.folding[name], (self._ours or {}).get(name)
        if ours is None or ours.shape != theirs.shape:
            raise Failure(f"{name} is no parameter of the loaded OUT, or of another shape")
        theirs.copy_(ours)
        self.replaced.add(name)

    def _runs(self, name: str, rows: int, counts: Counts) -> tuple[tuple[Run, ...], tuple[Run, ...]]:
        """The heads of a parameter of SOURCE and of OUT's."""
        family = self._family
        if family.fused is None or f".{family.fused}." not in name:
            width = rows // counts.before
            return alone("key", counts.before, width), alone("key", counts.after, width)
        heads = 0 if attention_kind_of(name, family) == "cross" else counts.heads
        width = rows // (heads + 2 * counts.before)
        return fused(family.fused_layout, heads, counts.before, width), fused("blocks", heads, counts.after, width)

    def _replace_list(self, name: str, counts: Counts) -> None:
        """Norms that have one parameter per head."""
        stem, _, ending = name.rpartition(f".{self._family.key_norm_name}.")
        kind = ending.split(".", 1)[1]
        names = [f"{stem}.{self._family.key_norm_name}.{head}.{kind}" for head in range(counts.before)]
        ours = self._ours or {}
        self._merge([self.theirs[one].data for one in names], [ours.get(one) for one in names[: counts.after]], counts)
        self.replaced.update(names)

    def _merge(self, heads: list[Any], ours: list[Any], counts: Counts) -> None:
        """Write merged heads over the `heads` that they are made of."""
        for group in range(counts.after):
            own = heads[group * counts.size : (group + 1) * counts.size]
            copies = [head.clone() for head in own]
            made = (
                merge(copies, "mean") if self._ours is None else _made(copies, self._method, ours[group], self._spacing)
            )
            for head in own:
                head.copy_(made)


def _made(heads: list[Any], method: Any, ours: Any, spacing: float) -> Any:
    """A merged head. A mean has more digits than OUT's on disk, so that OUT's stands in once it is seen to be near."""
    if method == "random" or method in FOLDING:
        return ours
    made = merge(heads, method)
    spread = float(max(head.abs().max() for head in heads))
    if ours is None or not float((made - ours).abs().max()) <= 2.0**-8 * spread + 0.501 * spacing:
        raise Failure("the loaded OUT holds a K/V head that is not the merge of the loaded SOURCE's")
    return ours
