"""Plans a rewriting from the headers of a source: everything that can be refused is refused here."""

from collections.abc import Sequence
from functools import partial
from itertools import groupby
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
from gqa_convert.conversion.rewriting.model import Compute, Rewriting, RewrittenTensor
from gqa_convert.conversion.rewriting.remote_code import REMOTE_CODE
from gqa_convert.conversion.rewriting.stock_form import FOLDED, Module, NoStockClassError, StockForm, stock_config
from gqa_convert.errors import ConfigError, OptionError, UnsupportedFamilyError, UnsupportedFormatError
from gqa_convert.families import layouts
from gqa_convert.families.table import FAMILIES

_OWN_CODE = ("modeling_", "configuration_")
"""What the names of Python files begin with that the stock checkpoint does not need. A tokenizer's stay."""
_UNUSED = (
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
    model_type = str(config.get("model_type"))
    if model_type in REMOTE_CODE:
        try:
            return _rewrite(checkpoint, REMOTE_CODE[model_type])
        except NoStockClassError as problem:
            raise UnsupportedFamilyError(
                f"no stock class computes the same as this {model_type}, whose config.json has {problem}"
            ) from None
    family = FAMILIES.get(model_type)
    if family is None or family.modeling is None or family.is_converted or native is False:
        return None
    if not isinstance(groups, int):
        return None
    if native is None and groups == config.get(family.heads_key, config.get("num_attention_heads")):
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
    has_code = form.model_type in REMOTE_CODE
    config = stock_config(form, checkpoint.config)
    planner = _Planner(checkpoint, form, config)
    if form.modules:
        planner.plan_modules()
    else:
        for name, (_, entry) in planner.entries.items():
            planner.add(name, name, entry.shape, (name,))
    if form.bias_key:
        config[form.bias_key] = planner.has_biases
    notes = [f"the source, a {form.model_type}, is rewritten as a {form.stock}, which computes the same"]
    if not has_code:
        notes[0] += f" (--no-native keeps {form.model_type})"
    tokens = checkpoint.config.get(form.same_up_to)
    if isinstance(tokens, int):
        notes.append(
            f"the same up to {tokens:,} tokens; beyond them its custom code scales positions by the length of the text"
        )
    carried = checkpoint.carried
    if has_code:
        carried = tuple(
            name for name in carried if not (name.endswith(".py") and Path(name).name.startswith(_OWN_CODE))
        )
    return Rewriting(
        source=checkpoint,
        config=config,
        tensors=tuple(planner.tensors),
        carried=carried,
        result_dtypes=planner.result_dtypes,
        special_tokens=form.special_tokens,
        notes=tuple(notes),
    )


class _Planner:
    """Finds every tensor of the stock class among those of the source. A tensor left over is an error."""

    def __init__(self, source: Checkpoint, form: StockForm, stock: JsonObject) -> None:
        self.source, self.form, self.stock = source, form, stock
        self.entries = {name: (number, entry) for number, name, entry in source.tensors()}
        self.tensors: list[RewrittenTensor] = []
        self.result_dtypes: dict[str, str] = {}
        self.has_biases = False
        """Whether modules with bias `=` have one."""
        self._claimed: set[str] = set()
        self._heads = stock.get("n_head") or stock["num_attention_heads"]
        self._hidden_size = stock.get("n_embd") or stock["hidden_size"]
        self._head_dim = self._hidden_size // self._heads
        self._prefixes = ("", "")
        """What the names lack in the source, which may be a model without its head, and in the rewritten source."""
        if self._hidden_size % self._heads:
            raise ConfigError(
                f"config.json has {self._heads} heads, which do not divide the hidden size {self._hidden_size}: repair the config"
            )

    def plan_modules(self) -> None:
        """Plan all tensors, in the order of the stock class.

        Raises:
            ConfigError: a tensor is missing, has another shape than the config says, or belongs to no module.
        """
        form = self.form
        embedding = f"{form.modules[0].own[0]}.weight"
        if embedding not in self.entries and embedding.removeprefix(form.prefixes[0]) in self.entries:
            self._prefixes = form.prefixes
        self._embedding = embedding.removeprefix(self._prefixes[0])
        if form.own_bias_key:
            self.has_biases = bool(self.source.config.get(form.own_bias_key, True))
        else:
            first = [self._names(module, 0)[0] for module in form.modules if module.bias == "="]
            self.has_biases = any(f"{own}.bias" in self.entries for own in first)
        layers = self.stock.get("n_layer") or self.stock["num_hidden_layers"]
        for in_layer, group in groupby(form.modules, lambda module: module.in_layer):
            modules = list(group)
            for layer in range(layers) if in_layer else [None]:
                for module in modules:
                    self._module(module, layer)
        for name in self.entries:
            if name not in self._claimed and not name.endswith(_UNUSED):
                raise ConfigError(
                    f"tensor {name} does not belong to a {form.model_type} checkpoint with {layers} layers: the config and the "
                    "weights do not belong together"
                )

    def _names(self, module: Module, layer: int | None) -> tuple[str, str]:
        """The names of a module in the source and in the stock type."""
        own_base = stock_base = ""
        if layer is not None:
            own_base, stock_base = (f"{place}.{layer}." for place in self.form.layers)
        possible = [f"{own_base}{name}".removeprefix(self._prefixes[0]) for name in module.own]
        own = next((name for name in possible if f"{name}.weight" in self.entries), possible[0])
        return own, f"{stock_base}{module.stock}".removeprefix(self._prefixes[1])

    def _module(self, module: Module, layer: int | None) -> None:
        """Plan the weight and the bias of a module."""
        own, stock = self._names(module, layer)
        if module.norm == FOLDED:
            for kind, value in (("weight", 1.0), ("bias", 0.0)):
                self._claim(f"{own}.{kind}", self._hidden_size)
                self._fill(f"{stock}.{kind}", f"{own}.{kind}", self._hidden_size, value)
        elif module is self.form.modules[-1] and f"{own}.weight" not in self.entries:
            self._absent_head(module, own, stock)
        elif module.norm:
            self._fold(module, own, stock)
        else:
            self._move(module, own, stock, layer)

    def _absent_head(self, module: Module, own: str, stock: str) -> None:
        """Plan the bias of an output projection without a weight of its own."""
        if self._prefixes[0]:  # a model without its head
            return
        if not self.stock.get("tie_word_embeddings"):
            self._claim(f"{own}.weight")  # raises: it is missing
        rows = self.entries[self._embedding][1].shape[0]
        self._bias(module, own, stock, self._embedding, (rows, rows), None)

    def _fold(self, module: Module, own: str, stock: str) -> None:
        """Plan a projection that takes over the gain and the bias of the norm before it."""
        weight, bias, norm = f"{own}.weight", f"{own}.bias", own.removesuffix(module.own[0]) + module.norm
        shape = self._claim(weight).shape
        self._claim(f"{norm}.weight", *shape[1:])
        self._claim(f"{norm}.bias", *shape[1:])
        rows = self._head_rows(module, weight) if module.roles else None
        folded = shape if rows is None else (len(rows), *shape[1:])
        fold_gain, fold_bias = partial(arrays.fold_gain, rows=rows), partial(arrays.fold_bias, rows=rows)
        self.add(f"{stock}.weight", weight, folded, (weight, f"{norm}.weight"), fold_gain, wide=True)
        sources = [weight, f"{norm}.bias"]
        if self._has_bias(module, bias, shape[0]):
            sources.append(bias)
        like = bias if bias in sources else weight
        self.add(f"{stock}.bias", like, folded[:1], tuple(sources), fold_bias, wide=True)

    def _move(self, module: Module, own: str, stock: str, layer: int | None) -> None:
        """Plan a module whose rows at most change their order."""
        weight = f"{own}.weight"
        shape = self._claim(weight).shape
        is_transposed = self.form.transposed and layer is not None and len(shape) == 2
        if is_transposed:
            shape = shape[::-1]
        own_rows, rows, factors = shape[0], None, None
        if module.roles:
            rows = self._head_rows(module, weight)
            shape = (len(rows), *shape[1:])
            factors = self._factors(module, layer or 0)
        move = partial(arrays.move, rows=rows, factors=factors)
        compute: Compute | None = None
        if rows is not None or is_transposed:
            compute = partial(move, transposed=is_transposed)
        if module is self.form.modules[-1] and self._has_unit_head():
            compute = arrays.unit_rows
        self.add(f"{stock}.weight", weight, shape, (weight,), compute, wide=factors is not None)
        compute = None if rows is None else partial(move, transposed=False)
        self._bias(module, own, stock, weight, (own_rows, shape[0]), compute, wide=factors is not None)

    def _bias(
        self,
        module: Module,
        own: str,
        stock: str,
        like: str,
        rows: tuple[int, int],
        compute: Compute | None,
        *,
        wide: bool = False,
    ) -> None:
        """Plan the bias of a module, with so many numbers in the source and in the rewritten source."""
        bias = f"{own}.bias"
        if self._has_bias(module, bias, rows[0]):
            self.add(f"{stock}.bias", bias, rows[1:], (bias,), compute, wide=wide)
        elif module.bias in "0?" or (module.bias == "=" and not self.form.bias_key):
            self._fill(f"{stock}.bias", like, rows[1], 0.0)

    def _has_bias(self, module: Module, bias: str, rows: int) -> bool:
        """Whether a module of the source has a bias, which then must have so many numbers."""
        stated = {"+": True, "=": self.has_biases, "?": bias in self.entries}
        if not stated.get(module.bias, False):
            return False
        self._claim(bias, rows)
        return True

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
        self._claimed.add(name)
        return entry

    def _head_rows(self, module: Module, weight: str) -> Array:
        """The rows of a module's heads in the projection that holds them."""
        form, head_dim = self.form, self._head_dim
        if form.fused_layout is None:
            sections = layouts.separate("key", self._heads, head_dim)
            starts = dict.fromkeys(module.roles, sections[0].starts)
        else:
            kv_heads = self.stock["num_key_value_heads"]
            sections = layouts.fused(form.fused_layout, self._heads, kv_heads, head_dim)
            starts = {section.role: section.starts for section in sections}
        total = sum(section.rows for section in sections)
        self._claim(weight, *((self._hidden_size, total) if form.transposed else (total, self._hidden_size)))
        rows = []
        for role in module.roles:
            is_turned = form.interleaved and role != "value"
            rotated = int(head_dim * self.stock["partial_rotary_factor"]) if is_turned else 0
            rows.append(arrays.head_rows(starts[role], head_dim, rotated))
        return np.stack(rows, axis=1).reshape(-1)

    def _factors(self, module: Module, layer: int) -> Array | None:
        """What the rows are multiplied by; None if it is 1."""
        factor = self.form.query_factor(self.source.config, layer)
        if factor == 1.0:
            return None
        factors = np.ones((self._heads, len(module.roles), self._head_dim))
        factors[:, module.roles.index("query")] = factor
        return factors.reshape(-1)

    def _has_unit_head(self) -> bool:
        """Whether the source's code scales the rows of its output projection: its text says so, or else the size of the
        vocabulary.
        """
        if self.form.unit_head is None:
            return False
        name, vocabulary = self.form.unit_head
        files = [file for file in self.source.carried if Path(file).match("modeling_*.py")]
        if files and self.source.folder is not None:
            texts = [(self.source.folder / file).read_text(encoding="utf-8", errors="replace") for file in files]
            return any(name in text for text in texts)
        return bool(self.source.config.get("vocab_size") == vocabulary)

    def _fill(self, name: str, like: str, count: int, value: float) -> None:
        self.add(name, like, (count,), (), partial(arrays.fill, count=count, value=value))

    def add(
        self,
        name: str,
        like: str,
        shape: tuple[int, ...],
        sources: tuple[str, ...],
        compute: Compute | None = None,
        *,
        wide: bool = False,
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
        self.tensors.append(RewrittenTensor(name, dtype, shape, number, sources, compute))
