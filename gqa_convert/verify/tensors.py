"""Compares every tensor of OUT with what SOURCE's tensors make it.

Which tensors the conversion may touch follows from the heads and the method alone, not from the
converter's plan.
"""

from functools import reduce

import torch
from torch import Tensor

from gqa_convert.checkpoint.dtypes import TORCH

from .config import compare_json
from .inputs import JsonObject, Progress, Tensors
from .report import Failure
from .result import FITTED, MERGED, PLAIN, HeadTensor, Module, Result, Role

_EXACT = 1e-6
"""Of a head's size: what arithmetic in float32 may add to twice the rounding of the result."""
_TRAINED = 0.9
"""Of a head's size: how far training may move it. Good fits of small models have up to 0.55 in
queries and 0.35 in keys and values; noise has nearly 1.
"""
_NEARER = 1.2
"""How many times as far from its own rows as from another head's a trained head may be. Exchanged
heads have 1.4 or more.
"""
_MIXTURES = 16


def check_headers(result: Result) -> str:
    """OUT has SOURCE's tensors, of the same types and, but for the number of K/V heads, of the same
    shapes. Its files have SOURCE's metadata.
    """
    inputs = result.inputs
    source = inputs.source.tensors
    expected: JsonObject = {}
    for name, tensor in source.items():
        # a rewritten SOURCE holds some tensors in a wider type
        dtype = inputs.converted.result_dtypes.get(name) or TORCH[str(tensor.dtype)]
        expected[name] = [dtype, *tensor.shape]
    for before, after, _ in result.touched:
        for name in before.names[len(after.names) :]:  # norms of K/V heads that OUT does not have
            del expected[name]
        for name in after.names:
            size = expected[name][1 + after.axis]
            expected[name][1 + after.axis] = size // before.heads * after.heads
    tensors = result.weights.tensors.items()
    found = {name: [TORCH[str(tensor.dtype)], *tensor.shape] for name, tensor in tensors}
    compare_json("the header of OUT", found, expected)
    metadata = {"format": "pt"} | inputs.original.metadata
    compare_json("the metadata of OUT", result.weights.metadata, metadata)
    return f"{len(expected)} tensors"


def check_untouched(result: Result, progress: Progress) -> str:
    """Every tensor that the conversion leaves alone has SOURCE's bytes.

    Args:
        result: OUT.
        progress: called with the stage `tensors`.
    """
    source, out = result.inputs.source.tensors, result.weights.tensors
    touched: set[str] = set()
    for before, _, _ in result.touched:
        touched.update(before.names)
    names = [name for name in source if name not in touched]
    for number, name in enumerate(names, 1):
        progress("tensors", number, len(names))
        if not _same_bits(out[name], source[name].to(out[name].dtype)):
            raise Failure(f"{name} has other numbers than SOURCE's")
    return f"{len(names)} tensors, bit for bit"


def check_merged(result: Result, progress: Progress) -> str:
    """Every K/V head is what the method makes of its group, as far as that can be said from the
    heads alone; query heads and gates that the method leaves alone are SOURCE's.

    Args:
        result: OUT.
        progress: called with the stage `merged tensors`.
    """
    source, out = result.inputs.source.tensors, result.weights.tensors
    for number, (before, after, free) in enumerate(result.touched, 1):
        progress("merged tensors", number, len(result.touched))
        theirs = before.read(source)
        for role, ours in after.read(out).items():
            if role in free:
                is_right = bool(ours.isfinite().all())
            else:
                is_right = _is_merge(result, theirs[role], ours)
            if not is_right:
                raise Failure(
                    f"{after.names[0]} has {role} heads with NaN, Inf or other numbers than they "
                    "must have"
                )
    how = "finite, and means where they may not be folded" if result.folds else "bit for bit"
    return f"{len(result.touched)} tensors, {how}"


def _is_merge(result: Result, theirs: Tensor, ours: Tensor) -> bool:
    """Whether heads are what the method makes of SOURCE's: bit for bit or, where keys or values are
    means because they may not be folded, the rounded mean.
    """
    copies = max(1, len(ours) // len(theirs))
    groups = theirs.repeat_interleave(copies, 0).unflatten(0, (len(ours), -1))
    size = groups.shape[1]
    if result.method == "first" or size == 1:
        return _same_bits(ours, groups[:, 0].to(ours.dtype))
    if result.folds:
        mean = groups.double().mean(1)
        # with a text, it was rounded to float32 first
        share = 1e-7 if result.inputs.claims.get("calibration") else 1e-12
        rounding = _half_units(mean, ours.dtype) + share * mean.abs()
        return bool(((ours.double() - mean).abs() <= rounding).all())
    if result.method not in PLAIN:
        raise Failure(f"there is no method {result.method!r}")
    # added head by head
    wide = torch.float32 if ours.itemsize == 2 else torch.float64
    total = reduce(torch.add, groups.to(wide).unbind(1))
    return _same_bits(ours, (total / size).to(ours.dtype))


def check_spans(result: Result) -> str:
    """Heads that absorb maps are made of the heads that they must be made of, and of nothing else,
    and are zero only if these are; K/V heads have their size.

    A merged K/V head is a linear map of the rows of its group, with the root mean square of the
    group's heads. A query head, and the columns of the output projection that a query head feeds,
    are linear maps of their own rows and columns. `fit` then trains all of them: heads move away,
    but stay nearest to what they were made from, and columns of the output projection may become
    anything. Where the rows of a group span the whole space, as those of all heads together may,
    only sizes are compared. Distances are those of a few random mixtures of a head's rows.

    Raises:
        Failure: a head is made of others, or has another size.
    """
    worst = [_check_module(result, module) for module in result.merged]
    return f"at most {max(worst):.2g} of a head is not made of the heads that belong to it"


def _check_module(result: Result, module: Module) -> float:
    """The largest share of a head of a module that is not made of what it must be made of."""
    order = result.inputs.claims.get("head_order", {}).get(module.name, [*range(module.before)])
    before, after = zip(*module.tensors, strict=True)
    source, out = result.inputs.source.tensors, result.weights.tensors
    dtype = out[after[0].names[0]].dtype
    is_trained = result.method == FITTED
    share = _TRAINED if is_trained else _EXACT
    worst = 0.0
    for role in sorted(result.free.get(module.name, set()) - {"output_bias"}):
        heads = _joined_heads(role, after, out)
        # source heads by the K/V head that they belong to, in the order in which these were merged
        by_head = _joined_heads(role, before, source).unflatten(0, (len(order), -1))[order]
        made_from = by_head.reshape(len(heads), -1, heads.shape[2])
        rounding = 2 * _half_units(heads, dtype).norm(dim=(1, 2))
        sizes = heads.norm(dim=(1, 2))
        source_sizes = made_from.norm(dim=(1, 2))
        wrong = (sizes == 0) & (source_sizes > 0)
        if role in MERGED:
            wanted = source_sizes * (module.after / module.before) ** 0.5
            larger = sizes - wanted
            wrong |= (larger if is_trained else larger.abs()) > rounding + share * wanted
        if role != "output" or not is_trained:
            distances = _distances(heads, made_from)
            own = distances.diag()
            most = torch.minimum(share * sizes, _NEARER * distances.amin(0))
            wrong |= own > rounding + most
            worst = max(worst, float((own / sizes.clamp(min=1e-30)).max()))
        if wrong.any():
            head = int(wrong.int().argmax())
            raise Failure(
                f"{role} head {head} of {module.name} is not made of the heads that belong to it, "
                "or not alone"
            )
    return worst


def _distances(heads: Tensor, made_from: Tensor) -> Tensor:
    """[n, n]: the distance of the second head [n, c, e] from the span of the rows that the first
    was made from, [n, rows, e].
    """
    count, rows, inputs = heads.shape
    if made_from.shape[1] >= inputs:  # they span the whole space
        return heads.new_zeros(count, count)
    generator = torch.Generator().manual_seed(0)
    random = torch.randn(count, _MIXTURES, rows, generator=generator, dtype=heads.dtype)
    mixtures = (random @ heads).flatten(0, 1)
    inside = (mixtures @ torch.linalg.qr(made_from.mT).Q).square().sum(2)
    squares = (mixtures.square().sum(1) - inside).unflatten(1, (count, -1)).mean(2)
    return squares.clamp(min=0).sqrt()


def _joined_heads(role: Role, held: tuple[HeadTensor, ...], tensors: Tensors) -> Tensor:
    """The heads of a role in a module: those of queries, keys and values [heads, c, e] with their
    biases, or the columns of the output projection that each query head feeds, [heads, c, outputs],
    in float64.

    Args:
        role: query, key, value or output.
        held: the tensors of the module, weights before their biases.
        tensors: of the same checkpoint.
    """
    found = [tensor.read(tensors)[role].double() for tensor in held if role in tensor.counts]
    weights, *biases = found
    return torch.cat([weights, *(bias.unsqueeze(-1) for bias in biases)], -1)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same bytes. NaN equals itself, and -0.0 not 0.0."""
    return bool(torch.equal(_bytes(a), _bytes(b)))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.flatten().contiguous().view(torch.uint8)


def _half_units(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """The most by which numbers change when they are rounded to a type."""
    limits = torch.finfo(dtype)
    exponent = torch.frexp(numbers.double().abs().clamp(min=limits.tiny)).exponent
    return torch.exp2(exponent.double() - 1) * (limits.eps / 2)
