"""A source in another form: a checkpoint whose tensors are computed as they are read."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from gqa_convert.checkpoint.headers import TensorEntry
from gqa_convert.checkpoint.source import Checkpoint, Recipe, Shard
from gqa_convert.conversion.plan.making import safetensors_name
from gqa_convert.errors import ConfigError, UnsupportedFormatError
from gqa_convert.merging.factorisation import Array
from gqa_convert.runtime.json_objects import JsonObject

from . import arrays

Shape = tuple[int, ...]
Compute = Callable[..., Any]
"""One of `arrays`: makes an array from its numpy type and those of the source."""

_UNUSED = (
    "rotary_emb.inv_freq",
    ".attn.bias",
    ".attn.masked_bias",
    ".attention.bias",
    ".attention.masked_bias",
)
"""Ends of the names of buffers that old versions saved and that no class reads."""


class OtherForm:
    """Collects the tensors of a stock type that are made from those of a source.

    Args:
        source: the source as the user named it.
        prefix: what precedes the names of its tensors, unless the model was saved without its head.
        embedding: the name of its embedding behind that.

    Attributes:
        prefix: what precedes the names here.
    """

    def __init__(self, source: Checkpoint, prefix: str, embedding: str) -> None:
        self._source = source
        self._entries = {name: (number, entry) for number, name, entry in source.tensors()}
        self._embedding = f"{embedding}.weight"
        is_headless = (
            self._embedding in self._entries and prefix + self._embedding not in self._entries
        )
        self.prefix = "" if is_headless else prefix
        self._files: list[dict[str, TensorEntry]] = [{} for _ in source.shards]
        self._recipes: dict[str, Recipe] = {}
        self._result_dtypes: dict[str, str] = {}

    def move(
        self,
        stock: str,
        own: str,
        rows: Array | None = None,
        stored: Shape | None = None,
        *,
        is_transposed: bool = False,
        has_bias: bool = False,
    ) -> None:
        """Add a module with its weight and its bias.

        Args:
            stock: its name in the stock type.
            own: the source's module.
            rows: the numbers of the rows of a transposed weight that are taken, in their new order;
                None for all.
            stored: the shape of the source's weight, if it is known.
            is_transposed: whether the source's weight is [in, out].
            has_bias: whether the stock class always has a bias: zeros, where the source has none.
        """
        weight, bias = f"{own}.weight", f"{own}.bias"
        shape = self._shape(weight, stored)
        count, *inputs = reversed(shape) if is_transposed else shape
        taken = count if rows is None else len(rows)
        compute = partial(arrays.move, rows=rows, is_transposed=True) if is_transposed else None
        compute_bias = None if rows is None else partial(arrays.move, rows=rows)
        self._add(f"{stock}.weight", (taken, *inputs), (weight,), compute)
        if bias in self._entries:
            self._shape(bias, (count,))
            self._add(f"{stock}.bias", (taken,), (bias,), compute_bias)
        elif has_bias:
            self._fill(f"{stock}.bias", weight, taken, 0.0)

    def fold(
        self,
        stock: str,
        own: str,
        norm: str,
        rows: Array | None = None,
        stored: Shape | None = None,
    ) -> None:
        """Add a projection that takes over the gain and the bias of the norm before it.

        Args:
            stock: its name in the stock type.
            own: the source's projection.
            norm: the source's norm.
            rows: as for `move`.
            stored: as for `move`.
        """
        weight, bias, gain, shift = f"{own}.weight", f"{own}.bias", f"{norm}.weight", f"{norm}.bias"
        count, *inputs = self._shape(weight, stored)
        taken = count if rows is None else len(rows)
        biases = (bias,) if bias in self._entries else ()
        for name in biases:
            self._shape(name, (count,))
        for name in (gain, shift):
            self._shape(name, (*inputs,))
        product, product_bias = (
            partial(arrays.fold_gain, rows=rows),
            partial(arrays.fold_bias, rows=rows),
        )
        self._add(f"{stock}.weight", (taken, *inputs), (weight, gain), product, is_product=True)
        self._add(
            f"{stock}.bias", (taken,), (*biases, shift, weight), product_bias, is_product=True
        )

    def add_folded_norm(self, stock: str, own: str) -> None:
        """Add a norm whose gain and bias projections take over."""
        weight, bias = f"{own}.weight", f"{own}.bias"
        (count,) = self._shape(bias, self._shape(weight))
        self._fill(f"{stock}.weight", weight, count, 1.0)
        self._fill(f"{stock}.bias", bias, count, 0.0)

    def add_head(self, *names: str, is_tied: bool, has_bias: bool = False) -> None:
        """Add the output projection, `lm_head`, unless the model was saved without it.

        Args:
            names: that it may have in the source.
            is_tied: whether it may be absent, since it has the weight of the embedding.
            has_bias: as for `move`.
        """
        if not self.prefix:
            return
        own = next((name for name in names if f"{name}.weight" in self._entries), None)
        if own is not None or not is_tied:
            self.move("lm_head", own or names[0], has_bias=has_bias)
        elif has_bias:
            embedding = self.prefix + self._embedding
            self._fill("lm_head.bias", embedding, self._shape(embedding)[0], 0.0)

    def checkpoint(
        self, config: JsonObject, layers: int, tokenizer_defaults: dict[str, str] | None = None
    ) -> Checkpoint:
        """A checkpoint of these tensors, whose folder is the source's, where the sidecar files lie.

        Args:
            config: of the stock type.
            layers: their number.
            tokenizer_defaults: what the source's tokenizer class has by default, and that of the
                stock type has not.

        Raises:
            ConfigError: a tensor of the source is left over.
        """
        own = self._source.config["model_type"]
        taken = {name for recipe in self._recipes.values() for name in recipe.sources}
        for name in self._entries:
            if name not in taken and not name.endswith(_UNUSED):
                raise ConfigError(
                    f"tensor {name} does not belong to a {own} checkpoint with {layers} "
                    "layers: the config and the "
                    "weights do not belong together"
                )
        shards = [
            Shard(safetensors_name(shard.file), 0, entries, shard.metadata)
            for shard, entries in zip(self._source.shards, self._files, strict=True)
            if entries
        ]
        note = (
            f"the source, a {own}, is rewritten as a {config['model_type']}, which computes the "
            f"same (--no-native keeps {own})"
        )
        return replace(
            self._source,
            config=config,
            weights_format="safetensors",
            shards=tuple(shards),
            recipes=self._recipes,
            result_dtypes=self._result_dtypes,
            rewritten_from=self._source,
            rewriting_notes=(note,),
            tokenizer_defaults=tokenizer_defaults or {},
        )

    def _shape(self, name: str, expected: Shape | None = None) -> Shape:
        """The shape of a tensor of the source, which must be this one if one is given."""
        if name not in self._entries:
            raise ConfigError(
                f"tensor {name} is missing: the checkpoint is incomplete, download or copy it again"
            )
        found = self._entries[name][1].shape
        if expected not in (None, found):
            raise ConfigError(
                f"tensor {name} has shape {list(found)}, expected {list(expected or ())}: the "
                "config and the weights do not "
                "belong together"
            )
        return found

    def _fill(self, name: str, source: str, count: int, value: float) -> None:
        """Add a vector of one value, in the file and the type of a tensor of the source."""
        self._add(name, (count,), (source,), partial(arrays.fill, count=count, value=value))

    def _add(
        self,
        name: str,
        shape: Shape,
        sources: tuple[str, ...],
        compute: Compute | None,
        *,
        is_product: bool = False,
    ) -> None:
        """Add a tensor in the file and the type of the first of its sources, behind those added
        before.

        Args:
            name: in the stock type.
            shape: there.
            sources: the tensors of the source that it is computed from.
            compute: None if it has the bytes of the one source.
            is_product: whether numbers are multiplied, which takes a wider type until the result is
                written.
        """
        number, entry = self._entries[sources[0]]
        dtype = entry.dtype
        if compute is not None and dtype not in arrays.WIDE:
            raise UnsupportedFormatError(
                f"{sources[0]} has type {dtype}, which can't be rewritten: save the model in "
                "one float type"
            )
        if is_product:
            dtype = arrays.WIDE[dtype]
            self._result_dtypes[name] = entry.dtype
        self._files[number][name] = TensorEntry(dtype, shape)
        self._recipes[name] = Recipe(sources, compute)
