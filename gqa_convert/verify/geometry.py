"""Where the heads of a checkpoint lie, before and after its conversion, from the shapes of both.

The converter reads the same facts from configs with different code; the agreement of the two is
part of the proof. The numbers of heads come from shapes: a head of values is as wide as the output
projection's input divided by the query heads, which no conversion changes. The same functions read
the parameters of loaded models.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gqa_convert.errors import ConfigError
from gqa_convert.families.composite import config_value
from gqa_convert.families.family import Family
from gqa_convert.verify.inputs import Inputs, Tensors
from gqa_convert.verify.report import Failure

Kind = Literal["decoder", "cross", "encoder"]
Role = str
"""What rows hold: query, gate, key, value, key_norm, output; and output_bias, a single head."""
MERGED = ("key", "value", "key_norm")
"""The roles whose heads a conversion merges."""
Heads = dict[Role, Tensor]
"""By role, the heads [heads, width, ...], or the numbers of their rows [heads, width]."""


@dataclass(frozen=True)
class HeadTensor:
    """A tensor of one checkpoint that holds heads, or the norms of all K/V heads where each has a
    tensor of its own.
    """

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
    tensors: list[tuple[HeadTensor, HeadTensor]]
    """Its tensors that hold heads, each in SOURCE and in OUT."""


def read_modules(inputs: Inputs, source: Tensors, out: Tensors) -> list[Module]:
    """The attention modules of a checkpoint whose heads the conversion may have merged.

    Args:
        inputs: the checkpoints.
        source: SOURCE's tensors, or its model's parameters.
        out: the same of OUT.

    Raises:
        ConfigError: SOURCE has no attention.
        Failure: OUT's numbers of K/V heads cannot be determined, or do not fit SOURCE's.
    """
    family = inputs.family
    projection = f".{family.fused or family.value}.weight"
    modules = []
    for tensor in source:
        name = tensor.removesuffix(projection)
        if name == tensor or not _is_called(name, family.attention) or not family.owns(name):
            continue
        kind: Kind = "cross" if _is_called(name, family.cross_attention) else "decoder"
        if family.encoder in name.split("."):
            kind = "encoder"
        # an encoder that was not converted keeps its tensors
        if kind != "encoder" or inputs.claims.get("encoder") is True:
            modules.append(_read_module(name, kind, inputs, source, out))
    if not any(module.kind == "decoder" for module in modules):
        raise ConfigError(
            f"SOURCE is not a {family.model_type} checkpoint: it has no attention modules, check "
            "its config"
        )
    return modules


def _is_called(module: str, names: tuple[str, ...]) -> bool:
    """Whether a module's path ends in one of these names, which may have dots."""
    return any(f".{module}".endswith(f".{name}") for name in names)


def _read_module(name: str, kind: Kind, inputs: Inputs, source: Tensors, out: Tensors) -> Module:
    """A module with its numbers of heads, which follow from the rows of the values or of a fused
    projection.
    """
    family, config = inputs.family, inputs.decoder_config
    key = family.heads_key
    if kind == "encoder":
        key = family.encoder_heads_key or key
    heads = config_value(config, key) or config["num_attention_heads"]
    axis = int(family.transposed)
    width = source[f"{name}.{family.output}.weight"].shape[1 - axis] // heads
    projection = f"{name}.{family.fused or family.value}.weight"
    query_rows = heads * width if family.fused and kind != "cross" else 0
    rows_of_a_head = 2 * width if family.fused else width
    counts = []
    for whose, tensors in (("SOURCE", source), ("OUT", out)):
        rows = tensors[projection].shape[axis] if projection in tensors else 0
        count, rest = divmod(rows - query_rows, rows_of_a_head)
        if rest or count < 1 or heads % count:
            raise Failure(
                f"{projection} of {whose} does not suit {heads} query heads of {width} rows: "
                "no number of K/V heads has that shape"
            )
        counts.append(count)
    before, after = counts
    if before % after and after % before:
        raise Failure(f"{projection}: {before} K/V heads cannot be grouped or repeated to {after}")
    module = Module(name, kind, heads, before, after, [])
    module.tensors.extend(_head_tensors(module, family, source))
    return module


def _head_tensors(
    module: Module, family: Family, source: Tensors
) -> Iterator[tuple[HeadTensor, HeadTensor]]:
    """The tensors of a module that hold heads, in SOURCE and in OUT, where what is merged lies in
    one block.
    """
    # what each tensor holds, and in how many blocks
    parts: dict[str, tuple[Role, ...]] = {
        family.key: ("key",),
        family.value: ("value",),
        family.query: ("query", "gate")[: family.query_outputs],
        family.output: ("output",),
    }
    blocks = {family.query: module.heads}  # a head's gate follows its queries
    if family.fused:
        own = () if module.kind == "cross" else ("query",)
        parts[family.fused] = (*own, "key", "value")
        if family.fused_layout == "grouped" and own:
            blocks[family.fused] = module.before
    if family.key_norm not in ("none", "shared"):
        parts[family.key_norm_name] = ("key_norm",)

    for ending in ("weight", "bias"):
        for part, roles in parts.items():
            names = names_after = [f"{module.name}.{part}.{ending}"]
            if roles == ("key_norm",) and family.key_norm == "per_head_list":
                names = [f"{module.name}.{part}.{head}.{ending}" for head in range(module.before)]
                names_after = names[: module.after]
            if names[0] not in source:
                continue
            shape = source[names[0]].shape
            is_turned = family.transposed != (part == family.output)
            axis = 1 if is_turned and len(shape) == 2 else 0
            counts = {role: module.before if role in MERGED else module.heads for role in roles}
            if part == family.output and ending == "bias":
                counts = {"output_bias": 1}
            width = len(names) * shape[axis] // sum(counts.values())
            rows = rows_after = _rows(counts, width, blocks.get(part, 1))
            counts_after = counts | {role: module.after for role in roles if role in MERGED}
            if counts != counts_after:
                rows_after = _rows(counts_after, width, 1)
            yield HeadTensor(names, axis, rows), HeadTensor(names_after, axis, rows_after)


def _rows(counts: dict[Role, int], width: int, blocks: int) -> Heads:
    """The rows of heads of a width that lie in equal blocks, each of which holds a share of every
    role's heads, role after role.

    The rows are derived as the models derive them: by reshaping a row of numbers.
    """
    shares = [count // blocks for count in counts.values()]
    numbers = torch.arange(blocks * sum(shares) * width)
    parts = numbers.reshape(blocks, sum(shares), width).split(shares, 1)
    return {role: part.flatten(0, 1) for role, part in zip(counts, parts, strict=True)}
