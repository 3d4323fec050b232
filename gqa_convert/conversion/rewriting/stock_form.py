"""How a checkpoint of one model type becomes one of a stock type that computes the same: the tables of stock_forms.toml,
and the stock config that follows from them.
"""

import copy
import json
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

from gqa_convert.checkpoint.strict_json import Config, JsonObject
from gqa_convert.conversion.rewriting.conditions import CONDITIONS, NoStockClassError, refused_value
from gqa_convert.errors import ConfigError
from gqa_convert.families.layouts import FusedLayout, Role
from gqa_convert.families.records import REWRITTEN

FOLDED = "folded"
_JOINED = ("config", "only", "modules")
"""Fields that go on behind those of the table that a form is like."""


@dataclass(frozen=True, slots=True)
class Module:
    """A module of the stock type, and the one of the source that its tensors come from.

    Attributes:
        own: names that it may have in the source, of which one is there.
        has_bias: whether the stock class always has a bias: zeros, where the source has none.
        roles: the heads that it holds, if they are cut out of another projection or reordered; with several roles,
            those of each head follow one another.
        norm: the norm whose gain and bias it takes over, or `folded` for that norm itself, which becomes 1 and 0.
        in_layer: whether it is in every layer, where both names follow the layer's number.
    """

    stock: str
    own: tuple[str, ...]
    has_bias: bool
    roles: tuple[Role, ...]
    norm: str
    in_layer: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StockForm:
    """A table of stock_forms.toml, which says what its keys mean."""

    name: str
    model_type: str
    stock: str
    condition: str = "any"
    classes: dict[str, str]
    config: str
    only: str = ""
    tokenizer: str = ""
    modules: str = ""
    prefix: str = ""
    layers: tuple[str, str] = ("model.layers", "model.layers")
    fused_layout: FusedLayout | None = None
    transposed: bool = False
    interleaved: bool = False
    bias_key: str = ""
    unit_head: str = ""
    same_up_to: str = ""
    tokenizer_defaults: dict[str, str] = field(default_factory=dict)


def _cells(table: str) -> list[list[str]]:
    return [line.split() for line in table.splitlines() if line.strip()]


def modules_of(form: StockForm) -> list[Module]:
    """The modules in a form's table."""
    found = {}
    for name, own, *rest in _cells(form.modules):
        bias, joined, norm = [*rest, "-", "-", "-"][:3]
        roles: Any = () if joined == "-" else tuple(joined.split(","))
        stock = name.removeprefix(".")
        found[name] = Module(stock, tuple(own.split("|")), bias == "bias", roles, norm.strip("-"), stock != name)
    return [*found.values()]


def _read_forms() -> tuple[str, list[StockForm]]:
    """The keys that no stock type has from its source, and all forms."""
    tables: dict[str, Any] = tomllib.loads((files(__package__) / "stock_forms.toml").read_text(encoding="utf-8"))
    dropped: str = tables.pop("dropped")
    forms = []
    for name, table in tables.items():
        base = tables.get(table.pop("like", ""), {})
        joined = {key: f"{base.get(key, '')}\n{table.get(key, '')}" for key in _JOINED}
        tables[name] = base | table | joined
        if "stock" in tables[name] and "model_type" in tables[name]:
            forms.append(StockForm(name=name, **tables[name]))
    return dropped, forms


_DROPPED, _FORMS = _read_forms()
REMOTE_CODE = {form.model_type: form for form in _FORMS if form.model_type in REWRITTEN}
"""By model type, the forms of types that load only by the code in their checkpoints."""
DECODERS = [form for form in _FORMS if form.model_type not in REWRITTEN]
"""The forms of the others."""


def decoder_form(config: Config, groups: int | Sequence[int]) -> StockForm:
    """The form, of `DECODERS`, of a source with `groups` K/V heads.

    Raises:
        NoStockClassError: there is none.
    """
    model_type = config["model_type"]
    if "auto_map" in config:
        raise NoStockClassError(
            f"the checkpoint contains modelling code for {model_type}, which may compute something else"
        )
    if model_type == "gpt2" and groups != 1:
        raise NoStockClassError(
            "gpt_bigcode, which is GPT-2 otherwise, has either one K/V head or as many as query heads"
        )
    for form in DECODERS:
        is_serial = form.stock == "starcoder2"
        if form.model_type == model_type and is_serial != config.get("use_parallel_residual", True):
            return form
    raise NoStockClassError(f"no stock class is known to compute what {model_type} does with fewer K/V heads")


def stock_config(form: StockForm, config: Config) -> JsonObject:
    """The stock type's config. Keys that belong neither to the source's type nor to the stock type's are copied.

    Raises:
        NoStockClassError: it describes something that the stock class does not compute.
        ConfigError: a count is missing or absurd.
    """
    stated = config.get("architectures") or [*form.classes][:1]
    if not isinstance(stated, list) or len(stated) != 1 or stated[0] not in form.classes:
        raise NoStockClassError(f"architectures = {stated!r}, and {form.stock} stands for {' or '.join(form.classes)}")
    for key, known, *default in _cells(form.only):
        value = config.get(key, json.loads(default[0] if default else known))
        if (value or None) != (json.loads(known) or None):
            raise refused_value(key, value)
    entries = _entries(form, config)
    if form.name in CONDITIONS:
        entries |= CONDITIONS[form.name](config, entries)
    dropped = _DROPPED.split()
    result = {key: copy.deepcopy(value) for key, value in config.items() if key not in dropped}
    result |= {"architectures": [form.classes[stated[0]]], "model_type": form.stock} | entries
    if form.tokenizer:
        result["tokenizer_class"] = config.get("tokenizer_class") or form.tokenizer
    dtype = config.get("dtype", config.get("torch_dtype"))
    if isinstance(dtype, str):
        result |= {"dtype": dtype, "torch_dtype": dtype}
    auto = config.get("auto_map") or {}
    kept = {key: value for key, value in auto.items() if not key.startswith(("AutoConfig", "AutoModel"))}
    if kept:
        result["auto_map"] = kept
    if "rope_theta" in result:
        result |= _rotary(result)
    return result


def _entries(form: StockForm, config: Config) -> JsonObject:
    """The entries of the form's table."""
    found: JsonObject = {}
    for key, own, default in _cells(form.config):
        if not default.startswith("count"):
            found[key] = config.get(own, json.loads(default))
            continue
        value = config.get(own)
        if value is None:
            value = found.get(default.partition("=")[2])
        if type(value) is not int or value < 1:
            raise ConfigError(f"config.json has {own} = {value!r} where a count belongs: repair the config")
        found[key] = value
    return found


def _rotary(stock: JsonObject) -> JsonObject:
    """Rotary positions under the keys of old and of new clients."""
    scaling = stock.get("rope_scaling")
    parameters = {"rope_type": "default"} | (scaling or {}) | {"rope_theta": stock["rope_theta"]}
    if "partial_rotary_factor" in stock:
        parameters["partial_rotary_factor"] = stock["partial_rotary_factor"]
    return {"rope_scaling": scaling, "rope_parameters": parameters}
