"""The record of a model type: where its attention lies in the files, what its config keys mean, and
what it needs.

Records are read by `families.table` from derived.json, which a script writes from transformers'
classes, and facts.toml, which holds what no class states. Names are those in the files, not those
of the loaded model. A layer's attention is found by the end of a tensor's name, because prefixes
vary between checkpoints of one family.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from .layouts import FusedLayout

CONVERTED_PREFIX = "gqa_"
"""What the model types of results with a modelling file begin with; the names of their classes
begin with `GQA`.
"""

MODELING = Path(__file__).parent / "modeling"
"""Where the package keeps the modelling files that travel with checkpoints."""

TESTED = ">=5.18,<5.25"
"""The versions of transformers that these files were tested with; pyproject.toml states them too.
"""

TESTED_KEY = "transformers_tested"
"""Where a result's config.json has the versions that its modelling files were tested with."""

AttentionKind = Literal["decoder", "cross"]
"""Self-attention of a decoder; a decoder's attention to an encoder's output; an encoder's
self-attention, which keeps no cache.
"""

KeyNorm = Literal["none", "shared", "per_head", "per_head_list", "full"]
"""How keys are normalised behind their projection, always or where the config says so.

none: not at all. shared: each head by itself, with one gain vector [head_dim] for every head or
without gains. per_head: each head by itself, with one tensor of gains [heads, head_dim].
per_head_list: the same with one tensor per head (`norms.0.weight`, ...). full: all heads at once,
with gains [heads * head_dim].
"""

RotaryPairs = Literal["none", "half", "interleaved"]
"""Which rows of a key head form a rotary pair: none; (j, j + rotated/2); (2j, 2j + 1)."""

KVHeads = Literal["stated", "heads", "falcon", "blocks", "listed"]
"""What gives the number of K/V heads of a source: a config key; the number of query heads; Falcon's
three keys; DeciLM's `block_configs`, or a list under the config key, which state it for each layer.
"""


Names = tuple[str, ...]
"""Names of modules or of config keys."""

Reasons = tuple[tuple[str, str], ...]
"""Cases, each with a clause that can follow "since"."""


@dataclass(frozen=True, slots=True)
class Modeling:
    """A modelling file of this package, for families whose attention has no K/V-head count in
    transformers.
    """

    file: str
    """Its name in `gqa_convert/families/modeling/` and, with `.py`, in the checkpoints that it is
    copied into.
    """
    source_type: str
    """The stock model type of the sources."""
    model_type: str
    """The model type of the results, which stock classes must not load."""
    classes: Mapping[str, str]
    """transformers' auto classes, `AutoConfig` first, and the file's class for each."""
    tokenizer: str
    """The tokenizer class that transformers chooses by the stock model type where no file of the
    checkpoint names one.
    """

    @property
    def files(self) -> tuple[Path, ...]:
        """The files of this package that lie beside the result's config: the modelling file, and
        what it imports.
        """
        return MODELING / f"{self.file}.py", MODELING / "gqa_common.py"

    def unknown_files(self, folder: Path) -> list[Path]:
        """Those of the files that a result lacks, or that differ from this package's."""
        found = []
        for file in self.files:
            path = folder / file.name
            if not path.is_file() or path.read_bytes() != file.read_bytes():
                found.append(path)
        return found

    @property
    def auto_map(self) -> dict[str, str]:
        """The entry of config.json that leads transformers to the file."""
        return {auto: f"{self.file}.{name}" for auto, name in self.classes.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How one `model_type` stores attention, and what loads it with fewer K/V heads."""

    model_type: str
    listed: bool = True
    """Whether the type stands in the tables; a type that does not has the defaults, and its result
    must be proved.
    """
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """What a config.json may leave to transformers' config class."""

    # Where layers and attention lie
    layers: tuple[tuple[str, Names], ...] = (("layers", ("num_hidden_layers",)),)
    """Where a model without a head keeps its layers, and the config keys of their number, or of a
    list with an entry for each layer; the first key that is stated counts.
    """
    prefixes: Names = ("", "model.", "model.model.", "transformer.")
    """What transformers accepts in front of that: the name that a model with a head gives to the
    model without one (`transformer` in question answering), nothing, or that name twice.
    """
    is_composite: bool = False
    """Whether the layers are those of a decoder inside a larger model, whose other parts may have
    attention under like names: only modules behind one of `prefixes` count.
    """
    without_attention: Names = ()
    """Parts of tensor names that mark a layer without attention."""
    shared_layers_key: str = ""
    """Config key, if there is one, of the number of last layers that reuse the keys and values of
    earlier layers.
    """
    attention: Names = ("self_attn",)
    """Names of the attention module inside a layer."""
    cross_attention: Names = ()
    """The modules among `attention` that attend to an encoder's output; a fused projection there
    holds only keys and values.
    """
    reads_images_alone: bool = False
    """Whether the type's cross-attention reads images, so that text does not run it."""
    encoder: str | None = None
    """Name of the module whose attention belongs to an encoder, which runs once, has no cache and
    stays as it is.
    """

    # Projections
    query: str = "q_proj"
    key: str = "k_proj"
    value: str = "v_proj"
    output: str = "o_proj"
    fused: str | None = None
    """Name of the one projection that holds queries, keys and values, for families without separate
    ones.
    """
    fused_layout: FusedLayout = "blocks"
    """Order of its rows in the source; the result has `blocks` wherever the number of K/V heads
    changes.
    """
    transposed: bool = False
    """Whether weights are stored [in, out], as Conv1D stores them."""
    query_outputs: int = 1
    """The query projection has this many times heads * head_dim rows (2 where it also computes a
    gate).
    """

    # Sizes in the config
    heads_key: str = "num_attention_heads"
    kv_heads: KVHeads = "stated"
    kv_heads_keys: Names = ("num_key_value_heads",)
    """Config keys of the K/V-head count, dotted where nested; the first is read, all are written.
    """
    one_kv_head_key: str = ""
    """Config key, if there is one, that says whether there is one K/V head, for a type that has
    either one or as many as query heads.
    """
    head_dim_key: str = "head_dim"
    """Config key of head_dim; empty where layers differ in it."""

    # Positions and norms
    rotary: RotaryPairs = "half"
    rotary_share: float = 1.0
    """The rotary dimensions of a key head as a share of `head_dim`, where the config states none.
    """
    reads_rotary_share: bool = False
    """Whether the class heeds a share that a config states."""
    rotary_count_key: str = ""
    """Config key, if there is one, of the number of rotary dimensions, which counts where no share
    is stated.
    """
    rotary_only_when: tuple[str, bool | str] | None = None
    """Config key and the value with which the model has rotary positions at all (truth is compared
    where the value is a bool); None where it always has them.
    """
    key_norm: KeyNorm = "none"
    key_norm_name: str = "k_norm"
    gainless_key_norm: tuple[str, bool] | None = None
    """Config key that switches on a norm of keys without gains, which leaves no tensor in the
    files, and the key's default; None where there is no such key.
    """

    # Folding constraints
    key_constraint: str | None = None
    """What stands between keys and queries so that neither can take a factor of the other, besides
    norms with gains and the config's own switches; None if nothing does. A clause that can follow
    "since".
    """
    value_constraint: str | None = None
    """The same for values and the output projection."""
    order_constraints: Reasons = ()
    """Attention kinds in which something outside the attention module depends on the order of its
    heads, each with what does: a clause that can follow "since".
    """
    order_constrained_when: Reasons = ()
    """Config keys that, when set, do the same in every attention kind, each with the clause."""

    # What can't be converted
    refused_values: tuple[tuple[str, tuple[Any, ...], str], ...] = ()
    """Config keys with the values that make a checkpoint unconvertible, each with the reason."""

    # Training
    reads_per_layer_config: bool = False
    """Whether transformers' class reads `per_layer_config`, by which sizes differ between layers.
    """
    is_t5: bool = False
    """Whether this is T5's architecture: relative position biases, so that a text may have any
    length; RMSNorm; tied embeddings by default; pretraining by span corruption.
    """
    decoder_starts_with_last: bool = False
    """Whether the decoder's input begins with the last token of its target (a language code, for
    instance), whatever the config says.
    """

    # Software that loads the result
    legacy_keys: Mapping[str, str] = field(default_factory=dict)
    """Config keys of transformers 5, dotted where nested, each with a name in transformers 4 that
    other types do not have.
    """
    legacy_scaled_share: float | None = None
    """The only share of rotary dimensions that the class can combine with `rope_scaling`; None for
    any.
    """
    run_in: Names = ()
    """Engines besides transformers in which a tiny checkpoint of the type, converted from 12 to 3
    K/V heads, gave the tokens and logits of transformers (`check-serving`;
    docs/serving-and-publishing.md names the versions).
    """
    listed_in: Names = ()
    """Engines that list the type and read its K/V-head count, but in which it was not run."""
    beyond_window_in: Names = ()
    """Engines that attend to more than the type's sliding window."""
    native: bool = True
    """Whether transformers' own classes hold fewer K/V heads than query heads."""
    modeling: Modeling | None = None
    """The modelling file that the result needs; None where stock classes hold fewer K/V heads."""
    layerwise: tuple[Modeling, ...] = ()
    """The modelling files of results whose layers differ in their K/V heads, the preferred one
    first; empty where layers may not differ.
    """

    @property
    def shared_norm_names(self) -> Names:
        """Names of the norms of keys and of queries whose gains are those of every head."""
        if self.key_norm != "shared":
            return ()
        return self.key_norm_name, self.key_norm_name.replace("key_", "query_").replace("k_", "q_")

    @property
    def engines(self) -> frozenset[str]:
        """Software in which the type's grouped-query form was run without custom code."""
        return frozenset({*self.run_in, "transformers"} if self.native else ())

    @property
    def is_layerwise(self) -> bool:
        """Whether the type's config states the K/V heads of each layer."""
        return self.kv_heads in ("blocks", "listed")

    @property
    def is_converted(self) -> bool:
        """Whether the type is that of a result with a modelling file of this package."""
        return self.modeling is not None and self.modeling.model_type == self.model_type

    def owns(self, name: str) -> bool:
        """Whether a module, tensor or parameter can belong to the family's layers; always true
        outside a composite.
        """
        if not self.is_composite or name.startswith("mtp."):  # layers for multi-token prediction
            return True
        return self.layer_of(name) is not None

    def layer_of(self, name: str) -> re.Match[str] | None:
        """Where a module or tensor lies: the place of its layer among `layers`, and the layer's
        number; None where transformers looks for none.
        """
        prefixes = "|".join(map(re.escape, self.prefixes))
        places = "|".join(re.escape(place) for place, _ in self.layers)
        return re.match(rf"(?:{prefixes})({places})\.(\d+)\.", name)

    @property
    def stock_type(self) -> str:
        """transformers' own model type: the source's for a result with a modelling file, else the
        type itself.
        """
        return self.modeling.source_type if self.modeling else self.model_type
