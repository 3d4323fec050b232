"""Plans a rewriting from the headers of a source: everything that can be refused is refused here."""

from collections.abc import Sequence
from functools import partial
from itertools import groupby
from typing import Any

from gqa_convert.checkpoint.headers import TensorEntry
from gqa_convert.checkpoint.quantised import quantisation_method
from gqa_convert.checkpoint.source import Checkpoint
from gqa_convert.checkpoint.strict_json import Config, JsonObject
from gqa_convert.conversion.rewriting import arrays
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
            there is one and the number of heads changes (None). A type that has no modelling file is always rewritten.

    Raises:
        UnsupportedFamilyError: no stock class computes the same as a type that has no other form.
        ConfigError: the tensors do not belong to the config.
        UnsupportedFormatError: a tensor has a type that can't be read in numbers.
        OptionError: `native`, and no stock class computes the same; or not `native`, and there is no modelling file.
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
    if family is None or family.is_converted or not isinstance(groups, int):
        return None
    if family.becomes:
        return _rewrite_always(checkpoint, groups, family.becomes, native=native)
    if family.modeling is None or native is False:
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


def _rewrite_always(checkpoint: Checkpoint, groups: int, stock: str, *, native: bool | None) -> Rewriting:
    """Plan the rewriting of a type that has no modelling file."""
    model_type = checkpoint.config["model_type"]
    if native is False:
        raise OptionError(f"--no-native: a {model_type} has no modelling file: leave the option out to get a {stock}")
    try:
        return _rewrite(checkpoint, stock_form(checkpoint.config, groups))
    except NoStockClassError as problem:
        raise UnsupportedFamilyError(
            f"this {model_type} can't become a {stock}, which has K/V heads of their own number: {problem}"
        ) from None


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
    config = stock_config(form, checkpoint.config)
    planner = _Planner(checkpoint, form, config)
    if form.modules:
        planner.plan_modules()
    else:
        for name, (_, entry) in planner.entries.items():
            planner.add(name, entry.shape, (name,))
    if form.bias_key:
        config[form.bias_key] = planner.has_biases
    note = f"the source, a {form.model_type}, is rewritten as a {form.stock}, which computes the same"
    if form.model_type not in REMOTE_CODE and not FAMILIES[form.model_type].becomes:
        note += f" (--no-native keeps {form.model_type})"
    notes = [note]
    tokens = checkpoint.config.get(form.same_up_to)
    if isinstance(tokens, int):
        notes.append(
            f"the same up to {tokens:,} tokens; beyond them its custom code scales positions by the length of the text"
        )
    return Rewriting(
        source=checkpoint,
        config=config,
        tensors=tuple(planner.tensors),
        carried=tuple(name for name in checkpoint.carried if not name.startswith(_OWN_CODE)),
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
        """Whether the attention has biases."""
        self._left = set(self.entries)
        """Tensors of the source that no module has taken."""
        self._heads = stock.get("n_head") or stock["num_attention_heads"]
        self._hidden_size = stock.get("n_embd") or stock["hidden_size"]
        self._missing_prefix = ""
        """What the names lack in a source that is a model without its head."""

    def plan_modules(self) -> None:
        """Plan all tensors, in the order of the stock class.

        Raises:
            ConfigError: a tensor is missing, has another shape than the config says, or belongs to no module.
        """
        form = self.form
        if self._hidden_size % self._heads:
            raise ConfigError(
                f"config.json has {self._heads} heads, which do not divide the hidden size {self._hidden_size}: repair the config"
            )
        embedding = f"{form.modules[0].own[0]}.weight"
        if embedding not in self.entries and embedding.removeprefix(form.prefix) in self.entries:
            self._missing_prefix = form.prefix
        attention = [self._own_name(module, 0) for module in form.modules if "attn." in module.stock]
        self.has_biases = any(f"{name}.bias" in self.entries for name in attention)
        if self.has_biases and self.source.config.get(form.own_bias_key) is False:
            raise ConfigError(
                f"config.json has {form.own_bias_key} = False, and {attention[0]} has a bias: the config and the weights do not "
                "belong together"
            )
        layers = self.stock.get("n_layer") or self.stock["num_hidden_layers"]
        for in_layer, group in groupby(form.modules, lambda module: module.in_layer):
            modules = list(group)
            for layer in range(layers if in_layer else 1):
                for module in modules:
                    self._module(module, layer)
        for name in self.entries:
            if name in self._left and not name.endswith(_UNUSED):
                raise ConfigError(
                    f"tensor {name} does not belong to a {form.model_type} checkpoint with {layers} layers: the config and the "
                    "weights do not belong together"
                )

    def _own_name(self, module: Module, layer: int) -> str:
        """The name of a module in the source."""
        base = f"{self.form.layers[0]}.{layer}." if module.in_layer else ""
        names = [f"{base}{name}".removeprefix(self._missing_prefix) for name in module.own]
        return next((name for name in names if f"{name}.weight" in self.entries), names[0])

    def _module(self, module: Module, layer: int) -> None:
        """Plan the weight and the bias of a module."""
        own = self._own_name(module, layer)
        stock = f"{self.form.layers[1]}.{layer}.{module.stock}" if module.in_layer else module.stock
        if module is self.form.modules[-1] and f"{own}.weight" not in self.entries:
            self._absent_head(module, own, stock)
        elif module.norm == FOLDED:
            for kind, value in (("weight", 1.0), ("bias", 0.0)):
                self._take(f"{own}.{kind}", self._hidden_size)
                self._fill(f"{stock}.{kind}", f"{own}.{kind}", self._hidden_size, value)
        elif module.norm:
            self._fold(module, own, stock)
        else:
            self._move(module, own, stock)

    def _absent_head(self, module: Module, own: str, stock: str) -> None:
        """Plan the bias of an output projection that has no weight of its own."""
        embedding = f"{self._own_name(self.form.modules[0], 0)}.weight"
        if self._missing_prefix:
            return  # a model without its head
        if not self.stock.get("tie_word_embeddings"):
            self._take(f"{own}.weight")  # raises: it is missing
        self._bias(module, own, stock, embedding, self.entries[embedding][1].shape[0], None)

    def _fold(self, module: Module, own: str, stock: str) -> None:
        """Plan a projection that takes over the gain and the bias of the norm before it."""
        weight, bias, norm = f"{own}.weight", f"{own}.bias", own.removesuffix(module.own[0]) + module.norm
        count, width = self._take(weight).shape
        self._take(f"{norm}.weight", width)
        self._take(f"{norm}.bias", width)
        heads = self._heads_of(module, weight)
        rows = heads.rows if heads else count
        fold_gain, fold_bias = partial(arrays.fold_gain, heads=heads), partial(arrays.fold_bias, heads=heads)
        self.add(f"{stock}.weight", (rows, width), (weight, f"{norm}.weight"), fold_gain, wide=True)
        sources = [weight, f"{norm}.bias"]
        if bias in self.entries:
            self._take(bias, count)
            sources.append(bias)
        self.add(f"{stock}.bias", (rows,), tuple(sources), fold_bias, like=sources[-1], wide=True)

    def _move(self, module: Module, own: str, stock: str) -> None:
        """Plan a module whose numbers stay as they are, but for the order of rows and axes, and for rows of length one."""
        weight = f"{own}.weight"
        shape = self._take(weight).shape
        heads = self._heads_of(module, weight)
        is_transposed = self.form.transposed and module.in_layer and len(shape) == 2
        compute: Compute | None = None
        if module is self.form.modules[-1] and self.form.unit_head in (self.source.config.get("architectures") or ()):
            compute = arrays.unit_rows
        elif heads or is_transposed:
            compute = partial(arrays.move, heads=heads, is_transposed=is_transposed)
        if is_transposed:
            shape = shape[::-1]
        rows = heads.rows if heads else shape[0]
        self.add(f"{stock}.weight", (rows, *shape[1:]), (weight,), compute)
        self._bias(module, own, stock, weight, shape[0], heads)

    def _bias(self, module: Module, own: str, stock: str, weight: str, count: int, heads: arrays.Heads | None) -> None:
        """Plan the bias beside a weight of `count` rows, of which those of some heads are taken."""
        rows = heads.rows if heads else count
        if f"{own}.bias" in self.entries:
            self._take(f"{own}.bias", count)
            compute = partial(arrays.move, heads=heads) if heads else None
            self.add(f"{stock}.bias", (rows,), (f"{own}.bias",), compute)
        elif module.has_bias:
            self._fill(f"{stock}.bias", weight, rows, 0.0)

    def _heads_of(self, module: Module, weight: str) -> arrays.Heads | None:
        """A module's heads in the projection that holds them; None if it is taken as it is."""
        if not module.roles:
            return None
        form, head_dim = self.form, self._hidden_size // self._heads
        rotated = int(head_dim * self.stock["partial_rotary_factor"]) if form.interleaved else 0
        if form.fused_layout is None:
            sections = layouts.separate(module.roles[0], self._heads, head_dim)
        else:
            sections = layouts.fused(form.fused_layout, self._heads, self.stock["num_key_value_heads"], head_dim)
        shape = (sum(section.rows for section in sections), self._hidden_size)
        self._take(weight, *(shape[::-1] if form.transposed else shape))
        return arrays.Heads(sections, module.roles, rotated)

    def _take(self, name: str, *shape: int) -> TensorEntry:
        """The header of a source tensor, which must have this shape where one is given."""
        if name not in self.entries:
            raise ConfigError(f"tensor {name} is missing: the checkpoint is incomplete, download or copy it again")
        entry = self.entries[name][1]
        if shape and entry.shape != shape:
            raise ConfigError(
                f"tensor {name} has shape {list(entry.shape)}, expected {list(shape)}: the config and the weights do not "
                "belong together"
            )
        self._left.discard(name)
        return entry

    def _fill(self, name: str, like: str, count: int, value: float) -> None:
        self.add(name, (count,), (), partial(arrays.fill, count=count, value=value), like=like)

    def add(
        self,
        name: str,
        shape: tuple[int, ...],
        sources: tuple[str, ...],
        compute: Compute | None = None,
        *,
        like: str = "",
        wide: bool = False,
    ) -> None:
        """Add a tensor, in the file and the type of the source's tensor `like`, by default the first that it is computed
        from, or in the type that is wide enough for products of it.
        """
        number, entry = self.entries[like or sources[0]]
        dtype = entry.dtype
        if compute is not None and dtype not in arrays.WIDE:
            raise UnsupportedFormatError(
                f"{like or sources[0]} has type {dtype}, which can't be rewritten: save the model in one float type"
            )
        if wide:
            dtype = arrays.WIDE[dtype]
            self.result_dtypes[name] = entry.dtype
        self.tensors.append(RewrittenTensor(name, dtype, shape, number, sources, compute))
