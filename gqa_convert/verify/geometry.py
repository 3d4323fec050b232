"""Where the heads of a checkpoint lie, before and after its conversion, read from the shapes of both.

The converter reads the same facts from configs with different code; the agreement of the two is part of the proof. The
numbers of heads come from shapes: a head of values is as wide as the output projection's input divided by the query heads,
which no conversion changes. The same functions read the parameters of loaded models.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from gqa_convert.errors import ConfigError
from gqa_convert.families.family import Family
from gqa_convert.verify.report import Failure

Kind = Literal["decoder", "cross", "encoder"]
Role = Literal["query", "gate", "key", "value", "key_norm", "output"]
MERGED: tuple[Role, ...] = ("key", "value", "key_norm")
"""The roles whose heads a conversion merges."""
Shapes = Mapping[str, tuple[int, ...]]
Rows = dict[Role, torch.Tensor]
"""By role, the numbers of the rows of each head: [heads, width]."""


@dataclass(frozen=True)
class HeadTensor:
    """A tensor that holds heads, or the norms of all K/V heads where each has a tensor of its own."""

    names: tuple[str, ...]
    """One name, or one for each K/V head of SOURCE."""
    transposed: bool
    """Whether the heads lie along the second axis."""
    before: Rows
    after: Rows

    def shape_after(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape in OUT of a tensor that has `shape` in SOURCE."""
        if len(self.names) > 1:
            return shape
        length = sum(rows.numel() for rows in self.after.values())
        return (shape[0], length) if self.transposed else (length, *shape[1:])

    def upright(self, tensor: torch.Tensor) -> torch.Tensor:
        """A view of the tensor in which heads lie along the first axis."""
        return tensor.T if self.transposed else tensor


def heads_in(tensor: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """The heads [heads, width, ...] in an upright tensor [rows, ...]: a view where they follow one another."""
    first, count = int(rows[0, 0]), rows.numel()
    if torch.equal(rows.reshape(-1), torch.arange(first, first + count)):
        return tensor[first : first + count].unflatten(0, tuple(rows.shape))
    return tensor[rows]


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
    tensors: tuple[HeadTensor, ...]

    @property
    def number(self) -> int:
        """The number of its layer."""
        return int(next(part for part in self.name.split(".") if part.isdigit()))


@dataclass(frozen=True)
class Geometry:
    """The attention modules of a checkpoint whose heads the conversion may have merged."""

    modules: tuple[Module, ...]
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
    def before(self) -> int:
        """The most K/V heads in a layer of SOURCE's decoder."""
        return max(module.before for module in self.decoder)

    @property
    def changed(self) -> list[Module]:
        """The modules with another number of K/V heads in OUT than in SOURCE."""
        return [module for module in self.modules if module.before != module.after]

    def change(self) -> str:
        """The K/V heads before and after, as "12 -> 3" or, where layers differ, "12 -> 1 to 4"."""
        before, after = [module.before for module in self.decoder], self.counts
        return " -> ".join(
            f"{min(each)} to {max(each)}" if len(set(each)) > 1 else str(each[0]) for each in (before, after)
        )

    def describe(self) -> str:
        """Heads and layers in one line."""
        names = {"decoder": "layers", "cross": "layers of cross-attention", "encoder": "layers of the encoder"}
        kinds = [module.kind for module in self.modules]
        layers = ", ".join(f"{kinds.count(kind)} {name}" for kind, name in names.items() if kind in kinds)
        return f"{self.heads} query heads, {self.change()} K/V heads in {layers}"


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
    modules = [
        _read_module(name, kind, family, config, source, out) for name, kind in find_modules(family, source).items()
    ]
    decoder = [module for module in modules if module.kind == "decoder"]
    if not decoder:
        raise ConfigError(
            f"SOURCE is not a {family.model_type} checkpoint: it has no attention modules, check its config"
        )
    others = [module for module in decoder if module.after != decoder[0].after]
    if others and not may_differ:
        raise Failure(
            f"{others[0].name} has {others[0].after} K/V heads, but {decoder[0].name} has {decoder[0].after}: all layers "
            f"of this {family.model_type} have one number"
        )
    inside = [module for module in modules if module.kind == "encoder"]
    encoder = _encoder_converted(inside, decoder[0].after) if inside else False
    kept = [module for module in modules if module.kind != "encoder" or encoder]
    return Geometry(tuple(kept), encoder)


def find_modules(family: Family, source: Shapes) -> dict[str, Kind]:
    """The attention modules among the names of tensors, in their order, each with its kind."""
    projections = (family.fused,) if family.fused else (family.key, family.value)
    found: dict[str, Kind] = {}
    for name in source:
        stem, _, kind_of_tensor = name.rpartition(".")
        module, _, projection = stem.rpartition(".")
        attention = [end for end in family.attention if f".{module}".endswith(f".{end}")]
        if kind_of_tensor != "weight" or projection not in projections or not attention or not family.owns(module):
            continue
        if family.encoder in module.split("."):
            found[module] = "encoder"
        else:
            found[module] = "cross" if attention[0] in family.cross_attention else "decoder"
    return found


def config_value(config: dict[str, Any], dotted: str) -> Any:
    """The value at a dotted key, or None."""
    value: Any = config
    for key in dotted.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _read_module(name: str, kind: Kind, family: Family, config: dict[str, Any], source: Shapes, out: Shapes) -> Module:
    key = (family.encoder_heads_key or family.heads_key) if kind == "encoder" else family.heads_key
    heads = config_value(config, key) or config.get("num_attention_heads")
    output = f"{name}.{family.output}.weight"
    if type(heads) is not int or heads < 1 or len(source.get(output, ())) != 2:
        raise ConfigError(
            f"SOURCE has {heads!r} query heads and no matrix {output}: copy it again, or repair its config"
        )
    width = source[output][0 if family.transposed else 1] // heads
    projection = f"{name}.{family.fused or family.value}.weight"
    if projection not in source:
        projection = f"{name}.{family.key}.weight"  # keys that serve as values too
    if projection not in out:
        raise Failure(f"{projection} is missing, from which OUT's number of K/V heads follows")
    queries = heads if family.fused and kind != "cross" else 0
    parts = 2 if family.fused else 1
    before, after = (_count(shapes[projection], family.transposed, queries, parts, width) for shapes in (source, out))
    if before is None or heads % before:
        raise ConfigError(
            f"{projection} of SOURCE has shape {list(source[projection])}, which are no heads of {width} rows"
        )
    if after is None or (before % after and (after % before or heads % after)):
        raise Failure(
            f"{projection} is {list(out[projection])} in OUT and {list(source[projection])} in SOURCE: {before} K/V heads "
            "cannot be grouped or repeated to that shape"
        )
    return Module(
        name, kind, heads, before, after, tuple(_head_tensors(name, kind, family, heads, before, after, source))
    )


def _count(shape: tuple[int, ...], transposed: bool, queries: int, parts: int, width: int) -> int | None:
    """The K/V heads in a projection that holds `queries` heads of queries and `parts` times K/V heads."""
    rows = (shape[-1] if transposed else shape[0]) if shape else 0
    heads, rest = divmod(rows, width) if width else (0, 1)
    count, odd = divmod(heads - queries, parts)
    return count if not rest and not odd and count > 0 else None


def _encoder_converted(modules: list[Module], groups: int) -> bool | None:
    """Whether the modules of an encoder were converted; None if that is open."""
    before, after = modules[0].before, modules[0].after
    strange = [module for module in modules if module.after not in (module.before, groups)]
    if strange or any(module.after != after for module in modules):
        other = (strange or modules)[0]
        raise Failure(f"{other.name} has {other.after} K/V heads ({before} in SOURCE), but the decoder has {groups}")
    if after == before:
        return None if before == groups else False
    return True


def _head_tensors(
    module: str, kind: Kind, family: Family, heads: int, before: int, after: int, source: Shapes
) -> list[HeadTensor]:
    """The tensors of a module that hold heads."""
    found: list[HeadTensor] = []

    def add(part: str, rows_of: Callable[[int, int], Rows], across: bool) -> None:
        """Add the weight and bias of a projection. `rows_of` has the rows for a number of K/V heads and a length."""
        for name in (f"{module}.{part}.weight", f"{module}.{part}.bias"):
            if name in source:
                transposed = across and len(source[name]) == 2
                length = source[name][-1 if transposed else 0]
                rows = rows_of(before, length)
                if before != after:
                    found.append(HeadTensor((name,), transposed, rows, _joined(rows, after)))
                else:
                    found.append(HeadTensor((name,), transposed, rows, rows))

    def separate(role: Role, count: int) -> Callable[[int, int], Rows]:
        return lambda _, length: {role: _split(length, count, module)}

    def queries(_: int, length: int) -> Rows:
        rows = _split(length, heads, module)
        width = rows.shape[1] // family.query_outputs  # the gates of a head follow its queries
        own: Rows = {"query": rows[:, :width]}
        if family.query_outputs > 1:
            own["gate"] = rows[:, width:]
        return own

    if family.fused:
        own = 0 if kind == "cross" else heads
        add(
            family.fused,
            lambda count, length: _fused(family.fused_layout, own, count, length, module),
            family.transposed,
        )
    else:
        add(family.key, separate("key", before), family.transposed)
        add(family.value, separate("value", before), family.transposed)
    if not family.fused or kind == "cross":
        add(family.query, queries, family.transposed)
    if f"{module}.{family.output}.weight" in source:
        rows = _split(source[f"{module}.{family.output}.weight"][0 if family.transposed else 1], heads, module)
        found.append(
            HeadTensor((f"{module}.{family.output}.weight",), not family.transposed, {"output": rows}, {"output": rows})
        )
    if family.key_norm in ("full", "per_head"):
        add(family.key_norm_name, separate("key_norm", before), False)
    for ending in ("weight", "bias"):
        names = tuple(f"{module}.{family.key_norm_name}.{head}.{ending}" for head in range(before))
        if family.key_norm == "per_head_list" and names[0] in source:
            rows = _split(before * source[names[0]][0], before, module)
            found.append(HeadTensor(names, False, {"key_norm": rows}, {"key_norm": rows[:after]}))
    return found


def _split(length: int, heads: int, module: str) -> torch.Tensor:
    if length % heads:
        raise ConfigError(f"{module} of SOURCE has {length} rows for {heads} heads: repair its config")
    return torch.arange(length).reshape(heads, -1)


def _fused(layout: str, heads: int, kv_heads: int, length: int, module: str) -> Rows:
    """The rows of [queries, keys, values], derived as the models derive them: by reshaping a row of head numbers."""
    cells = _split(length, heads + 2 * kv_heads, module)
    if layout == "grouped" and heads:
        table = cells.unflatten(0, (kv_heads, -1))
        query, key, value = table[:, :-2].flatten(0, 1), table[:, -2], table[:, -1]
    elif layout == "quarters" and heads:
        table = cells.unflatten(0, (4, 3, -1))
        query, value, key = (table[:, part].flatten(0, 1) for part in range(3))
    else:
        query, key, value = cells.split([heads, kv_heads, kv_heads])
    rows: Rows = {"query": query, "key": key, "value": value}
    return rows if heads else {"key": key, "value": value}


def _joined(rows: Rows, after: int) -> Rows:
    """The rows in OUT, where the parts of a tensor follow one another."""
    found: Rows = {}
    start = 0
    if "gate" in rows:
        return rows
    for role, each in rows.items():
        count = after if role in MERGED else each.shape[0]
        found[role] = torch.arange(start, start + count * each.shape[1]).reshape(count, -1)
        start += count * each.shape[1]
    return found
