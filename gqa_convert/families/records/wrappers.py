"""Model types that wrap a decoder of another type: vision-language models and the like. Data only.

A wrapper's config holds that of its decoder under `text_config`, and its decoder's layers lie behind one of `PREFIXES`.
What the wrapper adds around them (vision tower, projector) is copied.
"""

from collections.abc import Iterator
from typing import Final

from gqa_convert.families.family import Family
from gqa_convert.families.records.building import WHOLE_HEAD, stock

SECTION: Final = "text_config"
"""The config key of the decoder's own config."""

PREFIXES: Final = (
    "language_model.model.",
    "model.language_model.model.",
    "model.language_model.",
    "language_model.",
    "model.text_model.",
    "text_model.",
    "model.",
)
"""What stands in front of the decoder's layers: in files of transformers 4 and 5, in memory, and without a head."""

WRAPPERS: Final[dict[str, str]] = dict.fromkeys(
    ["llava", "llava_next", "llava_next_video", "vipllava", "video_llava", "idefics3", "smolvlm"],
    "llama",
) | {
    "aria": "aria_text",
    "aya_vision": "cohere2",
    "cohere2_vision": "cohere2",
    "gemma3": "gemma3_text",
    "got_ocr2": "qwen2",
    "idefics2": "mistral",
    "internvl": "qwen2",
    "lfm2_vl": "lfm2",
    "llava_onevision": "qwen2",
    "mistral3": "mistral",
    "mllama": "mllama_text_model",
    "paligemma": "gemma",
    "qwen2_5_vl": "qwen2_5_vl_text",
    "qwen2_vl": "qwen2_vl_text",
    "qwen3_vl": "qwen3_vl_text",
    "qwen3_vl_moe": "qwen3_vl_moe_text",
}
"""Wrappers, each with the model type of a decoder whose config does not name its own."""


def inner_decoders() -> Iterator[Family]:
    """Decoders that exist only inside a wrapper."""
    # multimodal rotary positions take the angle of each pair from one of three positions; the pairs are those of llama
    yield from stock("qwen2_vl_text qwen2_5_vl_text", **WHOLE_HEAD, key_norm="none", mlp="gated")
    yield from stock("qwen3_vl_text qwen3_vl_moe_text", **WHOLE_HEAD, key_norm="shared", mlp="gated")
    # some layers attend to the image in place of the text, and normalise keys there
    yield from stock(
        "mllama_text_model",
        **WHOLE_HEAD,
        attention=("self_attn", "cross_attn"),
        cross_attention=("cross_attn",),
        without_attention=("self_attn", "cross_attn"),
        key_norm="shared",
        mlp="gated",
    )


def _counts(hidden_size: int, layers: int, heads: int, vocabulary: int, context: int, **others: int) -> dict[str, int]:
    return {
        "hidden_size": hidden_size,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "vocab_size": vocabulary,
        "max_position_embeddings": context,
        **others,
    }


DEFAULTS: Final[dict[str, dict[str, int]]] = {
    "aria_text": _counts(4096, 32, 32, 32000, 2048),
    "cohere": _counts(8192, 40, 64, 256000, 8192),
    "cohere2": _counts(8192, 40, 64, 256000, 8192),
    "gemma": _counts(3072, 28, 16, 256000, 8192, num_key_value_heads=16, head_dim=256),
    "gemma2": _counts(2304, 26, 8, 256000, 8192, num_key_value_heads=4, head_dim=256),
    "gemma3_text": _counts(2304, 26, 8, 262208, 131072, num_key_value_heads=4, head_dim=256),
    "lfm2": _counts(2560, 32, 32, 65536, 128000, num_key_value_heads=8),
    "llama": _counts(4096, 32, 32, 32000, 2048),
    "mistral": _counts(4096, 32, 32, 32000, 131072, num_key_value_heads=8),
    "mllama_text_model": _counts(4096, 40, 32, 128256, 131072, num_key_value_heads=8),
    "ministral3": _counts(4096, 34, 32, 131072, 262144, num_key_value_heads=8, head_dim=128),
    "qwen2": _counts(4096, 32, 32, 151936, 32768, num_key_value_heads=32),
    "qwen2_5_vl_text": _counts(8192, 80, 64, 152064, 32768, num_key_value_heads=8),
    "qwen2_vl_text": _counts(8192, 80, 64, 152064, 32768, num_key_value_heads=8),
    "qwen3": _counts(4096, 32, 32, 151936, 32768, num_key_value_heads=32, head_dim=128),
    "qwen3_vl_moe_text": _counts(2048, 24, 16, 151936, 128000, num_key_value_heads=16),
    "qwen3_vl_text": _counts(4096, 32, 32, 151936, 128000, num_key_value_heads=32, head_dim=128),
}
"""Counts that the config of a decoder may leave out because they are the defaults of its config class in transformers.
Many wrappers on the Hub state only what differs from them.
"""
