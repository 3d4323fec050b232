"""Which tensors hold K/V heads and how many there are before and after, from the source's config and the tensors' shapes.

The converter decides the same from the same files with code of its own; agreement of the two is part of the proof.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

from gqa_convert.errors import ConfigError
from gqa_convert.families import Family
from gqa_convert.verify.reading import Weights
from gqa_convert.verify.report import Failure

Part = Literal["query", "key", "value", "norm"]


@dataclass(frozen=True, slots=True)
class Run:
    """A run of rows of one part: `heads` heads of `width` rows from row `start` of the source's tensor on."""

    part: Part
    start: int
    heads: int
    width: int

    @property
    def merged(self) -> bool:
        return self.part != "query"


@dataclass
class Geometry:
    """The heads of a checkpoint and of its conversion."""

    heads: int
    """Query heads."""
    before: int
    """K/V heads in SOURCE."""
    after: int
    """K/V heads in OUT, as its tensors have them."""
    modules: list[str]
    """Attention modules, by the names of their tensors."""
    runs: dict[str, tuple[Run, ...]] = field(default_factory=dict)
    """Tensors whose leading axis counts K/V heads."""
    lists: list[list[str]] = field(default_factory=list)
    """Runs of tensors, one per K/V head of SOURCE."""

    @property
    def size(self) -> int:
        """K/V heads of SOURCE in a group; 0 when heads are repeated."""
        return self.before // self.after

    def dropped(self) -> set[str]:
        """Tensors that OUT must not have."""
        return {name for names in self.lists for name in names[self.after :]}


def config_value(config: dict[str, Any], dotted: str) -> Any:
    """The value at a dotted key, or None."""
    value: Any = config
    for key in dotted.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value


def read_geometry(family: Family, config: dict[str, Any], source: Weights, out: Weights | None) -> Geometry:
    """The geometry of SOURCE, and OUT's count from the shape of one value projection.

    Args:
        family: of both.
        config: SOURCE's.
        source: its tensors.
        out: the tensors of OUT; without them `after` is the count of SOURCE.

    Raises:
        ConfigError: SOURCE contradicts itself.
        Failure: OUT's count can't be told.
    """
    heads = config_value(config, family.heads_key)
    ending = f".{family.fused or family.value}.weight"
    modules = [name.removesuffix(ending) for name in source.homes if name.endswith(ending)]
    modules = [module for module in modules if any(f".{module}".endswith(f".{name}") for name in family.attention)]
    if type(heads) is not int or heads < 1 or not modules:
        found = f"{len(modules)} attention modules of {heads!r} heads"
        raise ConfigError(f"{source.folder} is no {family.model_type} checkpoint: it has {found}")
    before = config_value(config, family.kv_heads_keys[0])
    if before is None:
        before = _count(family, source, source, modules[0], heads)
    if type(before) is not int or before < 1 or heads % before:
        raise ConfigError(f"{source.folder}/config.json states {before!r} K/V heads for {heads} query heads: repair it")
    after = before
    if out is not None:
        probe = f"{modules[0]}{ending}"
        if probe not in out.homes:
            raise Failure(f"{probe} is missing, so that OUT's number of K/V heads can't be told")
        after = _count(family, source, out, modules[0], heads)
        if after < 1 or (before % after and (after % before or heads % after)):
            shapes = f"{list(out.shape(probe))} where SOURCE has {list(source.shape(probe))}"
            raise Failure(f"{probe} has shape {shapes} for {before} K/V heads: no grouping makes the one of the other")
    geometry = Geometry(heads, before, after, modules)
    for module in modules:
        _add_module(geometry, family, source, module)
    return geometry


def _count(family: Family, source: Weights, of: Weights, module: str, heads: int) -> int:
    """K/V heads by the rows of a projection; a head's width is that of the output projection's input, which never changes."""
    output = f"{module}.{family.output}.weight"
    if output not in source.homes or len(source.shape(output)) != 2:
        raise ConfigError(f"{output} is missing in {source.folder}: the checkpoint is incomplete")
    width = source.shape(output)[1] // heads
    rows = (of.shape(f"{module}.{family.fused or family.value}.weight") or (0,))[0]
    if width < 1 or rows % width or (family.fused and (rows // width - heads) % 2):
        raise Failure(f"{module} has {rows} rows, no whole number of heads of width {width}")
    return (rows // width - heads) // 2 if family.fused else rows // width


def _add_module(geometry: Geometry, family: Family, source: Weights, module: str) -> None:
    heads, before = geometry.heads, geometry.before

    def add(suffix: str, part: Part, rows_are_heads: bool = False) -> None:
        name = f"{module}.{suffix}"
        if name in source.homes:
            rows = source.shape(name)[0]
            if rows % before or (rows_are_heads and rows != before):
                raise ConfigError(f"{name} of {source.folder} has {rows} rows for {before} K/V heads: repair its config")
            geometry.runs[name] = (Run(part, 0, before, rows // before),)

    for kind in ("weight", "bias"):
        if family.fused:
            name = f"{module}.{family.fused}.{kind}"
            if name in source.homes:
                width, rest = divmod(source.shape(name)[0], heads + 2 * before)
                if rest:
                    raise ConfigError(f"{name} of {source.folder} does not hold {heads} + 2 x {before} heads: repair it")
                keys = heads * width
                geometry.runs[name] = (
                    Run("query", 0, 1, keys),
                    Run("key", keys, before, width),
                    Run("value", keys + before * width, before, width),
                )
        else:
            add(f"{family.key}.{kind}", "key")
            add(f"{family.value}.{kind}", "value")
        if family.key_norm in ("full", "per_head"):
            add(f"{family.key_norm_name}.{kind}", "norm", rows_are_heads=family.key_norm == "per_head")
        elif family.key_norm == "per_head_list":
            names = [f"{module}.{family.key_norm_name}.{head}.{kind}" for head in range(before)]
            if names[0] in source.homes:
                geometry.lists.append(names)
