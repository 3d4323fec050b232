"""Whisper with fewer K/V heads than query heads (Ainslie et al. 2023).

This file is part of gqa-convert. It is copied, with gqa_common.py, into every checkpoint
converted from this family, so that transformers loads the checkpoint without gqa-convert.
"""

from .gqa_common import GroupedAttention, class_maker, config_class


class GroupedWhisperAttention(GroupedAttention):
    replaced = (*GroupedAttention.replaced, "num_heads")

    def regroup(self, num_key_value_groups):
        super().regroup(num_key_value_groups)
        self.num_heads //= (
            num_key_value_groups  # the forward counts the heads of keys and values by it
        )


def whisper_config(stock):
    """The config class, whose objects have Whisper's own model type, as generate() and the pipeline
    for speech recognition ask whether this is Whisper. What is saved is the class's model type.
    """

    class Config(config_class(stock)):
        def __post_init__(self, **options):
            super().__post_init__(**options)
            self.model_type = stock.model_type

    return Config


__getattr__ = class_maker(
    __name__, whisper_config, attention={"WhisperAttention": GroupedWhisperAttention}
)
