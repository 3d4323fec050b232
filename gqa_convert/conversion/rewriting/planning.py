"""Plans a rewriting from the headers of a source: everything that can be refused is refused here."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from gqa_convert.checkpoint.headers import TensorEntry
from gqa_convert.checkpoint.quantised import quantisation_method
from gqa_convert.checkpoint.source import Checkpoint
from gqa_convert.checkpoint.strict_json import Config, JsonObject
from gqa_convert.conversion.rewriting import arrays
from gqa_convert.conversion.rewriting.arrays import Array
from gqa_convert.conversion.rewriting.decoders import DECODERS, stock_form
from gqa_convert.conversion.rewriting.dequantising import plan_dequantising
from gqa_convert.conversion.rewriting.model import Rewriting, RewrittenTensor
from gqa_convert.conversion.rewriting.remote_code import REMOTE_CODE
from gqa_convert.conversion.rewriting.stock_form import Module, NoStockClassError, StockForm, count
from gqa_convert.errors import ConfigError, OptionError, UnsupportedFamilyError, UnsupportedFormatError
from gqa_convert.families import layouts
from gqa_convert.families.table import FAMILIES

_OWN_CODE = ("modeling_", "configuration_")
"""What the names of Python files begin with that the stock checkpoint does not need. A tokenizer's stay."""
_STALE = (
    "rotary_emb.inv_freq",
    "rotary_emb.cos_cached",
    "rotary_emb.sin_cached",
    "attn.masked_bias",
    ".attn.bias",
    ".attn.causal_mask",
    ".attn.embed_positions",
    ".attention.bias",
    ".attention.masked_bias",
    "inner_attn.mask",
)
"""Ends of the names of buffers that old versions saved and that no class reads."""


def plan_rewriting(
    checkpoint: Checkpoint, groups: int | Sequence[int] | None = None, *, native: bool | None = None
) -> Rewriting | None:
    """Plan the rewriting that a conversion begins with; None if the source is converted as it is.

    Args:
        checkpoint: the source, opened with `quantised`.
        groups: K/V heads per layer in the result, if the source is to be converted.
        native: rewrite types without a K/V-head count for a stock class that has one (True), never (False), or where
            there is one and the number of heads changes (None).

    Raises:
        UnsupportedFamilyError: no stock class computes the same as a type with custom code.
        ConfigError: the tensors do not belong to the config.
        UnsupportedFormatError: a tensor has a type that can't be read in numbers.
        OptionError: `native`, and no stock class computes the same.
    """
    config = checkpoint.config
    if quantisation_method(config) is not None:
        return plan_dequantising(checkpoint)
    model_type = config.get("model_type")
    if isinstance(model_type, str) and model_type in REMOTE_CODE:
        try:
            return _rewrite(checkpoint, REMOTE_CODE[model_type])
        except NoStockClassError as problem:
            raise UnsupportedFamilyError(
                f"no stock class computes the same as this {model_type}, whose config.json has {problem}"
            ) from None
    family = FAMILIES.get(str(model_type))
    if family is None or family.modeling is None or family.is_converted or native is False:
        return None
    if not isinstance(groups, int):
        return None
    heads = config.get(family.heads_key, config.get("num_attention_heads"))
    if native is None and groups == heads:
        return None
    try:
        return _rewrite(checkpoint, stock_form(config, groups))
    except NoStockClassError as problem:
        if native:
            raise OptionError(
                f"--native: no stock class computes the same as this {model_type}: {problem}; leave the option out to get a "
                "modelling file"
            ) from None
        return None


def needs_rewriting(config: Config, result_type: Any) -> bool:
    """Whether a conversion to a result of this model type begins with a rewriting.

    Args:
        config: the source's.
        result_type: the model type that the result's config states.
    """
    if quantisation_method(config) is not None or config.get("model_type") in REMOTE_CODE:
        return True
    return any((form.model_type, form.stock) == (config.get("model_type"), result_type) for form in DECODERS)


def _rewrite(checkpoint: Checkpoint, form: StockForm) -> Rewriting:
    config = _stock_config(checkpoint.config, form)
    planner = _Planner(checkpoint, form, config)
    planner.plan()
    if form.bias_key:
        config[form.bias_key] = planner.biased
    way = "" if form.model_type in REMOTE_CODE else f" (--no-native keeps {form.model_type})"
    notes = [f"the source, a {form.model_type}, is rewritten as a {form.stock}, which computes the same{way}"]
    tokens = checkpoint.config.get(form.alike_up_to) if form.alike_up_to else None
    if isinstance(tokens, int):
        notes.append(
            f"the same up to {tokens:,} tokens; beyond them its custom code scales positions by the length of the text"
        )
    carried = [name for name in checkpoint.carried if not _is_own_code(name, form)]
    return Rewriting(
        source=checkpoint,
        config=config,
        tensors=tuple(planner.tensors),
        carried=tuple(carried),
        result_dtypes=planner.result_dtypes,
        special_tokens=form.special_tokens,
        notes=tuple(notes),
    )


def _is_own_code(name: str, form: StockForm) -> bool:
    return form.model_type in REMOTE_CODE and name.endswith(".py") and Path(name).name.startswith(_OWN_CODE)


def _stock_config(config: Config, form: StockForm) -> JsonObject:
    """The stock type's config. Keys that belong neither to the source's type nor to the stock type's are copied.

    Raises:
        NoStockClassError: it describes something that the stock class does not compute.
    """
    classes = form.classes
    stated = config.get("architectures") or [*classes][:1]
    if not isinstance(stated, list) or len(stated) != 1 or stated[0] not in classes:
        raise NoStockClassError(f"architectures = {stated!r}, and {form.stock} stands for {' or '.join(classes)}")
    result = {key: copy.deepcopy(value) for key, value in config.items() if key not in form.dropped}
    result |= {"architectures": [classes[stated[0]]], "model_type": form.stock} | form.config(config)
    dtype = config.get("dtype", config.get("torch_dtype"))
    if isinstance(dtype, str):
        result |= {"dtype": dtype, "torch_dtype": dtype}
    auto = config.get("auto_map") or {}
    kept = {key: value for key, value in auto.items() if not key.startswith(("AutoConfig", "AutoModel"))}
    return result | ({"auto_map": kept} if kept else {})


class _Planner:
    """Finds every tensor of the stock class among those of the source. A tensor left over is an error."""

    def __init__(self, source: Checkpoint, form: StockForm, stock: JsonObject) -> None:
        self.source, self.form, self.stock = source, form, stock
        self.entries = {name: (number, entry) for number, name, entry in source.tensors()}
        self.claimed: set[str] = set()
        self.tensors: list[RewrittenTensor] = []
        self.result_dtypes: dict[str, str] = {}
        self.heads = count(stock, "num_attention_heads", "n_head")
        self.hidden_size = count(stock, "hidden_size", "n_embd")
        self.prefixes = self._missing_prefixes()
        self.biased = self._attention_biased()

    def plan(self) -> None:
        """Plan all tensors, in the order of the stock class."""
        form = self.form
        if not form.before:
            for name, (_, entry) in self.entries.items():
                self._add(name, name, entry.shape, (name,), None)
            return
        for module in form.before:
            self._module(module, ("", ""))
        layers = count(self.stock, "num_hidden_layers", "n_layer")
        for layer in range(layers):
            bases = (f"{form.layers[0]}.{layer}.", f"{form.layers[1]}.{layer}.")
            for module in form.inside:
                self._module(module, bases, layer)
        *norms, head = form.behind
        for module in norms:
            self._module(module, ("", ""))
        self._head(head)
        for name in self.entries:
            if name not in self.claimed and not name.endswith(_STALE):
                raise ConfigError(
                    f"tensor {name} does not belong to a {form.model_type} checkpoint with {layers} layers: the config and the "
                    "weights do not belong together"
                )

    def _missing_prefixes(self) -> tuple[str, str]:
        """What the names lack in the source, which may be a model without its head, and in the rewritten source."""
        prefix = self.form.prefixes[0]
        if not prefix:
            return "", ""
        embedding = f"{self.form.before[0].own[0]}.weight"
        is_bare = embedding not in self.entries and embedding.removeprefix(prefix) in self.entries
        return self.form.prefixes if is_bare else ("", "")

    def _attention_biased(self) -> bool:
        """Whether modules with bias `attention` have one."""
        if self.form.attention_biased is not None:
            return self.form.attention_biased(self.source.config)
        first = f"{self.form.layers[0]}.0."
        attention = [module for module in self.form.inside if module.bias == "attention"]
        return any(f"{first}{module.own[0]}.bias" in self.entries for module in attention)

    def _module(self, module: Module, bases: tuple[str, str], layer: int = 0) -> None:
        """Plan the weight and the bias of a module. `bases` precede its name in the source and in the stock type."""
        own_names = [f"{bases[0]}{name}".removeprefix(self.prefixes[0]) for name in module.own]
        own = next((name for name in own_names if f"{name}.weight" in self.entries), own_names[0])
        stock = f"{bases[1]}{module.stock}".removeprefix(self.prefixes[1])
        weight, bias = f"{own}.weight", f"{own}.bias"
        if module.neutral:
            self._claim(weight, self.hidden_size)
            self._claim(bias, self.hidden_size)
            self._fill(f"{stock}.weight", weight, self.hidden_size, 1.0)
            self._fill(f"{stock}.bias", bias, self.hidden_size, 0.0)
            return
        shape = self._claim(weight).shape
        selection = self._selection(module, weight, layer) if module.roles else arrays.Selection()
        if self.form.transposed and bases[0] and len(shape) == 2:
            selection = replace(selection, transposed=True)
        has_bias = module.bias == "always" or (module.bias == "attention" and self.biased)
        if has_bias or (module.bias == "optional" and bias in self.entries):
            self._claim(bias, *(shape[-1:] if selection.transposed else shape[:1]))
            has_bias = True
        if module.norm:
            norm = f"{bases[0]}{module.norm}".removeprefix(self.prefixes[0])
            self._fold(stock, own, norm, selection, has_bias=has_bias)
            return
        self._select(f"{stock}.weight", weight, selection)
        if has_bias:
            self._select(f"{stock}.bias", bias, replace(selection, transposed=False))
        elif module.bias in ("zeros", "optional") or (module.bias == "attention" and self.form.attention_biased):
            self._fill(f"{stock}.bias", weight, selection.shape(shape)[0], 0.0)

    def _head(self, head: Module) -> None:
        """Plan the output projection. Checkpoints with tied embeddings may omit it; one without a head has no head
        bias.
        """
        weights, bias = [f"{name}.weight" for name in head.own], f"{head.own[0]}.bias"
        if any(weight in self.entries for weight in weights):
            self._module(head, ("", ""))
            if self.form.unit_head is not None and _has_unit_head(self.source, *self.form.unit_head):
                tensor = self.tensors.pop()
                self._add(tensor.name, weights[0], tensor.shape, tensor.sources, arrays.unit_rows)
            return
        is_bare = bool(self.prefixes[0])
        if not is_bare and not self.stock.get("tie_word_embeddings"):
            self._claim(weights[0])  # raises: it is missing
        if is_bare or head.bias not in ("zeros", "optional"):
            return
        if head.bias == "optional" and bias in self.entries:
            self._select(f"{head.stock}.bias", bias, arrays.Selection())
            self._claim(bias)
        else:
            embedding = f"{self.form.before[0].own[0]}.weight"
            self._fill(f"{head.stock}.bias", embedding, self.entries[embedding][1].shape[0], 0.0)

    def _claim(self, name: str, *shape: int) -> TensorEntry:
        """The header of a source tensor, which must have this shape where one is given."""
        if name not in self.entries:
            raise ConfigError(f"tensor {name} is missing: the checkpoint is incomplete, download or copy it again")
        entry = self.entries[name][1]
        if shape and entry.shape != shape:
            raise ConfigError(
                f"tensor {name} has shape {list(entry.shape)}, expected {list(shape)}: the config and the weights do not "
                "belong together"
            )
        self.claimed.add(name)
        return entry

    def _selection(self, module: Module, weight: str, layer: int) -> arrays.Selection:
        """The rows of a module's heads in the projection that holds them."""
        form, head_dim = self.form, self.hidden_size // self.heads
        if form.fused_layout is None:
            [section] = layouts.separate("key", self.heads, head_dim)
            starts, total = dict.fromkeys(module.roles, section.starts), section.rows
        else:
            kv_heads = self.stock.get("num_key_value_heads", self.heads)
            sections = layouts.fused(form.fused_layout, self.heads, kv_heads, head_dim)
            starts, total = (
                {section.role: section.starts for section in sections},
                sum(section.rows for section in sections),
            )
        self._claim(weight, *((self.hidden_size, total) if form.transposed else (total, self.hidden_size)))
        factor = form.query_factor(self.source.config, layer)
        rows, factors = [], []
        for role in module.roles:
            rotated = 0
            if form.interleaved and role != "value":
                rotated = int(head_dim * self.stock["partial_rotary_factor"])
            rows.append(arrays.head_rows(starts[role], head_dim, rotated))
            factors.append(np.full(rows[-1].shape, factor if role == "query" else 1.0))
        joined, multiplied = (np.stack(each, axis=1).reshape(-1) for each in (rows, factors))
        return arrays.Selection(joined, None if factor == 1.0 else multiplied)

    def _select(self, name: str, own: str, selection: arrays.Selection) -> None:
        entry = self.entries[own][1]
        shape = selection.shape(entry.shape)
        compute = None if selection.rows is None and not selection.transposed else arrays.take
        self._add(name, own, shape, (own,), compute, wide=selection.factors is not None, selection=selection)

    def _fold(self, stock: str, own: str, norm: str, selection: arrays.Selection, *, has_bias: bool) -> None:
        """Plan a projection that takes over the gain and the bias of the norm before it."""
        weight, bias = f"{own}.weight", f"{own}.bias"
        shape = selection.shape(self.entries[weight][1].shape)
        for kind in ("weight", "bias"):
            self._claim(f"{norm}.{kind}", *shape[1:])
        gained = (weight, f"{norm}.weight")
        self._add(f"{stock}.weight", weight, shape, gained, arrays.take, wide=True, selection=selection)
        shifted = (weight, f"{norm}.bias", bias) if has_bias else (weight, f"{norm}.bias")
        like = bias if has_bias else weight
        self._add(f"{stock}.bias", like, shape[:1], shifted, arrays.fold_bias, wide=True, selection=selection)

    def _fill(self, name: str, like: str, length: int, value: float) -> None:
        self._add(name, like, (length,), (), arrays.fill, count=length, value=value)

    def _add(
        self,
        name: str,
        like: str,
        shape: tuple[int, ...],
        sources: tuple[str, ...],
        compute: Callable[..., Array] | None,
        *,
        wide: bool = False,
        **options: Any,
    ) -> None:
        """Add a tensor, in the file and the type of the source's tensor `like`, or in the type that is wide enough for
        products of it.
        """
        number, entry = self.entries[like]
        dtype = entry.dtype
        if compute is not None and dtype not in arrays.WIDE:
            raise UnsupportedFormatError(
                f"{like} has type {dtype}, which can't be rewritten: save the model in one float type"
            )
        if wide:
            dtype = arrays.WIDE[dtype]
            self.result_dtypes[name] = entry.dtype
        if compute is not None and options:
            compute = partial(compute, dtype=dtype, **options)
        self.tensors.append(RewrittenTensor(name, dtype, shape, number, sources, compute))


def _has_unit_head(checkpoint: Checkpoint, name: str, vocabulary: int) -> bool:
    """Whether the source's code scales the rows of its output projection: its text says so, or else the size of the
    vocabulary.
    """
    files = [file for file in checkpoint.carried if Path(file).name.startswith("modeling_") and file.endswith(".py")]
    if files and checkpoint.folder is not None:
        return any(name in (checkpoint.folder / file).read_text(encoding="utf-8", errors="replace") for file in files)
    return checkpoint.config.get("vocab_size") == vocabulary
