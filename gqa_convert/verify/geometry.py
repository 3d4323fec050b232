"""Where the heads of a checkpoint lie, before and after its conversion, read from the shapes of both.

The converter reads the same facts from configs with different code; the agreement of the two is part of the proof. The
numbers of heads come from shapes: a head of values is as wide as the output projection's input divided by the query heads,
which no conversion changes. The same functions read the parameters of loaded models.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from gqa_convert.errors import ConfigError
from gqa_convert.families.family import Family
from gqa_convert.verify.report import Failure

Kind = Literal["decoder", "cross", "encoder"]
Role = Literal["query", "gate", "key", "value", "key_norm", "output", "output_bias"]
"""What rows hold. The bias of the output belongs to no head and counts as one."""
MERGED: tuple[Role, ...] = ("key", "value", "key_norm")
"""The roles whose heads a conversion merges."""
Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]
Tensors = Mapping[str, Tensor]
Heads = dict[Role, Tensor]
"""By role, the heads [heads, width, ...], or the numbers of their rows [heads, width]."""
Counts = dict[Role, int]
"""By role, the number of heads, in the order in which they lie."""


@dataclass(frozen=True)
class HeadTensor:
    """A tensor that holds heads, or the norms of all K/V heads where each has a tensor of its own."""

    names: tuple[str, ...]
    """One name, or one for each K/V head of SOURCE."""
    names_after: tuple[str, ...]
    """Those that OUT has."""
    axis: int
    """Along which the heads lie."""
    before: Heads
    after: Heads
    """The numbers of the rows of heads."""

    def shape_after(self, shape: Shape) -> Shape:
        """The shape in OUT of a tensor that has `shape` in SOURCE."""
        if len(self.names) > 1:
            return shape
        return *shape[: self.axis], sum(rows.numel() for rows in self.after.values()), *shape[self.axis + 1 :]

    def read(self, tensors: Tensors, *, converted: bool) -> Heads:
        """The heads in SOURCE's tensors, or in OUT's: views where they follow one another."""
        names, rows = (self.names_after, self.after) if converted else (self.names, self.before)
        upright = _joined(tensors, names).movedim(self.axis, 0)
        return {role: _heads_in(upright, each) for role, each in rows.items()}

    def replace(self, tensors: Tensors, heads: Heads) -> dict[str, Tensor]:
        """Copies of SOURCE's tensors with other heads of some roles; none where there are no heads."""
        if not heads:
            return {}
        whole = _joined(tensors, self.names).clone()
        for role, each in heads.items():
            whole.movedim(self.axis, 0)[self.before[role]] = each.to(whole.dtype)
        return dict(zip(self.names, whole.chunk(len(self.names)), strict=True))


def _joined(tensors: Tensors, names: tuple[str, ...]) -> Tensor:
    found = [tensors[name].detach() for name in names]
    return found[0] if len(found) == 1 else torch.cat(found)


def _heads_in(upright: Tensor, rows: Tensor) -> Tensor:
    first, count = int(rows[0, 0]), rows.numel()
    if torch.equal(rows.flatten(), torch.arange(first, first + count)):
        return upright[first : first + count].unflatten(0, tuple(rows.shape))
    return upright[rows]


@dataclass(frozen=True)
class Module:
    """An attention module."""

    name: str
    kind: Kind
    heads: int
    """Query heads."""
    before: int
    """K/V heads in SOURCE."""
    after: int
    """K/V heads in OUT."""
    tensors: list[HeadTensor]

    @property
    def number(self) -> int:
        """The number of its layer."""
        return int(next(part for part in self.name.split(".") if part.isdigit()))


@dataclass(frozen=True)
class Geometry:
    """The attention modules of a checkpoint whose heads the conversion may have merged."""

    modules: list[Module]
    encoder: bool | None
    """Whether an encoder was converted; None if its tensors are the same either way."""

    @property
    def decoder(self) -> list[Module]:
        """The modules of the decoder's self-attention, in the order of the layers."""
        return sorted((module for module in self.modules if module.kind == "decoder"), key=lambda module: module.number)

    @property
    def heads(self) -> int:
        """Query heads of the decoder."""
        return self.decoder[0].heads

    @property
    def counts(self) -> list[int]:
        """K/V heads of OUT in each layer of the decoder."""
        return [module.after for module in self.decoder]

    @property
    def groups(self) -> int | list[int]:
        """The same: one number where all layers have it."""
        return self.counts if len(set(self.counts)) > 1 else self.counts[0]

    @property
    def changed(self) -> list[Module]:
        """The modules with another number of K/V heads in OUT than in SOURCE."""
        return [module for module in self.modules if module.before != module.after]

    @property
    def merged(self) -> list[Module]:
        """The modules with fewer K/V heads in OUT than in SOURCE."""
        return [module for module in self.modules if module.after < module.before]

    def change(self) -> str:
        """The K/V heads before and after, as "12 -> 3" or, where layers differ, "12 -> 1 to 4"."""
        return f"{span_of([module.before for module in self.decoder])} -> {span_of(self.counts)}"

    def describe(self) -> str:
        """Heads and layers in one line."""
        kinds = Counter(module.kind for module in self.modules)
        modules = ", ".join(f"{count} modules of {kind} attention" for kind, count in kinds.items())
        return f"{self.heads} query heads, {self.change()} K/V heads in {modules}"


def span_of(counts: list[int]) -> str:
    """Numbers as "3" or, where they differ, "1 to 4"."""
    return f"{min(counts)} to {max(counts)}" if len(set(counts)) > 1 else str(counts[0])


def read_geometry(family: Family, config: dict[str, Any], source: Shapes, out: Shapes, *, may_differ: bool) -> Geometry:
    """The heads of SOURCE and OUT.

    Args:
        family: SOURCE's family.
        config: of SOURCE's decoder.
        source: the shapes of SOURCE's tensors, or of its model's parameters.
        out: the same of OUT.
        may_differ: whether the layers of OUT may differ in their numbers of K/V heads.

    Raises:
        ConfigError: SOURCE contradicts itself.
        Failure: OUT's numbers of K/V heads cannot be determined, or do not fit SOURCE's.
    """
    found = _find_modules(family, source)
    modules = [_read_module(name, kind, family, config, source, out) for name, kind in found.items()]
    decoder = [module for module in modules if module.kind == "decoder"]
    if not decoder:
        raise ConfigError(
            f"SOURCE is not a {family.model_type} checkpoint: it has no attention modules, check its config"
        )
    groups = decoder[0].after
    others = [module for module in decoder if module.after != groups]
    if others and not may_differ:
        raise Failure(
            f"{others[0].name} has {others[0].after} K/V heads, but {decoder[0].name} has {groups}: all layers "
            f"of this {family.model_type} have one number"
        )
    encoder = _encoder_converted([module for module in modules if module.kind == "encoder"], groups)
    return Geometry([module for module in modules if module.kind != "encoder" or encoder], encoder)


def _encoder_converted(modules: list[Module], groups: int) -> bool | None:
    """Whether the modules of an encoder, if there are any, were converted; None if that is open."""
    if not modules:
        return False
    before, after = modules[0].before, modules[0].after
    for module in modules:
        if module.after != after or after not in (before, groups):
            raise Failure(
                f"{module.name} has {module.after} K/V heads ({before} in SOURCE), but the decoder has {groups}"
            )
    if before != after:
        return True
    return None if before == groups else False


def _find_modules(family: Family, source: Shapes) -> dict[str, Kind]:
    """The attention modules among the names of tensors, in their order, each with its kind."""
    projections = (family.fused,) if family.fused else (family.key, family.value)
    found: dict[str, Kind] = {}
    for name in source:
        module, _, tensor = name.rpartition(".")
        module, _, projection = module.rpartition(".")
        attention = [end for end in family.attention if f".{module}".endswith(f".{end}")]
        if tensor != "weight" or projection not in projections or not attention or not family.owns(module):
            continue
        found[module] = "cross" if attention[0] in family.cross_attention else "decoder"
        if family.encoder in module.split("."):
            found[module] = "encoder"
    return found


def config_value(config: dict[str, Any], dotted: str) -> Any:
    """The value at a dotted key, or None."""
    value: Any = config
    for key in dotted.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _read_module(name: str, kind: Kind, family: Family, config: dict[str, Any], source: Shapes, out: Shapes) -> Module:
    key = (family.encoder_heads_key or family.heads_key) if kind == "encoder" else family.heads_key
    heads = config_value(config, key) or config["num_attention_heads"]
    projection = f"{name}.{family.fused or family.value}.weight"
    if projection not in source:
        projection = f"{name}.{family.key}.weight"  # keys that serve as values too
    width = source[f"{name}.{family.output}.weight"][0 if family.transposed else 1] // heads
    queries = heads * width if family.fused and kind != "cross" else 0
    of_both = 2 * width if family.fused else width

    def count(shape: Shape) -> int:
        """The K/V heads in the projection; 0 where it does not consist of heads."""
        heads, rest = divmod(shape[-1 if family.transposed else 0] - queries, of_both)
        return 0 if rest else max(heads, 0)

    shapes = source[projection], out.get(projection, (0, 0))
    before, after = map(count, shapes)
    if not before or heads % before:
        raise ConfigError(
            f"{projection} of SOURCE has shape {list(shapes[0])}, which does not suit {heads} query heads of {width} rows: "
            "copy SOURCE again, or repair its config"
        )
    if not after or (before % after and (after % before or heads % after)):
        raise Failure(
            f"{projection} is {list(shapes[1])} in OUT and {list(shapes[0])} in SOURCE: {before} K/V heads cannot be "
            "grouped or repeated to that shape"
        )
    return Module(name, kind, heads, before, after, _head_tensors(name, kind, family, heads, before, after, source))


def _head_tensors(
    module: str, kind: Kind, family: Family, heads: int, before: int, after: int, source: Shapes
) -> list[HeadTensor]:
    """The tensors of a module that hold heads. In OUT, what is merged lies in one block."""
    queries: Counts = {"query": heads}
    parts: dict[str, Counts] = {family.key: {"key": before}, family.value: {"value": before}}
    blocks = {family.query: heads}  # a head's gate follows its queries
    if family.fused:
        parts = {family.fused: {"key": before, "value": before}}
    if family.fused and kind != "cross":
        parts[family.fused] = queries | parts[family.fused]
        blocks[family.fused] = before if family.fused_layout == "grouped" else 1
    else:
        parts[family.query] = queries | ({"gate": heads} if family.query_outputs > 1 else {})
    if family.key_norm in ("full", "per_head", "per_head_list"):
        parts[family.key_norm_name] = {"key_norm": before}
    parts[family.output] = {"output": heads}
    found = []
    for ending in ("weight", "bias"):
        for part, counts in parts.items():
            names = [f"{module}.{part}.{ending}"]
            if part == family.key_norm_name and family.key_norm == "per_head_list":
                names = [f"{module}.{part}.{head}.{ending}" for head in range(before)]
            if names[0] not in source:
                continue
            if part == family.output and ending == "bias":
                counts = {"output_bias": 1}
            shape = source[names[0]]
            axis = int(len(shape) == 2 and family.transposed != (part == family.output))
            rows = rows_after = _rows(counts, blocks.get(part, 1), len(names) * shape[axis])
            if before != after and any(role in MERGED for role in counts):
                width = next(iter(rows.values())).shape[1]
                counts = {role: after if role in MERGED else count for role, count in counts.items()}
                rows_after = _rows(counts, 1, sum(counts.values()) * width)
            names_after = names[:after] if len(names) > 1 else names
            found.append(HeadTensor(tuple(names), tuple(names_after), axis, rows, rows_after))
    return found


def _rows(counts: Counts, blocks: int, length: int) -> Heads:
    """The rows of heads that lie in equal blocks, each of which holds a share of every role's heads, role after role.

    The rows are derived as the models derive them: by reshaping a row of numbers.

    Raises:
        ConfigError: the rows are not those of so many heads.
    """
    total = sum(counts.values())
    if length % total:
        raise ConfigError(f"a tensor of SOURCE has {length} rows for {total} heads: repair its config")
    shares = [count // blocks for count in counts.values()]
    parts = torch.arange(length).reshape(blocks, sum(shares), -1).split(shares, 1)
    return {role: part.flatten(0, 1) for role, part in zip(counts, parts, strict=True)}
