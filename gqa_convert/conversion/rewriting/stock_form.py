"""How the tensors of one model type become those of a stock type that computes the same: the form of the tables."""

import json
from collections.abc import Callable
from dataclasses import dataclass

from gqa_convert.checkpoint.strict_json import Config, JsonObject
from gqa_convert.errors import ConfigError
from gqa_convert.families.layouts import FusedLayout

BIASES = ("never", "always", "attention", "optional", "zeros")
"""Whether a module of the source has a bias: never, always, together with the attention's other modules, or where it
has one; with `zeros` it has none, and the stock class has one."""


class NoStockClassError(Exception):
    """No stock class computes the same as a source.

    Args:
        reason: ends the sentence "no stock class computes the same: ".
    """


@dataclass(frozen=True, slots=True)
class Module:
    """A module of the stock type, by its name there, and where its tensors come from."""

    stock: str
    own: tuple[str, ...]
    """Names that it may have in the source, of which one is there."""
    bias: str
    """One of `BIASES`."""
    roles: tuple[str, ...] = ()
    """The heads that it holds (query, key, value), if it is cut out of another projection, or its heads are reordered.
    With several roles, those of each head follow one another."""
    norm: str | None = None
    """The source's norm before it, whose gain and bias it takes over."""
    neutral: bool = False
    """Whether it is a norm whose gain and bias the modules behind it take over, so that they become 1 and 0."""


def modules(table: str) -> tuple[Module, ...]:
    """The modules in a table: on each line the stock name, the source's names joined by `|`, and the bias; behind them,
    where they apply, `roles=` joined by commas, `norm=` and `neutral`.
    """
    found = []
    for line in table.strip().splitlines():
        stock, own, bias, *further = line.split()
        options = dict(item.partition("=")[::2] for item in further)
        roles = tuple(options["roles"].split(",")) if "roles" in options else ()
        assert bias in BIASES, line
        found.append(Module(stock, tuple(own.split("|")), bias, roles, options.get("norm"), "neutral" in options))
    return tuple(found)


def count(config: Config, *keys: str) -> int:
    """The first of these config keys that is stated.

    Raises:
        ConfigError: none is, or its value is no count.
    """
    stated = [key for key in keys if config.get(key) is not None]
    key = stated[0] if stated else keys[0]
    value = config.get(key)
    if type(value) is not int or value < 1:
        raise ConfigError(f"config.json has {key} = {value!r} where a count belongs: repair the config")
    return value


def entries(config: Config, table: str) -> JsonObject:
    """The entries of a stock config in a table: on each line the stock key, the source's key, and the default of the
    source's class as JSON, or `count` for a key that must state a count.

    Raises:
        ConfigError: a count is missing or absurd.
    """
    found = {}
    for line in table.strip().splitlines():
        stock, own, default = line.split()
        found[stock] = count(config, own) if default == "count" else config.get(own, json.loads(default))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class StockForm:
    """How a checkpoint of one model type becomes one of a stock type."""

    model_type: str
    stock: str
    """The stock model type."""
    condition: str = "any"
    """Which checkpoints of the source's type it takes, as docs/families.md says it, in Markdown."""
    classes: dict[str, str]
    """The source's classes, as config.json names them, each with the stock one; a language model first."""
    config: Callable[[Config], JsonObject]
    """The entries of the stock config that follow from the source's."""
    dropped: frozenset[str]
    """Keys of the source's config that the stock config does not take over."""
    prefixes: tuple[str, str] = ("", "")
    """What precedes the names in the source and in the stock type, except in a checkpoint of a model without its head."""
    layers: tuple[str, str] = ("model.layers", "model.layers")
    """What precedes a layer's number."""
    before: tuple[Module, ...] = ()
    """Modules before the layers, the embedding of tokens first; empty if all names stay."""
    inside: tuple[Module, ...] = ()
    """Modules of a layer."""
    behind: tuple[Module, ...] = ()
    """Modules behind the layers. The last is the output projection, which tied embeddings make superfluous."""
    fused_layout: FusedLayout | None = None
    """How the heads lie in the source's projections with `roles`; None where each role has one to itself."""
    transposed: bool = False
    """Whether the matrices of the source's layers are stored [in, out]."""
    interleaved: bool = False
    """Whether rotary pairs are rows (2j, 2j + 1) in the source."""
    query_factor: Callable[[Config, int], float] = lambda config, layer: 1.0
    """What a layer's queries are multiplied by, since the stock class scales scores by 1 / sqrt(head_dim) only."""
    attention_biased: Callable[[Config], bool] | None = None
    """Whether modules with bias `attention` have one, by the config; None if the tensors say so. Where they have none,
    the stock class gets zeros by the former, and `bias_key` by the latter."""
    bias_key: str | None = None
    """Key of the stock config that says whether the attention has biases."""
    unit_head: tuple[str, int] | None = None
    """A class in the source's code, and the vocabulary size of the models that have it where no code is there to look
    at: the rows of its output projection are scaled to length one whenever it is used."""
    alike_up_to: str | None = None
    """Key of the source's config with the number of tokens beyond which its custom code computes something else."""
    special_tokens: tuple[str, ...] = ()
    """Keys of <|endoftext|> that tokenizer_config.json needs where it lacks them, because the source's tokenizer class
    has them by default and that of the stock type does not."""
