"""Generation with a loaded model."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_ROOM = 256
"""Tokens for which memory is taken at once."""


@contextmanager
def generating_with(model: Any, **settings: Any) -> Iterator[None]:
    """The model with these settings for generation and none of its own, such as a repetition
    penalty. A step does not copy the cache, and on a CPU, sdpa attention reads keys and values once
    for all query heads that share them.
    """
    from transformers import GenerationConfig
    from transformers.cache_utils import DynamicLayer
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    from .modeling.gqa_common import sdpa

    stated, update = model.generation_config, DynamicLayer.update
    model.generation_config = GenerationConfig(**settings)
    ALL_ATTENTION_FUNCTIONS["sdpa"] = sdpa
    DynamicLayer.update = _update
    try:
        yield
    finally:
        DynamicLayer.update = update
        del ALL_ATTENTION_FUNCTIONS["sdpa"]
        model.generation_config = stated


def _update(layer: Any, keys: Any, values: Any, *_: Any, **__: Any) -> tuple[Any, Any]:
    """Add to a layer's cache; returns all its keys and values."""
    if not layer.is_initialized:
        layer.lazy_initialization(keys, values)
    layer.keys, layer.values = _appended(layer.keys, keys), _appended(layer.values, values)
    return layer.keys, layer.values


def _appended(kept: Any, new: Any) -> Any:
    """[B, N, S + L, c], of [B, N, S, c] or nothing and [B, N, L, c]: the beginning of a tensor with
    room for more, in which the heads' strides tell how much.
    """
    from torch.nn.functional import pad

    if not kept.numel():
        kept = new[..., :0, :]
    *sizes, length, width = kept.shape
    end = length + new.shape[-2]
    if not length or kept.stride(1) < end * width:
        kept = pad(kept, (0, 0, 0, end + _ROOM - length))
    grown = kept.as_strided((*sizes, end, width), kept.stride())
    grown[..., length:, :] = new
    return grown
