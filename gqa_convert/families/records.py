"""The records of all model types, made from two files: what transformers' classes state, and what no class states."""

import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from gqa_convert.checkpoint.strict_json import JsonObject
from gqa_convert.families.family import CONVERTED_PREFIX, Family, LegacyConfigKeys, Modeling

_FOLDER: Final = Path(__file__).parent
_DERIVED: Final[JsonObject] = json.loads((_FOLDER / "derived.json").read_text(encoding="utf-8"))
_FACTS: Final[JsonObject] = tomllib.loads((_FOLDER / "facts.toml").read_text(encoding="utf-8"))

DECILM: Final = "nemotron-nas"
DECILM_SOURCES: Final = ("llama", "mistral", "qwen2")
"""Model types whose layers compute what a DeciLM's compute."""

_UNLISTED = "its model type is on no list"
_ENGINE_KEYS = ("run_in", "listed_in", "beyond_window_in")
_NOT_FIELDS = ("like", "modeling", "by_layer", "tokenizer", "classes", "own_code")
"""Keys of a row that a record states in another form."""
_BY_LAYER_TASKS = ("AutoConfig", "AutoModel", "AutoModelForCausalLM")


def _frozen(value: Any) -> Any:
    """A value of a row with tuples in place of lists, and with the clause that it names."""
    if isinstance(value, list):
        return tuple(_frozen(each) for each in value)
    if isinstance(value, str):
        return _FACTS["clauses"].get(value, value)
    return value


def _row(model_type: str) -> JsonObject:
    """What the two files state about a type."""
    facts = _FACTS["types"]
    own = facts[model_type]
    like = facts[own["like"]] if "like" in own else {}
    row: JsonObject = {"classes": {}} | _DERIVED.get(model_type, {}) | like | own
    return row


def _record(model_type: str, row: JsonObject) -> Family:
    """The record of a source's type."""
    fields = {key: _frozen(value) for key, value in row.items() if key not in _NOT_FIELDS}
    fields |= {key: None for key, value in row.items() if value == ""}
    for key in _ENGINE_KEYS:
        fields[key] = frozenset(row.get(key, "").split())
    fields["legacy"] = _legacy(row.get("legacy", {}))
    fields["native"] = not row.keys() & {"modeling", "becomes", "own_code"}
    if row.keys() & {"modeling", "becomes"}:
        fields = {"kv_heads": "heads"} | fields
    return Family(model_type=model_type, **fields)


def _legacy(stated: JsonObject) -> LegacyConfigKeys:
    fields = {key: _frozen(value) for key, value in stated.items()}
    if "rope_scaling_keys" in fields:
        fields["rope_scaling_keys"] = frozenset(fields["rope_scaling_keys"])
    return LegacyConfigKeys(**fields)


def _modeling(model_type: str, row: JsonObject) -> Modeling:
    """The modelling file of a result with one number of K/V heads."""
    names = row["classes"]
    return Modeling(
        file=row["modeling"],
        source_type=model_type,
        model_type=CONVERTED_PREFIX + model_type.replace("-", "_"),
        classes=tuple((auto, f"GQA{name}") for auto, name in names.items()),
        tokenizer=row.get("tokenizer", "TokenizersBackend"),
    )


def _own_by_layer(model_type: str, row: JsonObject) -> Modeling:
    """The modelling file of a result whose layers differ, with the type's own classes."""
    names = row["classes"]
    return Modeling(
        file="gqa_by_layer",
        source_type=model_type,
        model_type=CONVERTED_PREFIX + model_type,
        classes=tuple((auto, f"GQA{names[auto]}") for auto in _BY_LAYER_TASKS if auto in names),
        tokenizer=_fast(row),
    )


def _decilm(model_type: str, row: JsonObject) -> Modeling:
    """The modelling file of a result whose layers differ, as a DeciLM."""
    names = ("DeciLMConfig", "DeciLMModel", "DeciLMForCausalLM")
    return Modeling(
        file="gqa_decilm",
        source_type=model_type,
        model_type=DECILM,
        classes=tuple(zip(_BY_LAYER_TASKS, names, strict=True)),
        tokenizer=_fast(row),
    )


def _fast(row: JsonObject) -> str:
    """The tokenizer class under the name that engines know as well."""
    stated: str = row.get("tokenizer", "TokenizersBackend")
    return "PreTrainedTokenizerFast" if stated == "TokenizersBackend" else stated


def _records() -> dict[str, Family]:
    """The records of sources and of their results that have a modelling file."""
    found: dict[str, Family] = {}
    for model_type in _FACTS["types"]:
        row = _row(model_type)
        family = _record(model_type, row)
        if model_type == DECILM:
            form = _decilm("llama", _row("llama"))
            found[model_type] = replace(family, modeling=form, layerwise=(form,))
        elif "modeling" in row:
            form = _modeling(model_type, row)
            found[model_type] = replace(family, modeling=form)
            found[form.model_type] = _result(found[model_type], form, kv_heads="stated", fused_layout="blocks")
        elif "by_layer" in row:
            form = _own_by_layer(model_type, row)
            forms = (_decilm(model_type, row), form) if model_type in DECILM_SOURCES else (form,)
            found[model_type] = replace(family, layerwise=forms)
            found[form.model_type] = _result(family, form, kv_heads="listed", layerwise=(form,))
        else:
            found[model_type] = family
    return found


def _result(source: Family, form: Modeling, **fields: Any) -> Family:
    """The record of a result with a modelling file. transformers 4 can't load it, so that it has no legacy keys."""
    others: Any = dict.fromkeys(_ENGINE_KEYS, frozenset())
    others |= {"model_type": form.model_type, "modeling": form, "native": False, "legacy": LegacyConfigKeys()}
    return replace(source, **others | fields)


def unlisted(model_type: str) -> Family:
    """The record of a type that stands in no table: that of a Llama, of whose keys and values nothing else is known."""
    return Family(
        model_type=model_type,
        listed=False,
        key_constraint=_UNLISTED,
        value_constraint=_UNLISTED,
        order_constraints=(("decoder", _UNLISTED),),
        document_constraint=_UNLISTED,
    )


def with_key_norm(family: Family, shapes: Mapping[str, Sequence[int]], kv_heads: int) -> Family:
    """The record of a type that stands in no table, with the norm of keys that the shapes of its gains tell.

    Args:
        family: its record so far.
        shapes: the shapes of the checkpoint's tensors.
        kv_heads: K/V heads of a layer.
    """
    norm = re.compile(rf"(.*\b{family.attention[0]})\.((?:k|key)_\w*norm)\.weight")
    for name, shape in shapes.items():
        match = norm.fullmatch(name)
        projection = f"{match[1]}.{family.key}.weight" if match else ""
        if match and projection in shapes:
            rows = shapes[projection][0]
            kind: Any = "shared"
            if tuple(shape) == (kv_heads, rows // kv_heads):
                kind = "per_head"
            elif tuple(shape) == (rows,) and kv_heads > 1:
                kind = "full"
            return replace(family, key_norm=kind, key_norm_name=match[2])
    return family


ALL: Final = _records()
"""Every record."""

ONE_OR_ALL_HEADS: Final = {name: family for name, family in ALL.items() if family.one_kv_head_key}
"""Types that have either one K/V head or as many as query heads. Those with one have nothing to merge."""

COMPOSITES: Final[dict[str, str]] = _FACTS["composites"]
"""Models that wrap a decoder, such as vision-language models, each with the type of a decoder whose config does not name
its own."""

INNER: Final = {name: ALL[name] for name in COMPOSITES.values() if "AutoModelForCausalLM" not in _row(name)["classes"]}
"""Decoders that exist only inside a composite."""

FAMILIES: Final = {name: ALL[name] for name in ALL if name not in ONE_OR_ALL_HEADS and name not in INNER}
"""Every model type that can be converted, with those of results that have a modelling file."""

RESTATED: Final[dict[str, str]] = _FACTS["rewritten"]
"""Model types that load only by the code in their checkpoints, and the stock type that computes the same;
`gqa-convert convert` rewrites the one as the other first."""

REFUSALS: Final = {name: reason for reason, names in _FACTS["refused"].items() for name in names.split()}
"""Model types that are known and not converted, with the end of the sentence "model type X can't be converted: ..."."""
