"""Plans a rewriting from the headers of a source: everything that can be refused is refused here."""

import copy
from collections.abc import Sequence
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
from gqa_convert.conversion.rewriting.decoders import DECODERS, count, stock_form
from gqa_convert.conversion.rewriting.dequantising import plan_dequantising
from gqa_convert.conversion.rewriting.model import Rewriting, RewrittenTensor
from gqa_convert.conversion.rewriting.remote_code import REMOTE_CODE
from gqa_convert.conversion.rewriting.stock_form import Module, NoStockClassError, StockForm
from gqa_convert.errors import ConfigError, OptionError, UnsupportedFamilyError, UnsupportedFormatError
from gqa_convert.families import layouts
from gqa_convert.families.table import FAMILIES

_OWN_CODE = ("modeling_", "configuration_")
"""What the names of Python files begin with that the stock checkpoint does not need. A tokenizer's stay."""


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
        special_tokens=dict(form.special_tokens),
        notes=tuple(notes),
    )


def _is_own_code(name: str, form: StockForm) -> bool:
    return form.model_type in REMOTE_CODE and name.endswith(".py") and Path(name).name.startswith(_OWN_CODE)


def _stock_config(config: Config, form: StockForm) -> JsonObject:
    """The stock type's config. Keys that belong neither to the source's type nor to the stock type's are copied.

    Raises:
        NoStockClassError: it describes something that the stock class does not compute.
    """
    classes = dict(form.classes)
    stated = config.get("architectures") or [form.classes[0][0]]
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
        self.entries: dict[str, tuple[int, TensorEntry]] = {}
        for number, name, entry in source.tensors():
            self.entries[name] = (number, entry)
        self.claimed: set[str] = set()
        self.tensors: list[RewrittenTensor] = []
        self.result_dtypes: dict[str, str] = {}
        self.hidden = count(stock, "hidden_size", "n_embd")
        self.heads = count(stock, "num_attention_heads", "n_head")
        self.bare = self._is_bare()
        self.biased = self._attention_biased()

    def plan(self) -> None:
        form = self.form
        if form.norm is None or form.head is None:
            for name, (number, entry) in self.entries.items():
                self.tensors.append(RewrittenTensor(name, entry.dtype, entry.shape, number, (name,)))
            return
        for module in form.embeddings:
            self._module(module, "", "")
        layers = count(self.stock, "num_hidden_layers", "n_layer")
        for layer in range(layers):
            own, stock = (f"{self._named(place, which)}.{layer}." for which, place in enumerate(form.layers))
            for module in form.inside:
                self._module(module, own, stock, layer)
        self._module(form.norm, "", "")
        self._head(form.head)
        for name in self.entries:
            if name not in self.claimed and not name.endswith(form.stale):
                raise ConfigError(
                    f"tensor {name} does not belong to a {form.model_type} checkpoint with {layers} layers: the config and the "
                    "weights do not belong together"
                )

    def _is_bare(self) -> bool:
        """Whether the source is a model without its head, whose names lack the prefix."""
        prefix = self.form.prefixes[0]
        if not prefix:
            return False
        embedding = f"{self.form.embeddings[0].own[0]}.weight"
        return embedding not in self.entries and embedding.removeprefix(prefix) in self.entries

    def _named(self, name: str, which: int) -> str:
        return name.removeprefix(self.form.prefixes[which]) if self.bare else name

    def _attention_biased(self) -> bool:
        """Whether modules with bias `attention` have one."""
        if self.form.attention_biased is not None:
            return self.form.attention_biased(self.source.config)
        modules = [module for module in self.form.inside if module.bias == "attention"]
        names = [f"{self.form.layers[0]}.0.{own}.bias" for module in modules for own in module.own]
        return any(name in self.entries for name in names)

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

    def _wide(self, name: str, entry: TensorEntry) -> str:
        """The type in which a tensor is held that arithmetic makes."""
        if entry.dtype not in arrays.WIDE:
            raise UnsupportedFormatError(
                f"{name} has type {entry.dtype}, which can't be rewritten: save the model in one float type"
            )
        return arrays.WIDE[entry.dtype]

    def _add(
        self, name: str, like: str, dtype: str, shape: tuple[int, ...], sources: tuple[str, ...], compute: Any
    ) -> None:
        """Add a tensor, in the file of the source's tensor `like`."""
        number, entry = self.entries[like]
        if dtype != entry.dtype:
            self.result_dtypes[name] = entry.dtype
        self.tensors.append(RewrittenTensor(name, dtype, shape, number, sources, compute))

    def _module(self, module: Module, own_base: str, stock_base: str, layer: int = 0) -> None:
        form = self.form
        own_names = [own_base + self._named(name, 0) for name in module.own]
        own = next((name for name in own_names if f"{name}.weight" in self.entries), own_names[0])
        stock = stock_base + self._named(module.stock, 1)
        if module.neutral:
            self._neutral_norm(own, stock)
            return
        weight, bias = f"{own}.weight", f"{own}.bias"
        entry = self._claim(weight)
        transposed = form.transposed and bool(own_base) and len(entry.shape) == 2
        rows, factors = self._rows(module, weight, layer)
        self._tensor(f"{stock}.weight", weight, rows, factors, transposed, module, own_base)
        present = module.bias == "always" or (module.bias == "attention" and self.biased)
        present |= module.bias == "optional" and bias in self.entries
        if present:
            self._claim(bias)
            if rows is not None:
                self._claim(bias, entry.shape[1 if transposed else 0])
        if module.norm:
            self._folded_bias(
                f"{stock}.bias", weight, bias if present else None, rows, transposed, own_base + module.norm
            )
        elif present:
            self._tensor(f"{stock}.bias", bias, rows, factors, False, module, own_base)
        elif module.bias in ("zeros", "optional") or (module.bias == "attention" and form.attention_biased is not None):
            length = len(rows) if rows is not None else entry.shape[1 if transposed else 0]
            self._filled(f"{stock}.bias", weight, length, 0.0)

    def _head(self, head: Module) -> None:
        """The output projection. Checkpoints with tied embeddings may omit it; one without a head has no head bias."""
        weights = [f"{own}.weight" for own in head.own]
        if any(weight in self.entries for weight in weights):
            self._module(head, "", "")
            if self.form.unit_head is not None and _has_unit_head(self.source, *self.form.unit_head):
                self._scale_to_unit_rows(weights[0])
            return
        if not self.stock.get("tie_word_embeddings") and not self.bare:
            self._claim(weights[0])  # raises: it is missing
        if self.bare or head.bias not in ("zeros", "optional"):
            return
        bias = f"{head.own[0]}.bias"
        if head.bias == "optional" and bias in self.entries:
            entry = self._claim(bias)
            self._add(f"{head.stock}.bias", bias, entry.dtype, entry.shape, (bias,), None)
            return
        embedding = f"{self.form.embeddings[0].own[0]}.weight"
        self._filled(f"{head.stock}.bias", embedding, self.entries[embedding][1].shape[0], 0.0)

    def _scale_to_unit_rows(self, weight: str) -> None:
        tensor = self.tensors.pop()
        self._wide(weight, self.entries[weight][1])
        self._add(tensor.name, weight, tensor.dtype, tensor.shape, tensor.sources, arrays.unit_rows)

    def _neutral_norm(self, own: str, stock: str) -> None:
        for kind, value in (("weight", 1.0), ("bias", 0.0)):
            self._claim(f"{own}.{kind}", self.hidden)
            self._filled(f"{stock}.{kind}", f"{own}.{kind}", self.hidden, value)

    def _filled(self, name: str, like: str, length: int, value: float) -> None:
        entry = self.entries[like][1]
        self._wide(like, entry)
        compute = partial(arrays.fill, count=length, value=value, dtype=entry.dtype)
        self._add(name, like, entry.dtype, (length,), (), compute)

    def _rows(self, module: Module, weight: str, layer: int) -> tuple[Array | None, Array | None]:
        """The rows of a module's heads in the projection that holds them, and what each is multiplied by; None for all
        rows, and where nothing is multiplied.
        """
        if not module.roles:
            return None, None
        kv_heads = self.stock.get("num_key_value_heads", self.heads)
        head_dim = self.hidden // self.heads
        if self.form.fused_layout is not None:
            sections = layouts.fused(self.form.fused_layout, self.heads, kv_heads, head_dim)
        else:
            counts = {"query": self.heads, "key": kv_heads, "value": kv_heads}
            sections = layouts.separate(module.roles[0], counts[module.roles[0]], head_dim)
        total = sum(section.rows for section in sections)
        columns = self.hidden
        self._claim(weight, *((columns, total) if self.form.transposed else (total, columns)))
        factor = self.form.query_factor(self.source.config, layer)
        rows, factors = [], []
        for role in module.roles:
            starts = next(section.starts for section in sections if section.role == role)
            rotated = self._rotated(head_dim) if role != "value" else 0
            rows.append(arrays.head_rows(starts, head_dim, rotated))
            factors.append(np.full(rows[-1].shape, factor if role == "query" else 1.0))
        joined = np.stack(rows, axis=1).reshape(-1)
        return joined, np.stack(factors, axis=1).reshape(-1) if factor != 1.0 else None

    def _rotated(self, head_dim: int) -> int:
        """How many rows of a head are in pairs of neighbours."""
        return int(head_dim * self.stock["partial_rotary_factor"]) if self.form.interleaved else 0

    def _tensor(
        self,
        name: str,
        own: str,
        rows: Array | None,
        factors: Array | None,
        transposed: bool,
        module: Module,
        base: str,
    ) -> None:
        """A weight or a bias of which rows may be taken, and which may be multiplied by factors or by a norm's gain."""
        entry = self.entries[own][1]
        length = len(rows) if rows is not None else entry.shape[1 if transposed else 0]
        shape = (length, *(entry.shape[:1] if transposed else entry.shape[1:]))
        if module.norm:
            gain, dtype = f"{base}{module.norm}.weight", self._wide(own, entry)
            self._claim(gain, *shape[1:])
            compute: Any = partial(arrays.fold_gain, rows=rows, transposed=transposed, dtype=dtype)
            self._add(name, own, dtype, shape, (own, gain), compute)
        elif factors is not None:
            dtype = self._wide(own, entry)
            compute = partial(arrays.scale, rows=rows, transposed=transposed, factors=factors, dtype=dtype)
            self._add(name, own, dtype, shape, (own,), compute)
        elif rows is not None or transposed:
            self._wide(own, entry)
            self._add(name, own, entry.dtype, shape, (own,), partial(arrays.take, rows=rows, transposed=transposed))
        else:
            self._add(name, own, entry.dtype, entry.shape, (own,), None)

    def _folded_bias(
        self, name: str, weight: str, bias: str | None, rows: Array | None, transposed: bool, norm: str
    ) -> None:
        like = bias or weight
        dtype = self._wide(like, self.entries[like][1])
        entry = self.entries[weight][1]
        self._claim(f"{norm}.bias", entry.shape[0 if transposed else 1])
        length = len(rows) if rows is not None else entry.shape[1 if transposed else 0]
        sources = (weight, f"{norm}.bias", *([bias] if bias else []))
        compute = partial(arrays.fold_bias, rows=rows, transposed=transposed, dtype=dtype)
        self._add(name, like, dtype, (length,), sources, compute)


def _has_unit_head(checkpoint: Checkpoint, name: str, vocabulary: int) -> bool:
    """Whether the source's code scales the rows of its output projection: its text says so, or else the size of the
    vocabulary.
    """
    files = [file for file in checkpoint.carried if Path(file).name.startswith("modeling_") and file.endswith(".py")]
    if files and checkpoint.folder is not None:
        return any(name in (checkpoint.folder / file).read_text(encoding="utf-8", errors="replace") for file in files)
    return checkpoint.config.get("vocab_size") == vocabulary
