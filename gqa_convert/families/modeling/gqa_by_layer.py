"""Decoders of transformers whose layers differ in their number of K/V heads (Ainslie et al. 2023).

This file is part of gqa-convert and is copied into every checkpoint with a number of K/V heads for each layer that no
stock class holds, so that transformers loads the checkpoint without gqa-convert. It therefore imports only torch and
transformers. Every layer is transformers' own code, made with the number of K/V heads of that layer.

`GQA` and the name of a class of transformers is the name of that class with a number for each layer: `GQAQwen3Config`,
`GQAQwen3Model`, `GQAQwen3ForCausalLM`. A class is made when it is first asked for.
"""

import copy
import sys
from typing import Any

import transformers
from huggingface_hub.dataclasses import strict
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

PREFIX = "GQA"


def config_class(stock: Any) -> Any:
    """The config class of a model type with a number of K/V heads for each layer.

    config.json has them as the list `num_key_value_heads`, and again as `multi_query_group_num`. In the object the
    list is `multi_query_group_num`, and `num_key_value_heads` is the largest number, because transformers' code takes
    it for a number.
    """

    @strict
    class Config(stock):
        model_type = f"gqa_{stock.model_type.replace('-', '_')}"
        num_key_value_heads: int | list[int] | None = None
        multi_query_group_num: int | list[int] | None = None

        def __post_init__(self, **options: Any) -> None:
            heads, layers = self.num_attention_heads, self.num_hidden_layers
            stated = heads if self.num_key_value_heads is None else self.num_key_value_heads
            by_layer = stated if isinstance(stated, list) else [stated] * layers
            if len(by_layer) != layers or any(each < 1 or heads % each for each in by_layer):
                raise ValueError(
                    f"num_key_value_heads is {by_layer}, expected a divisor of {heads} for each of {layers} layers"
                )
            self.num_key_value_heads, self.multi_query_group_num = max(by_layer), list(by_layer)
            super().__post_init__(**options)

        def to_dict(self) -> dict[str, Any]:
            """The content of config.json."""
            content: dict[str, Any] = super().to_dict()
            return content | {"num_key_value_heads": copy.copy(self.multi_query_group_num)}

    return Config


def model_class(stock: Any) -> Any:
    """A class of models that has transformers' attention with each layer's number of K/V heads."""

    class Model(stock):
        config_class = getattr(sys.modules[__name__], PREFIX + stock.config_class.__name__)

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            for parent in list(self.modules()):
                for name, child in list(parent.named_children()):
                    if hasattr(child, "num_key_value_groups"):
                        setattr(parent, name, of_its_layer(child))
            self.post_init()

    return Model


def of_its_layer(attention: Any) -> nn.Module:
    """A fresh attention module like the given one, with the number of K/V heads that the config states for its layer."""
    shared = attention.config
    config = copy.copy(shared)
    config.num_key_value_heads = shared.multi_query_group_num[attention.layer_idx]
    made: nn.Module = type(attention)(config, attention.layer_idx)
    made.config = shared  # a later change of the attention function reaches every layer
    return made


def __getattr__(name: str) -> Any:
    """The class of this name, made from transformers' class."""
    stock = getattr(transformers, name.removeprefix(PREFIX), None) if name.startswith(PREFIX) else None
    if isinstance(stock, type) and issubclass(stock, PreTrainedConfig | PreTrainedModel):
        made = config_class(stock) if issubclass(stock, PreTrainedConfig) else model_class(stock)
        made.__name__ = made.__qualname__ = name
        globals()[name] = made  # one class for everyone who asks, as pickle needs
        return made
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
