"""What the modelling files of gqa-convert have in common: models with fewer K/V heads than query
heads (Ainslie et al. 2023), made from transformers' own.

This file and one modelling file are copied into every checkpoint whose model type has no stock
class, so that transformers loads the checkpoint without gqa-convert. Both import only torch and
transformers.

A class is made when it is first asked for: `GQA` and the name of a class of transformers is that
class with fewer K/V heads. Its constructor builds transformers' model and then gives each attention
module fewer K/V heads. Only the model that is loaded is imported, so that one that a later
transformers lacks does not disturb the others.

Shape legend: B batch, L queries, S keys, H query heads, N K/V heads, c head_dim. Query head i reads
K/V head i // (H / N).
"""

import copy
import functools
import inspect
import sys
from collections.abc import Mapping
from types import FunctionType

import torch
import transformers
from huggingface_hub.dataclasses import strict
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import AttentionInterface

PREFIX = "GQA"
CACHE_NAMES = ("cache", "past_key_values", "layer_past")
"""What transformers has called the cache among the arguments of attention modules, the newest name
first.
"""


def misfit(stock, what):
    """The error where this file does not fit the installed transformers, with which it could
    compute something else.

    Args:
        stock: the class of transformers.
        what: the rest of a sentence about it.
    """
    return ImportError(
        f"{stock.__name__} of transformers {transformers.__version__} {what}, which this modelling "
        "file does not know: install a transformers that `transformers_tested` in config.json "
        "allows, or copy this file from a newer gqa-convert"
    )


# Attention


def eager_attention(
    module, query, key, value, attention_mask, scaling, dropout=0.0, position_bias=None, **_options
):
    """Attention whose scores [B, H, L, S] are added to a bias and a mask that broadcast to them,
    with a softmax in float32.

    transformers' own functions ignore further options as well; `misfits` finds one that they
    begin to use.
    """
    size = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(size, 1), value.repeat_interleave(size, 1)
    scores = query @ key.transpose(-1, -2) * scaling
    for added in (position_bias, attention_mask):
        scores = scores if added is None else scores + added
    weights = nn.functional.softmax(scores, dim=-1, dtype=torch.float32).to(value.dtype)
    weights = nn.functional.dropout(weights, p=dropout, training=module.training)
    return (weights @ value).transpose(1, 2), weights


def sdpa(module, query, key, value, mask, **options):
    """transformers' sdpa function. For a single query, it reads keys and values once for all query
    heads that share them only where there is a mask, so that a CPU gets one: with 16 query and 2
    K/V heads, a step of a BART that reads 4,000 tokens in bfloat16 takes 25 ms instead of 86, and
    125 with 16 K/V heads.
    """
    decodes_on_cpu = (
        query.shape[2] == 1 and query.device.type == "cpu" and not torch.compiler.is_compiling()
    )
    if mask is None and decodes_on_cpu and options.get("cache") is None:
        mask = torch.ones(1, 1, 1, key.shape[2], dtype=torch.bool)
    return sdpa_attention_forward(module, query, key, value, mask, **options)


ATTENTION_FUNCTIONS = AttentionInterface()
ATTENTION_FUNCTIONS["sdpa"] = sdpa


def attend(module, query, key, value, mask, dropout, **options):
    """Attention through the function that the config names.

    Args:
        module: the attention module.
        query: [B, H, L, c].
        key: [B, N, S, c], without those in the cache.
        value: [B, N, S, c], likewise.
        mask: None, or broadcasting to [B, H, L, S].
        dropout: probability in training.
        options: the cache, if there is one, to which keys and values are added first, under the
            name that the stock class has for it; further arguments of the function.

    Returns:
        The output [B, L, H * c] and, from eager attention, the attention weights [B, H, L, S].
    """
    cache = options.pop(module.cache_name, None)
    if cache is not None:
        key, value = cache.update(key, value, module.layer_idx, kwargs=options)
    options["dropout"] = dropout if module.training else 0.0
    function = ATTENTION_FUNCTIONS.get_interface(
        module.config._attn_implementation, eager_attention
    )
    output, weights = function(module, query, key, value, mask, **options)
    return output.flatten(2), weights


def narrowed(projection, width):
    """A projection like another one, with `width` rows whose numbers are loaded later."""
    has_bias = projection.bias is not None
    return type(projection)(projection.in_features, width, bias=has_bias)


def split_heads(states, head_dim):
    """[B, L, heads * c] -> [B, heads, L, c]."""
    return states.unflatten(-1, (-1, head_dim)).transpose(1, 2)


class GroupedAttention:
    """What is added to an attention module of transformers, whose own forward runs unless a derived
    class has one.
    """

    projections: tuple[str, ...] = ("k_proj", "v_proj")
    heads_name = "num_heads"
    replaced: tuple[str, ...] = ("eager_attention_forward", "ALL_ATTENTION_FUNCTIONS")
    """What the stock forward must use, where it runs, so that what stands here for these names
    acts.
    """
    handed_on: tuple[str, ...] = ()
    """Arguments of the stock forward that a forward of our own gives to the attention function,
    unread.
    """
    cache_name: str

    def regroup(self, num_key_value_groups):
        """Make the projections of keys and values smaller.

        Args:
            num_key_value_groups: the number of query heads that share a K/V head.
        """
        self.num_key_value_groups = num_key_value_groups
        for name in self.projections:
            stock = getattr(self, name)
            setattr(self, name, narrowed(stock, stock.out_features // num_key_value_groups))


class FusedAttention(GroupedAttention):
    """The same for one projection of queries, keys and values, whose rows become [q | k | v], each
    head by head.
    """

    projection = "query_key_value"

    def regroup(self, num_key_value_groups):
        self.num_key_value_groups = num_key_value_groups
        stock = getattr(self, self.projection)
        width = stock.in_features // num_key_value_groups
        self.widths = [stock.in_features, width, width]
        setattr(self, self.projection, narrowed(stock, sum(self.widths)))

    def split(self, states):
        """Queries, keys and values [B, heads, L, c] from the projected states [B, L, (H + 2 N) *
        c].
        """
        head_dim = self.widths[0] // getattr(self, self.heads_name)
        return [split_heads(part, head_dim) for part in states.split(self.widths, dim=-1)]


def taken(function):
    """The names of a function's arguments, but for those that it collects."""
    parameters = inspect.signature(function).parameters.values()
    return {each.name for each in parameters if each.kind is not each.VAR_KEYWORD}


def misfits(stock, grouped):
    """Yields in what an attention class of the installed transformers is unknown to this file, so
    that numbers could be wrong in silence.
    """
    if not {*CACHE_NAMES} & taken(stock.forward):
        yield "takes its cache under another name"
    if grouped.forward is not stock.forward:
        own, known = taken(grouped.forward), {*CACHE_NAMES, *grouped.handed_on}
        for name in sorted(own - taken(stock.forward)):
            yield f"has no argument {name}"
        for name in sorted(taken(stock.forward) - own - known):
            yield f"takes {name}"
        return
    forward = inspect.unwrap(stock.forward)
    for name in grouped.replaced:
        if name not in forward.__code__.co_names:
            yield f"does without {name}"
    eager = forward.__globals__.get("eager_attention_forward", eager_attention)
    for name in sorted(taken(eager) - taken(eager_attention)):
        yield f"hands {name} to attention"


def grouped_forward(forward):
    """The forward function of a stock attention class with the attention functions of this file.

    It is the same compiled code, without its decorators, with two names of its module bound anew.
    Without the module's own name, torch.compile reads these names here and not in the module.
    """
    forward = inspect.unwrap(forward)
    names = forward.__globals__ | {
        "eager_attention_forward": eager_attention,
        "ALL_ATTENTION_FUNCTIONS": ATTENTION_FUNCTIONS,
    }
    del names["__name__"]
    made = FunctionType(
        forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__
    )
    made.__module__ = forward.__module__
    return made


@functools.cache
def attention_class(stock, grouped):
    """The class of an attention module of type `stock` with `grouped` added.

    Raises:
        ImportError: this file does not know the class as it is in the installed transformers.
    """
    made = type(PREFIX + stock.__name__, (grouped, stock), {})
    if what := next(misfits(stock, made), None):
        raise misfit(stock, what)
    made.cache_name = next(name for name in CACHE_NAMES if name in taken(stock.forward))
    if made.forward is stock.forward:
        made.forward = grouped_forward(stock.forward)
    globals()[made.__name__] = made  # where pickle looks for it
    return made


def query_heads_per_kv_head(module, config):
    """How many query heads share a K/V head in an attention module.

    Raises:
        ValueError: the config's number of K/V heads does not divide the number of query heads.
    """
    heads = getattr(module, module.heads_name)
    kv_heads = config.num_key_value_heads or heads
    if heads % kv_heads:
        raise ValueError(f"{kv_heads} K/V heads do not divide {heads} query heads")
    return heads // kv_heads


# Models and configs


class GroupedModel:
    """What is added to a model of transformers."""

    attention: Mapping[str, type[GroupedAttention]]
    eager_constructor = False
    """Whether the stock constructors accept eager attention alone."""

    @classmethod
    def _can_set_attn_implementation(cls):
        """transformers' own class decides, unless its attention is replaced by one that asks for
        the configured function.
        """
        return bool(cls.eager_constructor or cls.__bases__[-1]._can_set_attn_implementation())

    def __init__(self, config):
        requested = config._attn_implementation
        if self.eager_constructor:
            config._attn_implementation = "eager"
        super().__init__(config)
        self.regroup(config)
        if self.eager_constructor:
            config._attn_implementation = self._check_and_adjust_attn_implementation(
                requested, is_init_check=True
            )
        self.post_init()

    def regroup(self, config):
        """Give the attention modules of a decoder, known by the names of their classes, fewer K/V
        heads.
        """
        for module in list(self.modules()):
            stock = type(module)
            grouped = self.attention.get(stock.__name__)
            if grouped is not None and getattr(module, "is_decoder", True):
                module.__class__ = attention_class(stock, grouped)
                module.config = getattr(module, "config", config)
                module.regroup(query_heads_per_kv_head(module, config))


def regroup_layers(model, counts):
    """Give the attention of each layer a number of K/V heads, where transformers' class takes
    it from the config.

    Args:
        model: of which every attention module has the attribute `num_key_value_groups`.
        counts: the number of each layer.
    """
    for parent in list(model.modules()):
        for name, stock in list(parent.named_children()):
            if hasattr(stock, "num_key_value_groups"):
                config = copy.copy(stock.config)
                config.num_key_value_heads = counts[stock.layer_idx]
                made = type(stock)(config, stock.layer_idx)
                made.config = (
                    stock.config
                )  # a later change of the attention function reaches every layer
                setattr(parent, name, made)


def config_class(stock):
    """The config class of a model type with fewer K/V heads."""

    @strict
    class Config(stock):
        model_type = f"{PREFIX.lower()}_{stock.model_type.replace('-', '_')}"
        # Whisper's makes num_key_value_heads another name of encoder_attention_heads.
        attribute_map = {  # noqa: RUF012
            name: other
            for name, other in stock.attribute_map.items()
            if name != "num_key_value_heads"
        }
        num_key_value_heads: int | None = None
        """K/V heads of self-attention and of a decoder's cross-attention; None for as many as query
        heads.
        """

    return Config


def class_maker(module, make_config=config_class, **of_models):
    """The `__getattr__` of a modelling file.

    Args:
        module: its `__name__`.
        make_config: makes a config class from transformers' own.
        of_models: attributes of its model classes.
    """

    def make(name):
        stock = (
            getattr(transformers, name.removeprefix(PREFIX), None)
            if name.startswith(PREFIX)
            else None
        )
        bases = stock.__mro__ if isinstance(stock, type) else ()
        if PreTrainedConfig in bases:
            made = make_config(stock)
        elif PreTrainedModel in bases:
            own_config = getattr(sys.modules[module], PREFIX + stock.config_class.__name__)
            made = type(name, (GroupedModel, stock), {"config_class": own_config, **of_models})
        else:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        made.__module__, made.__name__, made.__qualname__ = module, name, name
        setattr(sys.modules[module], name, made)  # one class for everyone who asks, as pickle needs
        return made

    return make
