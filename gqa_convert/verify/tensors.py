"""Compares every tensor of OUT with what SOURCE's tensors make it.

Which tensors the conversion may touch follows from the geometry and the method alone, not from the converter's plan.
"""

import torch
from torch import Tensor

from gqa_convert.verify.config import compare_json
from gqa_convert.verify.geometry import MERGED, Heads, HeadTensor, Role
from gqa_convert.verify.inputs import Progress
from gqa_convert.verify.report import Failure
from gqa_convert.verify.result import FACTORED, FITTED, PLAIN, Result
from gqa_convert.verify.weights import Tensors, half_units, same_bits

_ROLES = ("query", "key", "value", "output")
_EXACT = 1e-6
"""Of a head's size: what arithmetic in float32 may add to twice the rounding of the result."""
_TRAINED = 0.9
"""Of a head's size: how far training may move it. Good fits of small models have up to 0.55 in queries and 0.35 in keys and
values; noise has nearly 1.
"""
_NEARER = 1.2
"""How many times as far from its own rows as from another head's a trained head may be. Exchanged heads have 1.4 or more."""
_MIXTURES = 16


class TensorChecks:
    """The checks on tensors; each ends at the first tensor that differs.

    Args:
        result: OUT.
        progress: called with the stage `tensors`, and how many of OUT's bytes were compared.
    """

    def __init__(self, result: Result, progress: Progress) -> None:
        self._result = result
        self._source = result.inputs.source.tensors
        self._out = result.weights.tensors
        self._progress = progress
        self._done = 0
        self._total = sum(tensor.nbytes for tensor in self._out.values())
        self._touched: list[tuple[HeadTensor, HeadTensor, set[Role]]] = []
        """The tensors that hold merged heads, or heads that the method may change, and the roles that it may change."""
        for module in result.geometry.changed:
            foldable = result.foldable.get(module.name, set())
            for before, after in module.tensors:
                if before.rows.keys() & foldable.union(MERGED):
                    self._touched.append((before, after, foldable))

    def names(self) -> str:
        """OUT has SOURCE's tensors, except the norms of K/V heads that it does not have, and its files SOURCE's metadata."""
        dropped = {
            name for before, after, _ in self._touched for name in before.names[len(after.names) :]
        }
        expected = self._source.keys() - dropped
        found = self._out.keys()
        if expected != found:
            raise Failure(
                f"missing: {sorted(expected - found)[:3]}, not in SOURCE: {sorted(found - expected)[:3]}"
            )
        metadata = {"format": "pt"} | self._result.inputs.original.metadata
        compare_json("the metadata of the weight files", self._result.weights.metadata, metadata)
        return f"{len(expected)} tensors"

    def untouched(self) -> str:
        """Every tensor that the conversion leaves alone has SOURCE's type, shape and bytes."""
        touched = {name for before, _, _ in self._touched for name in before.names}
        names = [name for name in self._source if name not in touched]
        for name in names:
            theirs = self._source[name].to(self._result.inputs.result_dtype(name))
            self._check_header(name, list(theirs.shape))
            if not same_bits(self._out[name], theirs):
                raise Failure(f"{name} has other numbers than SOURCE's")
        return f"{len(names)} tensors, bit for bit"

    def merged(self) -> str:
        """Every K/V head is what the method makes of its group, as far as that can be said from the heads alone; query
        heads and gates that the method leaves alone are SOURCE's.
        """
        result = self._result
        known = (*PLAIN, FACTORED, FITTED)
        if result.geometry.merged and result.method not in known:
            raise Failure(f"method {result.method!r} is none of {', '.join(known)}")
        for before, after, foldable in self._touched:
            for name in after.names:
                shape = list(self._source[name].shape)
                shape[after.axis] = sum(rows.numel() for rows in after.rows.values()) // len(
                    after.names
                )
                self._check_header(name, shape)
            theirs = before.read(self._source)
            for role, ours in after.read(self._out).items():
                if role in foldable:
                    problem = "" if ours.isfinite().all() else "NaN or Inf"
                else:
                    problem = (
                        "" if self._is_merge(theirs[role], ours) else "other numbers than it must"
                    )
                if problem:
                    raise Failure(f"{after.names[0]} has {problem} in a {role} head")
        how = "finite, and means where they may not be folded" if result.folds else "bit for bit"
        return f"{len(self._touched)} tensors, {how}"

    def _check_header(self, name: str, shape: list[int]) -> None:
        if name not in self._out:
            raise Failure(f"{name} is missing")
        tensor = self._out[name]
        dtype = self._result.inputs.result_dtype(name)
        self._done += tensor.nbytes
        self._progress("tensors", self._done, self._total)
        if tensor.dtype != dtype or list(tensor.shape) != shape:
            raise Failure(
                f"{name} is {tensor.dtype} {list(tensor.shape)}, expected {dtype} {shape}"
            )

    def _is_merge(self, theirs: Tensor, ours: Tensor) -> bool:
        """Whether heads are what the method makes of SOURCE's: bit for bit or, where keys or values are means because they
        may not be folded, the rounded mean.
        """
        repeated = theirs.repeat_interleave(max(1, len(ours) // len(theirs)), 0)
        groups = repeated.unflatten(0, (len(ours), -1))
        size = groups.shape[1]
        if self._result.method == "first" or size == 1:
            return same_bits(ours, groups[:, 0].to(ours.dtype))
        if self._result.folds:
            mean = groups.double().mean(1)
            # with a text, it was rounded to float32 first
            rounding = (
                half_units(mean, ours.dtype)
                + (1e-7 if self._result.has_text else 1e-12) * mean.abs()
            )
            return bool(((ours.double() - mean).abs() <= rounding).all())
        total = groups[:, 0].to(torch.float32 if ours.itemsize == 2 else torch.float64, copy=True)
        for head in range(1, size):
            total += groups[:, head]
        return same_bits(ours, (total / size).to(ours.dtype))


def check_spans(result: Result) -> str:
    """Heads that absorb maps are made of the heads that they must be made of, and of nothing else, and are zero only if these
    are; K/V heads have their size.

    A merged K/V head is a linear map of the rows of its group, with the root mean square of the group's heads. A query head,
    and the columns of the output projection that a query head feeds, are linear maps of their own rows and columns. `fit`
    then trains all of them: heads move away, but stay nearest to what they were made from, and columns of the output
    projection may become anything. Where the rows of a group span the whole space, as those of all heads together may, only
    sizes are compared. Distances are those of a few random mixtures of a head's rows.

    Raises:
        Failure: a head is made of others, or has another size.
    """
    is_trained = result.method == FITTED
    share = _TRAINED if is_trained else _EXACT
    worst = 0.0
    for module in result.geometry.merged:
        order = result.inputs.claims.get("head_order", {}).get(module.name, [*range(module.before)])
        before, after = zip(*module.tensors, strict=True)
        theirs = _joined_heads(before, result.inputs.source.tensors)
        ours = _joined_heads(after, result.weights.tensors)
        dtype = result.weights.tensors[after[0].names[0]].dtype
        for role in sorted(result.foldable[module.name].intersection(_ROLES)):
            heads = ours[role]
            # source heads by the K/V head that they belong to, in the order in which these were merged
            made_from = (
                theirs[role]
                .unflatten(0, (len(order), -1))[order]
                .reshape(len(heads), -1, heads.shape[2])
            )
            rounding = 2 * half_units(heads, dtype).norm(dim=(1, 2))
            sizes, source_sizes = heads.norm(dim=(1, 2)), made_from.norm(dim=(1, 2))
            wrong = (sizes == 0) & (source_sizes > 0)
            if role in MERGED:
                wanted = source_sizes * (module.after / module.before) ** 0.5
                larger = sizes - wanted
                wrong |= (larger if is_trained else larger.abs()) > rounding + share * wanted
            if role != "output" or not is_trained:
                distances = _distances(heads, made_from)
                own = distances.diag()
                wrong |= (own > rounding + share * sizes) | (
                    own > rounding + _NEARER * distances.amin(0)
                )
                worst = max(worst, float((own / sizes.clamp(min=1e-30)).max()))
            if wrong.any():
                head = int(wrong.int().argmax())
                raise Failure(
                    f"{role} head {head} of {module.name} is not made of the heads that belong to it, or not alone"
                )
    return f"at most {worst:.2g} of a head is not made of the heads that belong to it"


def _distances(heads: Tensor, made_from: Tensor) -> Tensor:
    """[n, n]: the distance of the second head [n, c, e] from the span of the rows that the first was made from, [n, rows, e]."""
    count, rows, inputs = heads.shape
    if made_from.shape[1] >= inputs:  # they span the whole space
        return heads.new_zeros(count, count)
    random = torch.randn(
        count, _MIXTURES, rows, generator=torch.Generator().manual_seed(0), dtype=heads.dtype
    )
    mixtures = (random @ heads).flatten(0, 1)
    inside = (mixtures @ torch.linalg.qr(made_from.mT).Q).square().sum(2)
    squares = (mixtures.square().sum(1) - inside).unflatten(1, (count, -1)).mean(2)
    return squares.clamp(min=0).sqrt()


def _joined_heads(held: tuple[HeadTensor, ...], tensors: Tensors) -> Heads:
    """The heads of queries, keys and values with their biases, [heads, c, e], and the columns of the output projection that
    each query head feeds, [query heads, c, outputs], in float64.

    Args:
        held: the tensors of a module.
        tensors: of the same checkpoint.
    """
    found: Heads = {}
    for tensor in held:  # weights before their biases
        for role, heads in tensor.read(tensors).items():
            if role in found:
                heads = torch.cat([found[role], heads.unsqueeze(-1)], -1)
            if role in _ROLES:
                found[role] = heads.double()
    return found
