"""Where the heads of a checkpoint lie, before and after its conversion, read from the shapes of both.

The converter reads the same facts from configs with different code; the agreement of the two is part of the proof. The
numbers of heads come from shapes: a head of values is as wide as the output projection's input divided by the query heads,
which no conversion changes. The same functions read the parameters of loaded models.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gqa_convert.errors import ConfigError
from gqa_convert.families.composite import config_value
from gqa_convert.families.family import Family
from gqa_convert.families.layerwise import heads_text
from gqa_convert.verify.inputs import Inputs
from gqa_convert.verify.report import Failure
from gqa_convert.verify.weights import Tensors

Kind = Literal["decoder", "cross", "encoder"]
Role = str
"""What rows hold: query, gate, key, value, key_norm, output; and output_bias, which is not divided into heads."""
MERGED = ("key", "value", "key_norm")
"""The roles whose heads a conversion merges."""
Heads = dict[Role, Tensor]
"""By role, the heads [heads, width, ...], or the numbers of their rows [heads, width]."""


@dataclass(frozen=True)
class HeadTensor:
    """A tensor of one checkpoint that holds heads, or the norms of all K/V heads where each has a tensor of its own."""

    names: list[str]
    """One name, or one for each K/V head."""
    axis: int
    """Along which the heads lie."""
    rows: Heads
    """The numbers of the rows of heads."""

    def read(self, tensors: Tensors) -> Heads:
        """The heads in the tensors of the checkpoint."""
        whole = torch.cat([tensors[name] for name in self.names]).movedim(self.axis, 0)
        return {role: whole[rows] for role, rows in self.rows.items()}

    def replace(self, tensors: Tensors, heads: Heads) -> Tensors:
        """Copies of the tensors with other heads of some roles."""
        whole = torch.cat([tensors[name] for name in self.names])
        for role, each in heads.items():
            whole.movedim(self.axis, 0)[self.rows[role]] = each.to(whole.dtype)
        return dict(zip(self.names, whole.chunk(len(self.names)), strict=True))


Pair = tuple[HeadTensor, HeadTensor]
"""A tensor in SOURCE and in OUT."""


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
    tensors: list[Pair]


class Geometry:
    """The attention modules of a checkpoint whose heads the conversion may have merged.

    Args:
        inputs: the checkpoints.
        source: SOURCE's tensors, or its model's parameters.
        out: the same of OUT.

    Attributes:
        modules: all of them.
        kinds: the number of modules of each kind.
        decoder: the modules of the decoder's self-attention, in the order of the layers.
        counts: K/V heads of OUT in each layer of the decoder.
        groups: the same; one number where all layers have it.
        changed: the modules with another number of K/V heads in OUT than in SOURCE.
        merged: the modules with fewer K/V heads in OUT than in SOURCE.

    Raises:
        ConfigError: SOURCE has no attention.
        Failure: OUT's numbers of K/V heads cannot be determined, or do not fit SOURCE's.
    """

    def __init__(self, inputs: Inputs, source: Tensors, out: Tensors) -> None:
        family = inputs.family
        projection = f".{family.fused or family.value}.weight"
        modules = []
        for name in source:
            module = name.removesuffix(projection)
            if (
                module == name
                or not _is_called(module, family.attention)
                or not family.owns(module)
            ):
                continue
            kind: Kind = "cross" if _is_called(module, family.cross_attention) else "decoder"
            if family.encoder in module.split("."):
                kind = "encoder"
            if kind != "encoder" or inputs.claims.get("encoder") is True:  # it was converted too
                modules.append(_read_module(module, kind, inputs, source, out))
        decoder = [module for module in modules if module.kind == "decoder"]
        if not decoder:
            raise ConfigError(
                f"SOURCE is not a {family.model_type} checkpoint: it has no attention modules, check its config"
            )
        self.modules = modules
        self.kinds = Counter(module.kind for module in modules)
        self.decoder = sorted(
            decoder, key=lambda module: int(next(filter(str.isdigit, module.name.split("."))))
        )
        self.counts = [module.after for module in self.decoder]
        self.groups = self.counts if len(set(self.counts)) > 1 else self.counts[0]
        self.changed = [module for module in modules if module.before != module.after]
        self.merged = [module for module in modules if module.after < module.before]

    def describe(self) -> str:
        """Heads and layers in one line."""
        modules = ", ".join(
            f"{count} modules of {kind} attention" for kind, count in self.kinds.items()
        )
        before = heads_text([module.before for module in self.decoder])
        return f"{self.decoder[0].heads} query heads, {before} -> {heads_text(self.counts)} K/V heads in {modules}"


def _is_called(module: str, names: tuple[str, ...]) -> bool:
    """Whether a module's path ends in one of these names, which may have dots."""
    return any(f".{module}".endswith(f".{name}") for name in names)


def _read_module(name: str, kind: Kind, inputs: Inputs, source: Tensors, out: Tensors) -> Module:
    """A module with its numbers of heads, which follow from the rows of the values, or of a fused projection."""
    family, config = inputs.family, inputs.decoder_config
    key = (family.encoder_heads_key or family.heads_key) if kind == "encoder" else family.heads_key
    heads = config_value(config, key) or config["num_attention_heads"]
    axis = int(family.transposed)
    width = source[f"{name}.{family.output}.weight"].shape[1 - axis] // heads
    projection = f"{name}.{family.fused or family.value}.weight"
    counts = []
    for whose, tensors in (("SOURCE", source), ("OUT", out)):
        rows = tensors[projection].shape[axis] if projection in tensors else 0
        if family.fused and kind != "cross":
            rows -= heads * width
        count, rest = divmod(rows, 2 * width if family.fused else width)
        if rest or count < 1 or heads % count:
            raise Failure(
                f"{projection} of {whose} does not suit {heads} query heads of {width} rows: no number of K/V heads "
                "has that shape"
            )
        counts.append(count)
    before, after = counts
    if before % after and after % before:
        raise Failure(f"{projection}: {before} K/V heads cannot be grouped or repeated to {after}")
    module = Module(name, kind, heads, before, after, [])
    module.tensors.extend(_head_tensors(module, family, source))
    return module


def _head_tensors(module: Module, family: Family, source: Tensors) -> Iterator[Pair]:
    """The tensors of a module that hold heads. In OUT, what is merged lies in one block."""
    parts: dict[str, tuple[Role, ...]] = {
        family.key: ("key",),
        family.value: ("value",),
        family.query: ("query", "gate")[: family.query_outputs],
        family.output: ("output",),
    }
    blocks = {family.query: module.heads}  # a head's gate follows its queries
    if family.fused:
        parts[family.fused] = (
            ("key", "value") if module.kind == "cross" else ("query", "key", "value")
        )
        if family.fused_layout == "grouped" and module.kind != "cross":
            blocks[family.fused] = module.before
    if family.key_norm not in ("none", "shared"):
        parts[family.key_norm_name] = ("key_norm",)
    before = dict.fromkeys(MERGED, module.before) | {"output_bias": 1}
    after = before | dict.fromkeys(MERGED, module.after)
    for ending in ("weight", "bias"):
        for part, roles in parts.items():
            names = names_after = [f"{module.name}.{part}.{ending}"]
            if roles == ("key_norm",) and family.key_norm == "per_head_list":
                names = [f"{module.name}.{part}.{head}.{ending}" for head in range(module.before)]
                names_after = names[: module.after]
            if names[0] not in source:
                continue
            if part == family.output and ending == "bias":
                roles = ("output_bias",)
            shape = source[names[0]].shape
            is_turned = family.transposed != (part == family.output)
            axis = 1 if is_turned and len(shape) == 2 else 0
            counts, counts_after = (
                {role: kv.get(role, module.heads) for role in roles} for kv in (before, after)
            )
            width = len(names) * shape[axis] // sum(counts.values())
            rows = rows_after = _rows(counts, width, blocks.get(part, 1))
            if counts != counts_after:
                rows_after = _rows(counts_after, width, 1)
            yield HeadTensor(names, axis, rows), HeadTensor(names_after, axis, rows_after)


def _rows(counts: dict[Role, int], width: int, blocks: int) -> Heads:
    """The rows of heads of a width that lie in equal blocks, each of which holds a share of every role's heads, role after
    role.

    The rows are derived as the models derive them: by reshaping a row of numbers.
    """
    shares = [count // blocks for count in counts.values()]
    parts = (
        torch.arange(blocks * sum(shares) * width)
        .reshape(blocks, sum(shares), width)
        .split(shares, 1)
    )
    return {role: part.flatten(0, 1) for role, part in zip(counts, parts, strict=True)}
