"""Plans how the tensors of a stock class come from those of a source."""

from functools import partial
from itertools import groupby

from gqa_convert.checkpoint.source import Checkpoint
from gqa_convert.checkpoint.strict_json import JsonObject
from gqa_convert.conversion.rewriting import arrays
from gqa_convert.conversion.rewriting.recipes import Compute, OtherForm, Shape
from gqa_convert.conversion.rewriting.stock_form import FOLDED, Module, StockForm, modules_of, stock_config
from gqa_convert.errors import ConfigError, UnsupportedFormatError
from gqa_convert.families import layouts
from gqa_convert.merging.factorisation import Array

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
)
"""Ends of the names of buffers that old versions saved and that no class reads."""


def as_stock_type(checkpoint: Checkpoint, form: StockForm, *, can_stay: bool = False) -> Checkpoint:
    """A source as one of the stock type.

    Args:
        checkpoint: the source.
        form: of its model type.
        can_stay: whether the source's type has a modelling file.

    Raises:
        NoStockClassError: the stock class does not compute the same.
        ConfigError: a tensor is missing, has another shape than the config says, or belongs to no module.
        UnsupportedFormatError: a tensor has a type that can't be read in numbers.
    """
    config = stock_config(form, checkpoint.config)
    stock = _StockTensors(checkpoint, form, config)
    stock.add_all()
    if form.bias_key:
        config[form.bias_key] = any("attn." in name and name.endswith("bias") for name in stock.form.recipes)
    keep = f" (--no-native keeps {form.model_type})" if can_stay else ""
    notes = [f"the source, a {form.model_type}, is rewritten as a {form.stock}, which computes the same{keep}"]
    tokens = checkpoint.config.get(form.same_up_to)
    if isinstance(tokens, int):
        notes.append(
            f"the same up to {tokens:,} tokens; beyond them its custom code scales positions by the length of the text"
        )
    return stock.form.checkpoint(
        config,
        tuple(notes),
        carried=tuple(name for name in checkpoint.carried if not name.startswith(_OWN_CODE)),
        result_dtypes=stock.result_dtypes,
        tokenizer_defaults=form.tokenizer_defaults,
    )


class _StockTensors:
    """Finds every tensor of the stock class among those of the source. A tensor left over is an error."""

    def __init__(self, source: Checkpoint, form: StockForm, config: JsonObject) -> None:
        self.form = OtherForm(source)
        self.result_dtypes: dict[str, str] = {}
        self._stock = form
        self._config = config
        self._modules = modules_of(form)
        self._entries = {name: (number, entry) for number, name, entry in source.tensors()}
        self._is_unit_head = form.unit_head in (source.config.get("architectures") or ())
        self._missing_prefix = ""
        """What the names lack in a source that is a model without its head."""

    def add_all(self) -> None:
        """Add all tensors, in the order of the stock class."""
        form, modules = self._stock, self._modules
        if not modules:
            for name, (_, entry) in self._entries.items():
                self._add(name, entry.shape, (name,))
            return
        embedding = f"{modules[0].own[0]}.weight"
        if embedding not in self._entries and embedding.removeprefix(form.prefix) in self._entries:
            self._missing_prefix = form.prefix
            modules = modules[:-1]
        layers = self._config.get("n_layer") or self._config["num_hidden_layers"]
        for in_layer, group in groupby(modules, lambda module: module.in_layer):
            alike = [(module, *self._heads_of(module)) for module in group]
            for layer in range(layers if in_layer else 1):
                for module, rows, shape in alike:
                    self._add_module(module, layer, rows, shape)
        taken = {name for recipe in self.form.recipes.values() for name in recipe.sources}
        for name in self._entries:
            if name not in taken and not name.endswith(_UNUSED):
                raise ConfigError(
                    f"tensor {name} does not belong to a {form.model_type} checkpoint with {layers} layers: the config and the "
                    "weights do not belong together"
                )

    def _heads_of(self, module: Module) -> tuple[Array | None, Shape | None]:
        """The rows of a projection in the source that hold a module's heads, and the shape of the projection's weight;
        None where a module is taken as it is.
        """
        if not module.roles:
            return None, None
        form, config = self._stock, self._config
        heads = config.get("n_head") or config["num_attention_heads"]
        hidden_size = config.get("n_embd") or config["hidden_size"]
        head_dim = hidden_size // heads
        rotated = int(head_dim * config["partial_rotary_factor"]) if form.interleaved else 0
        if form.fused_layout is None:
            sections = layouts.separate(module.roles[0], heads, head_dim)
        else:
            sections = layouts.fused(form.fused_layout, heads, config["num_key_value_heads"], head_dim)
        count = sum(section.rows for section in sections)
        shape = (hidden_size, count) if form.transposed else (count, hidden_size)
        return arrays.head_rows(sections, module.roles, rotated), shape

    def _name(self, module: Module, layer: int) -> str:
        """The name of a module in the source."""
        base = f"{self._stock.layers[0]}.{layer}." if module.in_layer else ""
        names = [f"{base}{name}".removeprefix(self._missing_prefix) for name in module.own]
        return next((name for name in names if f"{name}.weight" in self._entries), names[0])

    def _add_module(self, module: Module, layer: int, rows: Array | None, stored: Shape | None) -> None:
        """Add the weight and the bias of a module.

        Args:
            module: one of the form's.
            layer: its number.
            rows: those of the source that are taken; None for all.
            stored: the shape of the source's weight, if it is known.
        """
        own = self._name(module, layer)
        stock = f"{self._stock.layers[1]}.{layer}.{module.stock}" if module.in_layer else module.stock
        weight, bias = f"{own}.weight", f"{own}.bias"
        is_head = module is self._modules[-1]
        is_tied = is_head and weight not in self._entries and self._config.get("tie_word_embeddings")
        if is_tied:
            weight = f"{self._name(self._modules[0], 0)}.weight"
        shape = self._checked_shape(weight, stored)
        is_transposed = self._stock.transposed and module.in_layer and len(shape) == 2
        count, *inputs = shape[::-1] if is_transposed else shape
        if module.norm == FOLDED:
            self._checked_shape(bias, shape)
            self._add(f"{stock}.weight", shape, (weight,), partial(arrays.fill, count=count, value=1.0))
            self._add(f"{stock}.bias", shape, (bias,), partial(arrays.fill, count=count, value=0.0))
            return
        taken = count if rows is None else len(rows)
        biases = (bias,) if bias in self._entries else ()
        for name in biases:
            self._checked_shape(name, (count,))
        if module.norm:
            norm = own.removesuffix(module.own[0]) + module.norm
            gain, shift = f"{norm}.weight", f"{norm}.bias"
            for name in (gain, shift):
                self._checked_shape(name, (*inputs,))
            fold, fold_bias = partial(arrays.fold_gain, rows=rows), partial(arrays.fold_bias, rows=rows)
            self._add(f"{stock}.weight", (taken, *inputs), (weight, gain), fold, is_product=True)
            self._add(f"{stock}.bias", (taken,), (*biases, shift, weight), fold_bias, is_product=True)
            return
        compute: Compute | None = None
        compute_bias: Compute | None = None
        if is_head and self._is_unit_head:
            compute = arrays.unit_rows
        elif rows is not None or is_transposed:
            compute = partial(arrays.move, rows=rows, is_transposed=is_transposed)
            compute_bias = partial(arrays.move, rows=rows)
        if not is_tied:
            self._add(f"{stock}.weight", (taken, *inputs), (weight,), compute)
        if biases:
            self._add(f"{stock}.bias", (taken,), biases, compute_bias)
        elif module.has_bias:
            self._add(f"{stock}.bias", (taken,), (weight,), partial(arrays.fill, count=taken, value=0.0))

    def _checked_shape(self, name: str, shape: Shape | None) -> Shape:
        """The shape of a tensor of the source, which must be this one if one is given."""
        if name not in self._entries:
            raise ConfigError(f"tensor {name} is missing: the checkpoint is incomplete, download or copy it again")
        found = self._entries[name][1].shape
        if shape not in (None, found):
            raise ConfigError(
                f"tensor {name} has shape {list(found)}, expected {list(shape or ())}: the config and the weights do not "
                "belong together"
            )
        return found

    def _add(
        self,
        name: str,
        shape: Shape,
        sources: tuple[str, ...],
        compute: Compute | None = None,
        is_product: bool = False,
    ) -> None:
        """Add a tensor in the file and the type of the first of its sources.

        Args:
            name: in the stock checkpoint.
            shape: there.
            sources: the tensors of the source that it is computed from.
            compute: as in `Recipe`.
            is_product: whether numbers are multiplied, which takes a wider type until the result is written.
        """
        number, entry = self._entries[sources[0]]
        dtype = entry.dtype
        if compute is not None and dtype not in arrays.WIDE:
            raise UnsupportedFormatError(
                f"{sources[0]} has type {dtype}, which can't be rewritten: save the model in one float type"
            )
        if is_product:
            dtype = arrays.WIDE[dtype]
            self.result_dtypes[name] = entry.dtype
        self.form.add(name, dtype, shape, number, sources, compute)
