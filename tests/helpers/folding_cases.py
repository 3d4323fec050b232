"""Sources whose K/V heads are images of one another by maps that attention can absorb, for every
family.

How heads lie in the parameters, which of their rows are rotated and which folding constraints hold
is written here and in `folding_facts.yaml` anew, for transformers' classes.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor, nn

from gqa_convert.conversion.options import ConversionOptions
from gqa_convert.conversion.run import convert_checkpoint
from gqa_convert.families.table import FAMILIES
from tests.helpers import elsewhere, native, own_files, tiny
from tests.helpers.native import NATIVE
from tests.helpers.tiny import HEADS


def names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_FACTS = yaml.safe_load(Path(__file__).with_name("folding_facts.yaml").read_text())
NORMED, GATED, VALUES_NORMED, OUTPUT_NORMED, KEEPS_ORDER, BIASED = (
    names(_FACTS[name])
    for name in ("NORMED", "GATED", "VALUES_NORMED", "OUTPUT_NORMED", "KEEPS_ORDER", "BIASED")
)
NORMED_IF, KEEPS_ORDER_IF, FUSED, ROLES = (
    _FACTS[name] for name in ("NORMED_IF", "KEEPS_ORDER_IF", "FUSED", "ROLES")
)

CASES: dict[str, tuple[str, dict[str, Any]]] = native.CASES | own_files.CASES
CASES |= {name: (name.partition(",")[0], values) for name, values in _FACTS["variants"].items()}
CASES.pop("gemma4_text")  # its heads have two widths
"""Model type and config values."""

SOURCE_HEADS: dict[str, int] = _FACTS["source_heads"]
SOME = (*native.REPRESENTATIVE, *_FACTS["some"])
"""Cases that differ in the layout of heads, in their rotary dimensions or in what can be folded."""

ATTENTION = names(
    "self_attn attn mixer temporal_block attention self_attention crossattention "
    "SelfAttention EncDecAttention encoder_attn "
    "cross_attention cross_attn"
)

Parts = dict[tuple[str, str], list[Tensor]]
"""By role and kind, a view of each head: [head_dim, hidden_size] of a weight, [head_dim] of a
bias.
"""

EXACT = 3e-5
"""How far equal models may lie apart in float32, as a share of the logits' spread: T5's are 2.2e-5
apart on a processor without AVX-512.
"""


@dataclass
class Case:
    """A source in memory, and the facts that the tests compare with."""

    model_type: str
    model: nn.Module
    kv_heads: int
    heads: int = HEADS
    blocks: bool = False
    """A fused projection is [q | k | v], as conversion leaves it."""
    clipped: bool = field(init=False)
    keys_blocked: bool = field(init=False)
    values_blocked: bool = field(init=False)

    def __post_init__(self) -> None:
        kind, config = self.model_type, self.model.config
        stated = (config, getattr(config, "attn_config", None))
        self.clipped = any(getattr(each, "clip_qkv", None) for each in stated)
        normed = kind in NORMED or (kind in NORMED_IF and getattr(config, NORMED_IF[kind]))
        self.keys_blocked = self.clipped or normed
        self.values_blocked = self.clipped or kind in GATED | VALUES_NORMED | OUTPUT_NORMED

    def logits(self, model: nn.Module | None = None) -> Tensor:
        return elsewhere.logits(model or self.model)

    def save(self, folder: Path) -> Path:
        self.model.save_pretrained(folder)
        return folder

    def load(self, folder: Path) -> nn.Module:
        if self.model_type in NATIVE:
            return native.load(folder)
        return own_files.load_stock(folder, self.model_type)

    def rotated(self) -> int:
        """Return the number of rotary dimensions of a head."""
        config = self.model.config
        if getattr(config, "alibi", False):
            return 0
        found = [buffer for name, buffer in self.model.named_buffers() if name.endswith("inv_freq")]
        return 2 * max((buffer.shape[0] for buffer in found), default=0)

    def keeps_order(self, module: str) -> bool:
        """Whether heads are to stay, by their numbers, as read out of transformers."""
        kind = self.model_type
        if kind in BIASED:
            return module.endswith("SelfAttention")
        if kind == "whisper":
            return module.endswith("encoder_attn")
        return kind in KEEPS_ORDER or bool(
            kind in KEEPS_ORDER_IF and getattr(self.model.config, KEEPS_ORDER_IF[kind])
        )

    def parts(self, model: nn.Module, kv_heads: int, *, blocks: bool = False) -> dict[str, Parts]:
        """The projections of every attention module, and gains of keys that each head has for
        itself; `blocks` where a fused projection is [q | k | v].
        """
        blocks = blocks or self.blocks
        found: dict[str, Parts] = {}
        family = FAMILIES[self.model_type]
        for name, parameter in model.named_parameters():
            module, has_gains, kind = name.partition(f".{family.key_norm_name}.")
            if has_gains and family.key_norm not in ("none", "shared"):
                one_each = family.key_norm == "per_head_list"
                views = (
                    [parameter.data]
                    if one_each
                    else list(parameter.data.unflatten(0, (kv_heads, -1)))
                )
                found.setdefault(module, {}).setdefault(("gain", "weight"), []).extend(views)
                continue
            *modules, projection, kind = name.split(".")
            if not modules or modules[-1] not in ATTENTION or "encoder" in modules:
                continue
            own = found.setdefault(".".join(modules), {})
            rows = parameter.data
            if projection in ROLES:
                role = ROLES[projection]
                rows = rows.movedim(-1, 0) if projection == "q_attn" else rows
                own[role, kind] = list(
                    rows.unflatten(0, (self.heads if role == "query" else kv_heads, -1))
                )
            elif self.model_type in FUSED and projection == family.fused:
                rows = rows.movedim(-1, 0) if self.model_type == "gpt2" else rows
                heads = 0 if modules[-1] == "crossattention" else self.heads
                for role, views in cut(
                    rows, heads, kv_heads, "blocks" if blocks else FUSED[self.model_type]
                ).items():
                    own[role, kind] = views
        return {module: own for module, own in found.items() if ("key", "weight") in own}


def cut(rows: Tensor, heads: int, kv_heads: int, layout: str) -> dict[str, list[Tensor]]:
    """The heads of a fused projection: [q | k | v]; per K/V head its queries, key and value; or
    four times [q | v | k].
    """
    if layout == "blocks":
        views = list(rows.unflatten(0, (heads + 2 * kv_heads, -1)))
        return {
            "query": views[:heads],
            "key": views[heads : heads + kv_heads],
            "value": views[heads + kv_heads :],
        }
    if layout == "grouped":
        cells = rows.unflatten(0, (kv_heads, heads // kv_heads + 2, -1))
        queries = [view for cell in cells for view in cell[:-2]]
        return {"query": queries, "key": list(cells[:, -2]), "value": list(cells[:, -1])}
    cells = rows.unflatten(0, (4, 3, heads // 4, -1))
    return {
        role: [view for cell in cells[:, kind] for view in cell]
        for kind, role in enumerate(("query", "value", "key"))
    }


def build(case: str, *, kv_heads: int = HEADS, **changes: Any) -> Case:
    """Return a random source for a case."""
    model_type, overrides = CASES[case]
    values = overrides | changes
    if model_type in NATIVE:
        config = tiny.make_config(model_type, kv_heads=kv_heads, **values)
        return Case(model_type, tiny.make_model(config), kv_heads)
    return Case(
        model_type, own_files.make_source_model(model_type, **values), SOURCE_HEADS.get(case, HEADS)
    )


@torch.no_grad()
def pool(case: Case, groups: int, *, strided: bool = False) -> nn.Module:
    """Replace each K/V head of the case's model by the mean of its group, and return the model.

    Args:
        case: whose model is changed.
        groups: of neighbouring heads.
        strided: heads that are `groups` apart share a group instead, which is wrong.
    """
    size = case.kv_heads // groups
    for own in case.parts(case.model, case.kv_heads).values():
        for (role, _), views in own.items():
            for group in range(groups if size > 1 and role != "query" else 0):
                members = (
                    views[group::groups] if strided else views[group * size : (group + 1) * size]
                )
                mean = torch.stack(members).double().mean(0)
                for view in members:
                    view.copy_(mean)
    return case.model


class Maps:
    """Random maps by which heads of a group may differ: none squeezes a head by more than four, so
    that float32 stays exact.
    """

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(0)

    def _numbers(self, count: int) -> Tensor:
        return torch.rand(count, generator=self._generator, dtype=torch.float64)

    def _sizes(self, count: int) -> Tensor:
        return 0.5 + 1.5 * self._numbers(count)

    def any(self, width: int) -> Tensor:
        """Return a random matrix [width, width]."""
        left, right = (
            torch.linalg.qr(self._numbers(width * width).view(width, width) - 0.5)[0]
            for _ in range(2)
        )
        return left * self._sizes(width) @ right

    def turning(self, width: int, rotated: int, layout: str) -> Tensor:
        """A complex number for each pair of the first rows, a matrix for the rest. [width,
        width].
        """
        result = torch.zeros(width, width, dtype=torch.float64)
        rows = torch.arange(rotated)
        real, imaginary = (
            (rows[0::2], rows[1::2])
            if layout == "interleaved"
            else (rows[: rotated // 2], rows[rotated // 2 :])
        )
        angles, sizes = 6.3 * self._numbers(len(real)), self._sizes(len(real))
        result[real, real] = result[imaginary, imaginary] = sizes * angles.cos()
        result[imaginary, real] = sizes * angles.sin()
        result[real, imaginary] = -sizes * angles.sin()
        if width > rotated:
            result[rotated:, rotated:] = self.any(width - rotated)
        return result


@torch.no_grad()
def tie(case: Case, groups: int) -> Case:
    """Make the K/V heads of each group of neighbours images of its first one, by every map that the
    family's attention can absorb; equal where something stands in the way.
    """
    maps = Maps()
    blocked = {"key": case.keys_blocked, "value": case.values_blocked, "gain": True}
    size = case.kv_heads // groups
    for own in case.parts(case.model, case.kv_heads).values():
        for role in blocked:
            kinds = [views for (part, _), views in own.items() if part == role]
            for head in range(case.kv_heads):
                if head % size == 0 or not kinds:
                    continue
                width = len(kinds[0][0])
                if blocked[role]:
                    chosen = torch.eye(width, dtype=torch.float64)
                elif role == "value":
                    chosen = maps.any(width)
                else:
                    chosen = maps.turning(width, case.rotated(), FAMILIES[case.model_type].rotary)
                for views in kinds:
                    views[head].copy_(chosen @ views[head - head % size].double())
    return case


@torch.no_grad()
def placed(case: Case, result: nn.Module, groups: int) -> nn.Module:
    """The source's model with the numbers of a result, each K/V head as often as there were
    heads in its group.
    """
    found = dict(result.named_parameters())
    for name, parameter in case.model.named_parameters():
        if name in found and found[name].shape == parameter.shape:
            parameter.copy_(found[name])
    theirs = case.parts(result, groups, blocks=True)
    for module, own in case.parts(case.model, case.kv_heads).items():
        for part, views in own.items():
            for head, view in enumerate(views):
                view.copy_(theirs[module][part][head * len(theirs[module][part]) // len(views)])
    return case.model


def converted(case: Case, folder: Path, groups: int, method: str, **options: Any) -> nn.Module:
    """Convert the model in memory and return the loaded result."""
    source = folder / "source"
    if not source.exists():
        case.model.save_pretrained(source)
    out = folder / f"{method}-{groups}"
    native = None if case.model_type in NATIVE else False
    convert_checkpoint(
        source, out, groups, ConversionOptions(method=method, native=native, **options)
    )
    return case.load(out)
