"""The heads of a checkpoint before and after its conversion, and the tensors that hold K/V heads."""

from dataclasses import dataclass, field
from typing import Any, Literal

from gqa_convert.families.family import Family, Modeling
from gqa_convert.verify.layout import Run

AttentionKind = Literal["decoder", "cross", "encoder"]
"""A decoder's self-attention, its attention to an encoder's output, or an encoder's self-attention."""

Route = Literal["native", "own file", "checkpoint's own code"]
"""What loads OUT: stock classes of SOURCE's type, stock classes of another type, a modelling file of this package in
OUT, or code that lies in SOURCE.
"""


@dataclass(frozen=True, slots=True)
class Counts:
    """Heads of every attention module of one kind."""

    heads: int
    """Query heads."""
    before: int
    """K/V heads in SOURCE."""
    after: int
    """K/V heads in OUT."""

    @property
    def size(self) -> int:
        """K/V heads of SOURCE in a group; 0 where OUT repeats heads."""
        return self.before // self.after

    def group(self, number: int) -> range:
        """The K/V heads of SOURCE in a group: neighbours, as every implementation of attention repeats them."""
        return range(number * self.size, (number + 1) * self.size)


@dataclass(frozen=True, slots=True)
class Cut:
    """A tensor of SOURCE that holds K/V heads."""

    attention_kind: AttentionKind
    runs: tuple[Run, ...]
    axis: int = 0
    """The axis along which the heads lie."""


@dataclass(frozen=True, slots=True)
class NormList:
    """Norms that have one tensor per K/V head of SOURCE."""

    attention_kind: AttentionKind
    names: list[str]
    """Tensors in the order of the heads."""


@dataclass
class Geometry:
    """The heads of a checkpoint and of its conversion. An encoder that stays unchanged is not part of it."""

    counts: dict[AttentionKind, Counts]
    modules: dict[str, AttentionKind]
    """Attention modules by the names of their tensors."""
    encoder: bool | None = False
    """Whether an encoder was converted; None if its tensors are the same either way."""
    cuts: dict[str, Cut] = field(default_factory=dict)
    """Tensors of SOURCE with K/V heads."""
    lists: list[NormList] = field(default_factory=list)
    by_layer: dict[int, Counts] = field(default_factory=dict)
    """By a layer's number, where layers may differ; else empty. `counts` then has the largest numbers."""
    form: Modeling | None = None
    """The form that OUT's config has for layers that differ; None where layers may not differ."""

    @property
    def heads(self) -> int:
        """Query heads of the decoder."""
        return self.counts["decoder"].heads

    @property
    def before(self) -> int:
        """K/V heads of the decoder in SOURCE."""
        return self.counts["decoder"].before

    @property
    def after(self) -> int:
        """K/V heads of the decoder in OUT."""
        return self.counts["decoder"].after

    @property
    def every(self) -> list[Counts]:
        """The heads of every kind of attention or, where layers may differ, of every layer in their order."""
        return [self.by_layer[number] for number in sorted(self.by_layer)] or list(self.counts.values())

    @property
    def groups(self) -> int | list[int]:
        """K/V heads of the decoder in OUT: one number, or that of each layer where layers differ."""
        found = [counts.after for counts in self.every] if self.by_layer else [self.after]
        return found if len(set(found)) > 1 else found[0]

    @property
    def changed(self) -> bool:
        """Whether any module has another number of K/V heads in OUT than in SOURCE."""
        return any(counts.before != counts.after for counts in self.every)

    def of(self, name: str, attention_kind: AttentionKind) -> Counts:
        """The heads of the module that a tensor or parameter, or that itself, belongs to."""
        return self.by_layer[layer_number(name)] if self.by_layer else self.counts[attention_kind]

    def change(self) -> str:
        """The K/V heads before and after, as "12 -> 3" or, where layers differ, "12 -> 1 to 4"."""
        if not self.by_layer:
            return f"{self.before} -> {self.after}"
        return f"{_span([counts.before for counts in self.every])} -> {_span([counts.after for counts in self.every])}"

    def describe(self) -> str:
        """Heads and layers in one line."""
        names = {"decoder": "layers", "cross": "layers of cross-attention", "encoder": "layers of the encoder"}
        layers = {kind: sum(1 for one in self.modules.values() if one == kind) for kind in self.counts}
        text = f"{self.heads} query heads, {self.change()} K/V heads in "
        text += ", ".join(f"{layers[kind]} {names[kind]}" for kind in self.counts)
        own = self.counts.get("encoder")
        return f"{text} ({own.before} -> {own.after} of {own.heads})" if own and own.before != self.before else text

    def dropped(self) -> set[str]:
        """Tensors of SOURCE that OUT must not have: norms of K/V heads that it does not have."""
        return {
            name for norms in self.lists for name in norms.names[self.of(norms.names[0], norms.attention_kind).after :]
        }

    def route(self, family: Family) -> Route:
        """What loads OUT.

        A type with a modelling file needs it once the number of its K/V heads differs from SOURCE's. A result of this
        package already has the file.
        """
        if self.by_layer:
            return "own file"
        if family.modeling is None:
            return "native" if family.native else "checkpoint's own code"
        return "own file" if self.changed or family.is_converted else "native"


def _span(numbers: list[int]) -> str:
    return f"{min(numbers)} to {max(numbers)}" if len(set(numbers)) > 1 else str(numbers[0])


def layer_number(name: str) -> int:
    """The number of the layer that a tensor, parameter or module belongs to."""
    return int(next(part for part in name.split(".") if part.isdigit()))


def config_value(config: dict[str, Any], dotted: str) -> Any:
    """The value at a dotted key, or None."""
    value: Any = config
    for key in dotted.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value


def attention_kind_of(name: str, family: Family) -> AttentionKind | None:
    """The kind of attention that a tensor or parameter `module.projection.weight` belongs to; None if to none."""
    parts = name.split(".")
    for end in range(len(parts) - 1, 0, -1):
        kind = module_kind(".".join(parts[:end]), family)
        if kind is not None:
            return kind
    return None


def module_kind(module: str, family: Family) -> AttentionKind | None:
    """The kind of an attention module; None if a module of this name is not one."""
    attention = next((name for name in family.attention if f".{module}".endswith(f".{name}")), None)
    if attention is None or not family.owns(module):
        return None
    if family.encoder in module.split("."):
        return "encoder"
    return "cross" if attention in family.cross_attention else "decoder"
