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
from gqa_convert.families.composite import config_value
from gqa_convert.families.family import Family
from gqa_convert.verify.report import Failure

Kind = Literal["decoder", "cross", "encoder"]
Role = Literal["query", "gate", "key", "value", "key_norm", "output", "output_bias"]
"""What rows hold. The bias of the output belongs to no head and counts as one."""
MERGED: tuple[Role, ...] = ("key", "value", "key_norm")
"""The roles whose heads a conversion merges."""
Shape = tuple[int, ...]
Tensors = Mapping[str, Tensor]
Heads = dict[Role, Tensor]
"""By role, the heads [heads, width, ...], or the numbers of their rows [heads, width]."""
Counts = dict[Role, int]
"""By role, the number of heads."""


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
        rows = sum(each.numel() for each in self.after.values()) // len(self.names_after)
        return *shape[: self.axis], rows, *shape[self.axis + 1 :]

    def read(self, tensors: Tensors, *, converted: bool) -> Heads:
        """The heads in SOURCE's tensors, or in OUT's."""
        names, rows = (self.names_after, self.after) if converted else (self.names, self.before)
        found = [tensors[name].detach() for name in names]
        whole = found[0] if len(found) == 1 else torch.cat(found)
        return {role: whole.movedim(self.axis, 0)[each] for role, each in rows.items()}

    def replace(self, tensors: Tensors, heads: Heads) -> dict[str, Tensor]:
        """Copies of SOURCE's tensors with other heads of some roles; none where there are no heads."""
        if not heads:
            return {}
        whole = torch.cat([tensors[name].detach() for name in self.names])
        for role, each in heads.items():
            whole.movedim(self.axis, 0)[self.before[role]] = each.to(whole.dtype)
        return dict(zip(self.names, whole.chunk(len(self.names)), strict=True))


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

    def describe(self) -> str:
        """Heads and layers in one line."""
        kinds = Counter(module.kind for module in self.modules)
        modules = ", ".join(f"{count} modules of {kind} attention" for kind, count in kinds.items())
        before = span_of([module.before for module in self.decoder])
        return f"{self.decoder[0].heads} query heads, {before} -> {span_of(self.counts)} K/V heads in {modules}"


def span_of(counts: list[int]) -> str:
    """Numbers as "3" or, where they differ, "1 to 4"."""
    return f"{min(counts)} to {max(counts)}" if len(set(counts)) > 1 else str(counts[0])


def read_geometry(
    family: Family, config: dict[str, Any], source: Tensors, out: Tensors, *, may_differ: bool
) -> Geometry:
    """The heads of SOURCE and OUT.

    Args:
        family: SOURCE's family.
        config: of SOURCE's decoder.
        source: SOURCE's tensors, or its model's parameters.
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
    for module in decoder:
        if module.after != groups and not may_differ:
            raise Failure(
                f"{module.name} has {module.after} K/V heads, but {decoder[0].name} has {groups}: all layers "
                f"of this {family.model_type} have one number"
            )
    encoder = [module for module in modules if module.kind == "encoder"]
    for module in encoder:
        if module.after != encoder[0].after or module.after not in (module.before, groups):
            raise Failure(
                f"{module.name} has {module.after} K/V heads ({module.before} in SOURCE), but the decoder has {groups}"
            )
    if any(module.before != module.after for module in encoder):
        return Geometry(modules, True)
    is_open = bool(encoder) and encoder[0].before == groups
    return Geometry([module for module in modules if module.kind != "encoder"], None if is_open else False)


def _find_modules(family: Family, source: Tensors) -> dict[str, Kind]:
    """The attention modules among the names of tensors, in their order, each with its kind."""
    projection = f".{family.fused or family.value}.weight"
    found: dict[str, Kind] = {}
    for name in source:
        module = name.removesuffix(projection)
        if module == name or not _is_called(module, family.attention) or not family.owns(module):
            continue
        found[module] = "cross" if _is_called(module, family.cross_attention) else "decoder"
        if family.encoder in module.split("."):
            found[module] = "encoder"
    return found


def _is_called(module: str, names: tuple[str, ...]) -> bool:
    """Whether a module's path ends in one of these names, which may have dots."""
    return any(f".{module}".endswith(f".{name}") for name in names)


def _read_module(
    name: str, kind: Kind, family: Family, config: dict[str, Any], source: Tensors, out: Tensors
) -> Module:
    key = (family.encoder_heads_key or family.heads_key) if kind == "encoder" else family.heads_key
    heads = config_value(config, key) or config["num_attention_heads"]
    projection = f"{name}.{family.fused or family.value}.weight"
    axis = int(family.transposed)
    width = source[f"{name}.{family.output}.weight"].shape[1 - axis] // heads
    queries = heads * width if family.fused and kind != "cross" else 0
    of_both = 2 * width if family.fused else width
    shapes = [list(tensors[projection].shape) if projection in tensors else [0, 0] for tensors in (source, out)]
    (before, rest), (after, rest_after) = (divmod(shape[axis] - queries, of_both) for shape in shapes)
    if rest or before < 1 or heads % before:
        raise ConfigError(
            f"{projection} of SOURCE has shape {shapes[0]}, which does not suit {heads} query heads of {width} rows: "
            "copy SOURCE again, or repair its config"
        )
    if rest_after or after < 1 or (before % after and (after % before or heads % after)):
        raise Failure(
            f"{projection} is {shapes[1]} in OUT and {shapes[0]} in SOURCE: {before} K/V heads cannot be grouped or "
            "repeated to that shape"
        )
    return Module(name, kind, heads, before, after, _head_tensors(name, kind, family, heads, before, after, source))


def _head_tensors(
    module: str, kind: Kind, family: Family, heads: int, before: int, after: int, source: Tensors
) -> list[HeadTensor]:
    """The tensors of a module that hold heads. In OUT, what is merged lies in one block."""
    parts: dict[str, tuple[Role, ...]] = {
        family.key: ("key",),
        family.value: ("value",),
        family.query: ("query", "gate") if family.query_outputs > 1 else ("query",),
        family.key_norm_name: ("key_norm",),
        family.output: ("output",),
    }
    blocks = {family.query: heads}  # a head's gate follows its queries
    if family.fused:
        parts[family.fused] = ("key", "value") if kind == "cross" else ("query", "key", "value")
        if family.fused_layout == "grouped" and kind != "cross":
            blocks[family.fused] = before
    if family.key_norm in ("none", "shared"):
        del parts[family.key_norm_name]
    found = []
    for ending in ("weight", "bias"):
        for part, roles in parts.items():
            names = [f"{module}.{part}.{ending}"]
            if roles == ("key_norm",) and family.key_norm == "per_head_list":
                names = [f"{module}.{part}.{head}.{ending}" for head in range(before)]
            if names[0] not in source:
                continue
            if roles == ("output",) and ending == "bias":
                roles = ("output_bias",)
            shape = source[names[0]].shape
            axis = int(len(shape) == 2 and family.transposed != (roles == ("output",)))
            counts, counts_after = (_counts(roles, heads, kv_heads) for kv_heads in (before, after))
            width, rest = divmod(len(names) * shape[axis], sum(counts.values()))
            if rest:
                raise ConfigError(f"{names[0]} of SOURCE has shape {list(shape)} for {counts}: repair the config")
            rows = _rows(counts, width, blocks.get(part, 1))
            rows_after = rows if counts == counts_after else _rows(counts_after, width, 1)
            names_after = names[:after] if len(names) > 1 else names
            found.append(HeadTensor(tuple(names), tuple(names_after), axis, rows, rows_after))
    return found


def _counts(roles: tuple[Role, ...], heads: int, kv_heads: int) -> Counts:
    """The numbers of heads of roles. The bias of the output belongs to no head."""
    of_role = {"output_bias": 1} | dict.fromkeys(MERGED, kv_heads)
    return {role: of_role.get(role, heads) for role in roles}


def _rows(counts: Counts, width: int, blocks: int) -> Heads:
    """The rows of heads of a width that lie in equal blocks, each of which holds a share of every role's heads, role after
    role.

    The rows are derived as the models derive them: by reshaping a row of numbers.
    """
    shares = [count // blocks for count in counts.values()]
    parts = torch.arange(blocks * sum(shares) * width).reshape(blocks, sum(shares), width).split(shares, 1)
    return {role: part.flatten(0, 1) for role, part in zip(counts, parts, strict=True)}
