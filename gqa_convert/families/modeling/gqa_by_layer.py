"""Decoders of transformers whose layers differ in their number of K/V heads (Ainslie et al. 2023).

This file is part of gqa-convert. It is copied, with gqa_common.py, into every checkpoint with a
number of K/V heads for each layer that no stock class holds, so that transformers loads the
checkpoint without gqa-convert. Every layer is transformers' own code, made with the number of K/V
heads of that layer.
"""

import copy

from huggingface_hub.dataclasses import strict

from .gqa_common import class_maker, regroup_layers


def config_class(stock):
    """The config class of a model type with a number of K/V heads for each layer.

    config.json has them as the list `num_key_value_heads`, and again as `multi_query_group_num`. In
    the object the list is `multi_query_group_num`, and `num_key_value_heads` is the largest number,
    because transformers' code takes it for a number.
    """

    @strict
    class Config(stock):
        model_type = f"gqa_{stock.model_type.replace('-', '_')}"
        num_key_value_heads: int | list[int] | None = None
        multi_query_group_num: int | list[int] | None = None

        def __post_init__(self, **options):
            heads, layers = self.num_attention_heads, self.num_hidden_layers
            stated = heads if self.num_key_value_heads is None else self.num_key_value_heads
            by_layer = stated if isinstance(stated, list) else [stated] * layers
            if len(by_layer) != layers or any(each < 1 or heads % each for each in by_layer):
                raise ValueError(
                    f"num_key_value_heads is {by_layer}, expected a divisor of {heads} for each of "
                    f"{layers} layers"
                )
            self.num_key_value_heads, self.multi_query_group_num = max(by_layer), list(by_layer)
            super().__post_init__(**options)

        def to_dict(self):
            """The content of config.json."""
            return super().to_dict() | {
                "num_key_value_heads": copy.copy(self.multi_query_group_num)
            }

    return Config


def regroup(model, config):
    """Give each layer the number of K/V heads that the config states for it."""
    regroup_layers(model, config.multi_query_group_num)


__getattr__ = class_maker(__name__, config_class, regroup=regroup)
