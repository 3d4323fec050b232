"""Generation with a loaded model."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def generating_with(model: Any, **settings: Any) -> Iterator[None]:
    """The model with these settings for generation and none of its own, such as a repetition penalty. On a CPU, its sdpa
    attention reads keys and values once for all query heads that share them.
    """
    from transformers import GenerationConfig
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    from gqa_convert.families.modeling.gqa_common import sdpa

    stated = model.generation_config
    model.generation_config = GenerationConfig(**settings)
    ALL_ATTENTION_FUNCTIONS["sdpa"] = sdpa
    try:
        yield
    finally:
        del ALL_ATTENTION_FUNCTIONS["sdpa"]
        model.generation_config = stated
