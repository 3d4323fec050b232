"""What OUT turned out to be: its tensors, its heads, and the method by whose rules it is judged.

The converter reads where heads lie from configs; here the shapes of both checkpoints show it, and
the agreement of the two is part of the proof. A head of values is as wide as the output
projection's input divided by the query heads, which no conversion changes. The same functions read
the parameters of loaded models.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from gqa_convert.errors import ConfigError
from gqa_convert.families.composite import config_value
from gqa_convert.families.family import AttentionKind, Family
from gqa_convert.families.layerwise import heads_text, is_run

from .inputs import Inputs, Tensors, Weights
from .report import Failure

PLAIN = ("mean", "first")
"""Methods whose K/V heads follow from SOURCE's K/V heads alone and are proven bit for bit."""
FACTORED = "factor"
"""The method that also changes queries and outputs, of heads that may absorb maps."""
FITTED = "fit"
"""The method that depends on a text."""

Role = str
"""What heads are: query, gate, key, value, key_norm, output; and output_bias, a single head."""
MERGED = ("key", "value", "key_norm")
"""The roles whose heads a conversion merges."""
Heads = dict[Role, Tensor]
"""Heads [heads, width, ...] by role."""


@dataclass(frozen=True)
class HeadTensor:
    """A tensor of one checkpoint that holds heads, or the norms of all K/V heads where each has a
    tensor of its own.

    Attributes:
        names: one, or one for each K/V head.
        axis: along which the heads lie.
        counts: the number of heads of each role.
        blocks: how many equal blocks there are, each of which holds a share of every role's heads,
            role after role.
    """

    names: list[str]
    axis: int
    counts: dict[Role, int]
    blocks: int

    @property
    def heads(self) -> int:
        """In each of the tensors."""
        return sum(self.counts.values()) // len(self.names)

    def read(self, tensors: Tensors) -> Heads:
        """The heads in the tensors of the checkpoint."""
        parts = self._parts(self._whole(tensors))
        return {role: part.flatten(0, 1) for role, part in parts.items()}

    def replace(self, tensors: Tensors, heads: Heads) -> Tensors:
        """Copies of the tensors with other heads of some roles."""
        whole = self._whole(tensors)
        parts = self._parts(whole)
        for role, each in heads.items():
            parts[role].copy_(each.view_as(parts[role]))
        return dict(zip(self.names, whole.chunk(len(self.names)), strict=True))

    def _whole(self, tensors: Tensors) -> Tensor:
        """A copy of the tensors, one after another."""
        return torch.stack([tensors[name] for name in self.names]).flatten(0, 1)

    def _parts(self, whole: Tensor) -> Heads:
        """Views [blocks, heads, width, ...] of it."""
        shares = [count // self.blocks for count in self.counts.values()]
        blocks = whole.movedim(self.axis, 0).unflatten(0, (self.blocks, sum(shares), -1))
        return dict(zip(self.counts, blocks.split(shares, 1), strict=True))


Pair = tuple[HeadTensor, HeadTensor]
"""A tensor in SOURCE and in OUT."""


@dataclass(frozen=True)
class Module:
    """An attention module.

    Attributes:
        heads: query heads.
        before: K/V heads in SOURCE.
        after: K/V heads in OUT.
        tensors: those that hold heads.
    """

    name: str
    kind: AttentionKind
    heads: int
    before: int
    after: int
    tensors: list[Pair]


class Result:
    """A converted checkpoint whose heads were found.

    Args:
        inputs: the checkpoints.
        weights: the tensors of OUT.

    Attributes:
        modules: the attention modules.
        kinds: the number of modules of each kind.
        decoder: the modules of the decoder's self-attention, in the order of the layers.
        counts: K/V heads of OUT in each layer of the decoder.
        kv_heads: the same; one number where all layers have it.
        changed: the modules with another number of K/V heads in OUT than in SOURCE.
        merged: the modules with fewer.
        method: the claimed method, unless the heads show another: heads that do not become fewer
            are copied or repeated, whatever was asked for.
        folds: whether the method changes queries and outputs too; it is measured against mean
            pooling.
        modeling: the modelling file that it must come with.

    Raises:
        ConfigError, Failure: as `read_modules` does.
    """

    def __init__(self, inputs: Inputs, weights: Weights) -> None:
        self.inputs = inputs
        self.weights = weights
        self.modules = read_modules(inputs, inputs.source.tensors, weights.tensors)
        self.kinds = Counter(module.kind for module in self.modules)
        decoder = [module for module in self.modules if module.kind == "decoder"]
        self.decoder = sorted(decoder, key=_layer_number)
        self.counts = [module.after for module in self.decoder]
        self.kv_heads = self.counts if len(set(self.counts)) > 1 else self.counts[0]
        self.changed = [module for module in self.modules if module.before != module.after]
        self.merged = [module for module in self.modules if module.after < module.before]
        self.method = inputs.claims.get("method") if self.merged else "repeat"
        self.modeling = inputs.modeling
        if not self.changed:
            self.method = "copy"
            if self.modeling is inputs.family.modeling and not inputs.family.is_converted:
                self.modeling = None  # stock classes load it
        self.folds = self.method in (FACTORED, FITTED)

    def __str__(self) -> str:
        before = heads_text([module.before for module in self.decoder])
        kinds = [f"{count} modules of {kind} attention" for kind, count in self.kinds.items()]
        return (
            f"{self.decoder[0].heads} query heads, {before} -> {heads_text(self.counts)} K/V heads "
            f"in {', '.join(kinds)}"
        )

    @cached_property
    def free(self) -> dict[str, set[Role]]:
        """By module, the roles whose heads the method may make anything of; none for plain methods.

        `fit` may change all of them. `factor` folds maps of keys into queries unless a norm or
        clipping lies between them, and maps of values into outputs unless a gate, a norm or
        clipping does; otherwise they are means, as they are in layers that transformers leaves out.
        """
        family, config = self.inputs.family, self.inputs.decoder_config
        merged = [module.name for module in self.merged] if self.folds else []
        run = [name for name in merged if is_run(family, config, name)]
        names = run or merged  # as in the converter, where the names of layers tell nothing
        if self.method == FITTED:
            return {name: {"query", "key", "value", "output", "output_bias"} for name in names}
        clips = any(config_value(config, key) for key in ("clip_qkv", "attn_config.clip_qkv"))
        is_normed = family.gainless_key_norm is not None and config.get(*family.gainless_key_norm)
        found: dict[str, set[Role]] = {name: set() for name in names}
        for name, roles in found.items():
            gains = f"{name}.{family.key_norm_name}."
            has_gains = any(tensor.startswith(gains) for tensor in self.inputs.source.tensors)
            is_scaled = has_gains and family.key_norm != "none"
            if not (clips or is_normed or is_scaled or family.key_constraint):
                roles |= {"query", "key"}
            if not (clips or family.value_constraint):
                roles |= {"value", "output"}
        return found

    @cached_property
    def touched(self) -> list[tuple[HeadTensor, HeadTensor, set[Role]]]:
        """The tensors in SOURCE and in OUT that hold merged heads, or heads that the method may
        make anything of, and the roles of these.
        """
        found = []
        for module in self.changed:
            free = self.free.get(module.name, set())
            for before, after in module.tensors:
                if before.counts.keys() & free.union(MERGED):
                    found.append((before, after, free))
        return found


def _layer_number(module: Module) -> int:
    """The first number in a module's name."""
    return int(next(filter(str.isdigit, module.name.split("."))))


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
        if family.encoder not in name.split("."):  # which keeps its tensors
            kind: AttentionKind = "cross" if _is_called(name, family.cross_attention) else "decoder"
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


def _read_module(
    name: str, kind: AttentionKind, inputs: Inputs, source: Tensors, out: Tensors
) -> Module:
    """A module with its numbers of heads, which follow from the rows of the values or of a fused
    projection.
    """
    family, config = inputs.family, inputs.decoder_config
    heads = config_value(config, family.heads_key) or config["num_attention_heads"]
    axis = int(family.transposed)
    width = source[f"{name}.{family.output}.weight"].shape[1 - axis] // heads
    projection = f"{name}.{family.fused or family.value}.weight"
    query_rows = heads * width if family.fused and kind != "cross" else 0
    rows_of_a_head = 2 * width if family.fused else width
    counts = []
    for tensors in (source, out):
        rows = tensors[projection].shape[axis]
        count, rest = divmod(rows - query_rows, rows_of_a_head)
        if rest or count < 1 or heads % count:
            raise Failure(
                f"{projection} has {rows} rows, which are no number of K/V heads beside {heads} "
                f"query heads of {width} rows"
            )
        counts.append(count)
    before, after = counts
    if before % after and after % before:
        raise Failure(f"{projection}: {before} K/V heads cannot be grouped or repeated to {after}")
    module = Module(name, kind, heads, before, after, [])
    module.tensors.extend(_head_tensors(module, family, source))
    return module


def _head_tensors(module: Module, family: Family, source: Tensors) -> Iterator[Pair]:
    """The tensors of a module that hold heads, in SOURCE and in OUT, where what is merged lies in
    one block.
    """
    heads, kv_heads = module.heads, module.before
    # the heads in each tensor, and in how many blocks: a head's gate follows its queries
    queries = dict.fromkeys(("query", "gate")[: family.query_outputs], heads)
    parts: dict[str, tuple[dict[Role, int], int]] = {
        family.query: (queries, heads),
        family.key: ({"key": kv_heads}, 1),
        family.value: ({"value": kv_heads}, 1),
        family.output: ({"output": heads}, 1),
    }
    if family.fused and module.kind == "cross":
        parts[family.fused] = ({"key": kv_heads, "value": kv_heads}, 1)
    elif family.fused:
        blocks = kv_heads if family.fused_layout == "grouped" else 1
        parts[family.fused] = ({"query": heads, "key": kv_heads, "value": kv_heads}, blocks)
    if family.key_norm not in ("none", "shared"):
        parts[family.key_norm_name] = ({"key_norm": kv_heads}, 1)

    for ending in ("weight", "bias"):
        for part, (counts, blocks) in parts.items():
            names = [f"{module.name}.{part}.{ending}"]
            if "key_norm" in counts and family.key_norm == "per_head_list":
                names = [f"{module.name}.{part}.{head}.{ending}" for head in range(kv_heads)]
            if names[0] not in source:
                continue
            if part == family.output and ending == "bias":
                counts = {"output_bias": 1}
            is_turned = family.transposed != (part == family.output)
            axis = int(is_turned and source[names[0]].dim() == 2)
            merged = {role: module.after for role in counts if role in MERGED}
            blocks_after = 1 if merged else blocks
            before = HeadTensor(names, axis, counts, blocks)
            after = HeadTensor(names[: module.after], axis, counts | merged, blocks_after)
            yield before, after
