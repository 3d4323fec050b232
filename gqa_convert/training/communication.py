"""Counts the collectives of a training step and their bytes, from the shapes of parameters and the layout alone."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from gqa_convert.checkpoint.results import Result
from gqa_convert.training.adafactor import LEAST_FACTORED
from gqa_convert.training.sharding import Layout

Shapes = Mapping[str, Sequence[int]]
"""The shapes of parameters by name."""

_FIRST_BUCKET, _BUCKET = 1 << 20, 25 << 20
"""The bytes of DDP's buckets, the first of which is smaller."""
_WAIT = 2
"""Numbers that the processes sum before each step: labels, and requests to stop."""
_PARTS = 3
"""Numbers that they sum after each step, and two for each source of text: the parts of the loss."""


@dataclass(frozen=True, slots=True)
class Collective(Result):
    """The collectives of one kind in a step.

    Attributes:
        kind: all-gather, reduce-scatter or all-reduce.
        of: what they carry.
        processes: how many processes take part in each.
        count: their number.
        bytes: of the whole tensors, all together.
    """

    kind: str
    of: str
    processes: int
    count: int
    bytes: int

    @property
    def sent(self) -> int:
        """The bytes that each process sends, in a ring."""
        ways = 2 if self.kind == "all-reduce" else 1
        return round(ways * self.bytes * (self.processes - 1) / self.processes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What the collectives of a step depend on.

    Attributes:
        layout: how the processes share the model.
        shapes: those of the student's parameters.
        trained: the names of the trained ones.
        outer: the names of those outside the layers.
        layers: how many layers the student has.
        micro_batches: how many a process has in a step.
        bf16: whether the student computes in bfloat16.
        optimizer: the recipe's `optimizer`.
        sources: how many sources of text there are.
        teacher_shapes: those of the teacher's parameters; empty without one.
        teacher_layers: how many layers the teacher has.
        teacher_bytes: bytes per parameter of the teacher.
    """

    layout: Layout
    shapes: Shapes
    trained: frozenset[str]
    outer: frozenset[str]
    layers: int
    micro_batches: int
    bf16: bool
    optimizer: str = "adamw"
    sources: int = 1
    teacher_shapes: Shapes
    teacher_layers: int = 0
    teacher_bytes: int = 2


def outer_names(shapes: Shapes) -> frozenset[str]:
    """The names of the parameters outside the layers; every other name has the number of its layer."""
    return frozenset(name for name in shapes if not any(part.isdigit() for part in name.split(".")))


def collectives(traffic: Traffic) -> list[Collective]:
    """The collectives of a step after the first."""
    layout = traffic.layout
    if layout.processes == 1:
        return []
    numbers = _WAIT + _PARTS + 2 * traffic.sources
    scalars = Collective("all-reduce", "counts and losses", layout.processes, 2, 8 * numbers)
    trained = {name: shape for name, shape in traffic.shapes.items() if name in traffic.trained}
    if not layout.sharded:
        sizes = [4 * prod(shape) for shape in trained.values()]
        gradients = Collective("all-reduce", "gradients", layout.processes, _buckets(reversed(sizes)), sum(sizes))
        return [gradients, scalars]
    found = [*_of_shards(traffic, trained), *_of_optimizer(traffic, trained)]
    norm = Collective("all-reduce", "norms of gradients", layout.shards, 1, 4 * len(trained))
    return [*found, norm, scalars]


def _of_shards(traffic: Traffic, trained: Shapes) -> list[Collective]:
    """The collectives of FSDP2. Layers are gathered for the forward and again for the backward pass, the parameters
    outside them once; every process reduces gradients in float32 after each micro-batch, and the copies once per step.
    """
    shards, times = traffic.layout.shards, traffic.micro_batches
    size = 2 if traffic.bf16 else 4
    whole, outer = (
        _padded(traffic.shapes.values(), shards),
        _padded((traffic.shapes[name] for name in traffic.outer), shards),
    )
    groups = traffic.layers + bool(traffic.outer & traffic.trained)
    gradients = 4 * _padded(trained.values(), shards)
    found = [
        Collective(
            "all-gather", "weights", shards, times * (2 * traffic.layers + 1), times * size * (2 * whole - outer)
        ),
        Collective("reduce-scatter", "gradients", shards, times * groups, times * gradients),
    ]
    if traffic.layout.copies > 1:
        found.append(Collective("all-reduce", "gradients", traffic.layout.copies, groups, gradients // shards))
    if traffic.teacher_shapes:
        teacher = times * traffic.teacher_bytes * _padded(traffic.teacher_shapes.values(), shards)
        found.append(
            Collective("all-gather", "weights of the teacher", shards, times * (traffic.teacher_layers + 1), teacher)
        )
    return found


def _of_optimizer(traffic: Traffic, trained: Shapes) -> list[Collective]:
    shards = traffic.layout.shards
    if traffic.optimizer == "adafactor":
        columns = sum(1 + shape[1] for shape in trained.values() if len(shape) == 2 and min(shape) >= LEAST_FACTORED)
        return [Collective("all-reduce", "sums of Adafactor", shards, 2, 4 * (2 * len(trained) + columns))]
    return []


def _padded(shapes: Iterable[Sequence[int]], shards: int) -> int:
    """The elements of tensors whose first dimensions are padded to a multiple of the shards."""
    return sum(-(-shape[0] // shards) * shards * prod(shape[1:]) if shape else shards for shape in shapes)


def _buckets(sizes: Iterable[int]) -> int:
    """How many buckets DDP fills with gradients of these bytes, each of which stays in one piece."""
    count, filled, limit = 0, 0, _FIRST_BUCKET
    for size in sizes:
        filled += size
        if filled >= limit:
            count, filled, limit = count + 1, 0, _BUCKET
    return count + bool(filled)
