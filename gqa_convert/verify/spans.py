"""Whether heads that absorb maps are made of the heads that they must be made of, and of nothing else.

A merged K/V head is a linear map of the rows of its group, with the root mean square of the group's heads. A query head, and
the columns of the output projection that a query head feeds, are linear maps of their own rows and columns. `fit` then
trains all of them: heads move away, but stay nearest to what they were made from, and columns of the output projection may
become anything. Where the rows of a group span the whole space, as those of all heads together may, only sizes are compared.

Distances are those of a few random mixtures of a head's rows.
"""

import torch
from torch import Tensor

from gqa_convert.verify.geometry import MERGED, Heads, HeadTensor, Tensors
from gqa_convert.verify.report import Failure
from gqa_convert.verify.result import FITTED, Result
from gqa_convert.verify.weights import half_units

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


def check_spans(result: Result) -> str:
    """Every head is made of what it must be made of, and is zero only if that is; K/V heads have their size.

    Raises:
        Failure: a head does not.
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
            made_from = theirs[role].unflatten(0, (len(order), -1))[order].reshape(len(heads), -1, heads.shape[2])
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
                wrong |= (own > rounding + share * sizes) | (own > rounding + _NEARER * distances.amin(0))
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
    random = torch.randn(count, _MIXTURES, rows, generator=torch.Generator().manual_seed(0), dtype=heads.dtype)
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
