"""The records of all model types, made from two files: what transformers' classes state, and what
no class states.
"""

import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from gqa_convert.runtime.json_objects import Config, JsonObject

from .family import CONVERTED_PREFIX, Family, KeyNorm, Modeling

_FOLDER = Path(__file__).parent
_DERIVED: JsonObject = json.loads((_FOLDER / "derived.json").read_text(encoding="utf-8"))
_FACTS: JsonObject = tomllib.loads((_FOLDER / "facts.toml").read_text(encoding="utf-8"))

DECILM = "nemotron-nas"
DECILM_SOURCES = ("llama", "mistral", "qwen2")
"""Model types whose layers compute what a DeciLM's compute."""

_KEY_NORM = re.compile(r".*\.k(ey)?_\w*norm(\.weight)?")
_UNLISTED = "its model type is on no list"
NO_ENGINES: JsonObject = dict.fromkeys(("run_in", "listed_in", "beyond_window_in"), ())
"""The fields about engines of a type that none of them runs."""
_NOT_FIELDS = ("like", "modeling", "by_layer", "tokenizer", "classes", "own_code")
"""Keys of a row that a record states in another form."""


def _row(model_type: str) -> JsonObject:
    """What the two files state about a type."""
    facts = _FACTS["types"]
    own = facts[model_type]
    stated = {**_DERIVED.get(model_type, {}), **facts.get(own.get("like"), {}), **own}
    return {"classes": {}, "tokenizer": "TokenizersBackend", **stated}


def _frozen(value: Any) -> Any:
    """A value of a row with tuples in place of lists, and with the clause that it names."""
    if isinstance(value, list):
        return tuple(map(_frozen, value))
    return _FACTS["clauses"].get(value, value) if isinstance(value, str) else value


def _records(model_type: str) -> dict[str, Family]:
    """The record of a type, and that of its results that have a modelling file."""
    row = _row(model_type)
    fields = {key: _frozen(value) for key, value in row.items() if key not in _NOT_FIELDS}
    native = not row.keys() & {"modeling", "own_code"}
    family = Family(model_type=model_type, native=native, **fields)

    # DeciLM's own type has no other form; the stock types that can become one prefer it
    source = DECILM_SOURCES[0] if model_type == DECILM else model_type
    # the tokenizer is named as engines name it too
    fast = row["tokenizer"].replace("TokenizersBackend", "PreTrainedTokenizerFast")
    by_layer = _row(DECILM)["classes"]
    decilm = Modeling("gqa_decilm", source, DECILM, by_layer, fast)
    if model_type == DECILM:
        return {DECILM: replace(family, modeling=decilm, layerwise=(decilm,))}

    # the source keeps its type, and the result has its own
    own_type = CONVERTED_PREFIX + model_type.replace("-", "_")
    classes = {auto: f"GQA{name}" for auto, name in row["classes"].items()}
    if "modeling" in row:
        form = Modeling(row["modeling"], model_type, own_type, classes, row["tokenizer"])
        family = replace(family, modeling=form, kv_heads=row.get("kv_heads", "heads"))
        others: JsonObject = {"kv_heads": "stated", "fused_layout": "blocks"}
    elif "by_layer" in row:
        classes = {auto: name for auto, name in classes.items() if auto in by_layer}
        form = Modeling("gqa_by_layer", model_type, own_type, classes, fast)
        forms = (decilm, form) if model_type in DECILM_SOURCES else (form,)
        family = replace(family, layerwise=forms)
        others = {"kv_heads": "listed", "layerwise": (form,)}
    else:
        return {model_type: family}
    others |= NO_ENGINES | {"legacy_keys": {}}  # transformers 4 can't load a result
    result = replace(family, model_type=own_type, modeling=form, native=False, **others)
    return {model_type: family, own_type: result}


def unlisted(model_type: str) -> Family:
    """The record of a type that stands in no table: that of a Llama, of whose keys and values
    nothing else is known.
    """
    return Family(
        model_type=model_type,
        listed=False,
        key_constraint=_UNLISTED,
        value_constraint=_UNLISTED,
        order_constraints=(("decoder", _UNLISTED),),
    )


def with_key_norm(family: Family, tensors: Mapping[str, Any], kv_heads: int) -> Family:
    """The record of a type that stands in no table, with the norm of keys that the shapes of its
    gains tell.

    Args:
        family: its record so far.
        tensors: the checkpoint's tensors, or entries with their shapes.
        kv_heads: K/V heads of a layer.
    """
    for name in filter(_KEY_NORM.fullmatch, tensors):
        module, _, part = name.removesuffix(".weight").rpartition(".")
        keys = tensors.get(f"{module}.{family.key}.weight")
        if keys is None:
            continue
        rows, shape = keys.shape[0], tuple(tensors[name].shape)
        kind: KeyNorm = "shared"
        if kv_heads > 1 and shape == (rows,):
            kind = "full"
        elif kv_heads > 1 and shape == (kv_heads, rows // kv_heads):
            kind = "per_head"
        return replace(family, key_norm=kind, key_norm_name=part)
    return family


ALL: dict[str, Family] = {}
"""Every record."""

for _name in _FACTS["types"]:
    ALL |= _records(_name)

COMPOSITES: dict[str, str] = _FACTS["composites"]
"""Models that wrap a decoder, such as vision-language models, each with the type of a decoder whose
config does not name its own.
"""

INNER = {
    name: ALL[name]
    for name in COMPOSITES.values()
    if "AutoModelForCausalLM" not in _row(name)["classes"]
}
"""Decoders that exist only inside a composite."""

FAMILIES = {
    name: family for name, family in ALL.items() if name not in INNER and not family.one_kv_head_key
}
"""Every model type that can be converted, with those of results that have a modelling file."""

REFUSALS = {name: reason for reason, names in _FACTS["refused"].items() for name in names.split()}
"""Model types that are known and not converted, with the end of the sentence "model type X can't be
converted: ...".
"""


def record_of(config: Config) -> Family:
    """The record of the type that a config names, or that of a type that stands in no table."""
    model_type = str(config.get("model_type"))
    return ALL.get(model_type) or unlisted(model_type)
