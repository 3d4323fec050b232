"""What `factor` promises without a text, checked on the weights of SOURCE and OUT alone: no shared head could lose less.

Values and outputs, and queries and keys, act through products: an output's columns with a value's rows, a query's rows with
a key's. A map that is folded from one factor into the other does not change them. With rotary positions the scores at all
distances are compared at once: a pair of rows that rotates with frequency f contributes Re(e^(i f t) (q x)* (k y)) at
distance t, and the products conj(q) k of different frequencies do not mix.

Shape legend: K source K/V heads, m of them in a group, r query heads per K/V head, c head_dim of keys, w of values, D outputs
of the module, e inputs of a projection plus one that is always 1 and whose weights are the bias, n numbers on a factor's free
side.
"""

import math
from dataclasses import dataclass

import torch

from gqa_convert.verify.geometry import Module, Role, heads_in
from gqa_convert.verify.report import Failure
from gqa_convert.verify.weights import Weights

SLACK = 3.0
"""The tolerance as a multiple of the error that rounding is expected to make."""
_EXACT = 1e-7
"""The relative error allowed for sums in float64."""


@dataclass(frozen=True)
class Heads:
    """The heads of an attention module in float64. Queries and outputs are sorted by their K/V head."""

    queries: torch.Tensor
    """[K, r, c, e]."""
    keys: torch.Tensor
    """[K, c, e]."""
    values: torch.Tensor
    """[K, w, e]."""
    outputs: torch.Tensor
    """[K, r, D, w]: columns of the output projection."""
    eps: float
    """Distance of 1 to the next number of the checkpoint's type."""
    tiny: float
    """The smallest number of full precision in that type."""

    def ordered(self, order: list[int]) -> "Heads":
        """These heads with K/V heads, and the queries and outputs that belong to them, in another order."""
        each = self.queries[order], self.keys[order], self.values[order], self.outputs[order]
        return Heads(*each, self.eps, self.tiny)


def read_heads(weights: Weights, module: Module, kv_heads: int, *, converted: bool) -> Heads:
    """A module's heads.

    Args:
        weights: SOURCE's or OUT's tensors.
        module: the module.
        kv_heads: SOURCE's number of K/V heads. Where there are fewer, each is repeated.
        converted: whether the tensors are OUT's.
    """
    found: dict[tuple[Role, bool], torch.Tensor] = {}
    eps = tiny = 0.0
    for tensor in module.tensors:
        names = tensor.names[: module.after] if converted and len(tensor.names) > 1 else tensor.names
        if len(names) > 1 or "key_norm" in tensor.before:
            continue
        stored = weights.read(names[0])
        limits = torch.finfo(stored.dtype)
        eps, tiny = max(eps, limits.eps), max(tiny, limits.tiny)
        for role, rows in (tensor.after if converted else tensor.before).items():
            found[role, names[0].endswith(".bias")] = heads_in(tensor.upright(stored), rows).double()
    joined: dict[Role, torch.Tensor] = {}
    for role in ("query", "key", "value"):
        matrix = found[role, False]
        bias = found.get((role, True), matrix.new_zeros(matrix.shape[:2]))
        joined[role] = torch.cat([matrix, bias[:, :, None]], 2)
    times = kv_heads // len(joined["key"])
    return Heads(
        joined["query"].unflatten(0, (kv_heads, -1)),
        joined["key"].repeat_interleave(times, 0),
        joined["value"].repeat_interleave(times, 0),
        found["output", False].mT.unflatten(0, (kv_heads, -1)),
        eps,
        tiny,
    )


@dataclass(frozen=True)
class Products:
    """The products left @ right of every K/V head."""

    left: torch.Tensor
    """[..., K, n, c]."""
    right: torch.Tensor
    """[..., K, c, e]."""
    heads: Heads
    """Whose they are."""

    def part(self, group: slice) -> "Products":
        """The products of some K/V heads."""
        return Products(self.left[..., group, :, :], self.right[..., group, :, :], self.heads)

    def noise(self) -> torch.Tensor:
        """The squared error that rounding may have made in the products, [..., K]."""
        rows = self.right.abs().clamp(min=self.heads.tiny).square().sum(-1)
        columns = self.left.abs().clamp(min=self.heads.tiny).square().sum(-2)
        return 2 * (self.heads.eps / 2) ** 2 * (rows * columns).sum(-1)


def value_products(heads: Heads) -> Products:
    """The contribution of each K/V head to the output through its query heads, [K, r D, w] x [K, w, e]."""
    return Products(heads.outputs.flatten(1, 2), heads.values, heads)


def score_products(heads: Heads, pairs: tuple[list[int], list[int]]) -> list[Products]:
    """The scores of rotary rows, [f, K, r e, 1] x [f, K, 1, e] and complex, and those of the other rows."""
    real, imaginary = pairs
    found = []
    if real:
        queries = torch.complex(heads.queries[:, :, real], -heads.queries[:, :, imaginary])  # conjugated
        keys = torch.complex(heads.keys[:, real], heads.keys[:, imaginary])
        left = queries.permute(2, 0, 1, 3).flatten(2)[..., None]
        found.append(Products(left, keys.transpose(0, 1)[:, :, None], heads))
    rest = sorted(set(range(heads.keys.shape[1])) - {*real, *imaginary})
    if rest:
        queries = heads.queries[:, :, rest].permute(0, 1, 3, 2).flatten(1, 2)
        found.append(Products(queries, heads.keys[:, rest], heads))
    return found


def _inner(a: Products, b: Products) -> torch.Tensor:
    """The inner product of two products of one shape, head by head, without computing either: [..., K]."""
    between, across = a.left.mH @ b.left, b.right @ a.right.mH
    return (between * across.mT).sum((-2, -1)).real


@dataclass(frozen=True)
class Loss:
    """A squared distance of products."""

    lost: float
    """|source - merged|^2."""
    total: float
    """|source|^2."""
    noise: float
    """The part of `lost` that rounding may have made."""

    @property
    def error(self) -> float:
        """|source - merged| / |source|."""
        return math.sqrt(max(self.lost, 0.0) / self.total) if self.total else 0.0

    @property
    def allowance(self) -> float:
        """How far rounding may have moved the distance |source - merged|."""
        return SLACK * math.sqrt(self.noise) + _EXACT * math.sqrt(self.total)


def loss_between(source: list[Products], merged: list[Products]) -> Loss:
    """The loss over all products. In the mean over all distances a rotary pair has half of its product's square."""
    lost = total = noise = 0.0
    for old, new in zip(source, merged, strict=True):
        weight = 0.5 if old.right.is_complex() else 1.0
        norm = float(_inner(old, old).sum())
        lost += weight * (norm + float((_inner(new, new) - 2 * _inner(old, new)).sum()))
        total += weight * norm
        noise += weight * float(new.noise().sum())
    return Loss(lost, total, noise)


def check_optimum(
    source: Heads, merged: Heads, groups: int, pairs: tuple[list[int], list[int]], free: frozenset[Role]
) -> None:
    """Every group's keys and values are the best that one head of this head_dim can be, up to rounding.

    The criterion for scores is their own error. The criterion for values ignores how strongly the output reads them: the
    rows of the shared head span the leading right singular vectors of all heads stacked (Eckart and Young 1936), and the
    output is that of the heads projected on them.

    Args:
        source: SOURCE's heads in the order in which they were merged.
        merged: OUT's heads, each repeated for its group.
        groups: OUT's number of K/V heads.
        pairs: the rotary pairs.
        free: the roles of whose heads the method may make anything.

    Raises:
        Failure: a group could lose less.
    """
    size = len(source.keys) // groups
    for number in range(groups):
        own = slice(number * size, (number + 1) * size)
        if "value" in free:
            _check_values(number, value_products(source).part(own), value_products(merged).part(own))
        if "key" in free:
            for old, new in zip(score_products(source, pairs), score_products(merged, pairs), strict=True):
                _check_keys(number, old.part(own), new.part(own))


def _check_keys(number: int, source: Products, merged: Products) -> None:
    values, vectors = torch.linalg.eigh(source.left.mH @ source.left)
    roots = values.clamp(min=0).sqrt()[..., :, None] * vectors.mH  # R with R^H R = left^H left, [..., m, c, c]
    best = math.sqrt(float(_dropped(roots.to(source.right.dtype) @ source.right).sum()))
    loss = loss_between([source], [merged])
    weight = 0.5 if source.right.is_complex() else 1.0
    found = math.sqrt(max(loss.lost, 0.0) / weight)
    if not found <= best + loss.allowance / math.sqrt(weight):
        whole = math.sqrt(loss.total / weight) or 1.0
        raise Failure(
            f"keys of group {number} lose {found / whole:.4f} of the scores, the least possible is {best / whole:.4f}"
        )


def _check_values(number: int, source: Products, merged: Products) -> None:
    heads, shared = source.right, merged.right[0]
    total = float(heads.square().sum())
    basis = torch.linalg.qr(shared.T).Q  # [e, w]
    seen = heads @ basis  # [m, w, w]
    lost, best = total - float(seen.square().sum()), float(_dropped(heads).sum())
    limits = merged.heads
    roundings = (limits.eps / 2) ** 2 * shared.abs().clamp(min=limits.tiny).square().sum(1)
    off = float((roundings / shared.square().sum(1).clamp(min=1e-300)).max())
    if not lost <= best + (SLACK**2 * off + 1e-10) * total:
        share, least = (math.sqrt(max(each, 0.0) / (total or 1.0)) for each in (lost, best))
        raise Failure(f"values of group {number} lose {share:.4f} of their heads, the least possible is {least:.4f}")
    loss = loss_between([Products(source.left, seen @ basis.T, source.heads)], [merged])
    if not math.sqrt(max(loss.lost, 0.0)) <= loss.allowance:
        raise Failure(
            f"outputs of group {number} are not those of its heads projected on the shared head (off by {loss.error:.2g})"
        )


def _dropped(heads: torch.Tensor) -> torch.Tensor:
    """The least squared error of one head of c rows that replaces heads [..., m, c, e]: [...]."""
    stacked = heads.flatten(-3, -2)
    squares = torch.linalg.eigvalsh(stacked @ stacked.mH).clamp(min=0)
    return squares[..., : -heads.shape[-2]].sum(-1)
