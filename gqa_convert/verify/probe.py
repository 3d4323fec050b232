"""What both models run on: their logits, decoding steps on a cache, and the shapes of the cache."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gqa_convert.errors import first_line
from gqa_convert.families.loading import cache_name, encoder_shape

_STEPS = 4
"""Decoding steps on a cache."""
_ROWS = 3
_LENGTH = 32
_ENCODER_LENGTH = 24

Outputs = dict[str, Tensor | str]
"""Outputs [rows, length, n] by the check that compares them, or why the model has none."""
Layer = tuple[int, int, torch.Size, torch.Size]
"""What a layer of the cache keeps: heads of keys and of values, and the shapes [batch, tokens,
width] of one head of each.
"""
Caches = dict[str, list[Layer]]
"""By kind of attention, `self` and `cross`: the layers that keep keys and values."""


def make_inputs(model: Any, *, cross: bool) -> dict[str, Any]:
    """Rows of random tokens, and an encoder's input where there is one.

    Args:
        model: a loaded model. An encoder-decoder model gets random tokens, audio or pictures for
            its encoder too.
        cross: whether the model has cross-attention. A decoder without its encoder then gets random
            encoder states.
    """
    config = model.config.get_text_config()
    generator = torch.Generator().manual_seed(0)

    def tokens(length: int, vocabulary: int) -> Tensor:
        """Random ids without the padding token, by which some models count positions."""
        ids = torch.randint(0, vocabulary, (_ROWS, length), generator=generator)
        padding = getattr(config, "pad_token_id", None)
        return ids if padding is None else ids.where(ids != padding, (ids + 1) % vocabulary)

    def noise(*shape: int) -> Tensor:
        return torch.randn((_ROWS, *shape), generator=generator).to(model.dtype)

    ids = tokens(_LENGTH, getattr(config, "decoder_vocab_size", None) or config.vocab_size)
    if model.config.is_encoder_decoder:
        name = model.main_input_name
        if name == "input_ids":
            memory = tokens(_ENCODER_LENGTH, config.vocab_size)
        else:
            memory = noise(*encoder_shape(model.config, 4 * _ENCODER_LENGTH))
        return {"decoder_input_ids": ids, name: memory}
    found = {"input_ids": ids}
    for name in ("encoder_hidden_states", "encoder_outputs"):
        if cross and name in inspect.signature(model.forward).parameters:
            found[name] = noise(_ENCODER_LENGTH, config.hidden_size)
    return found


def logits(model: Any, inputs: dict[str, Any]) -> Tensor:
    """The logits [rows, length, n] of every token, computed without a cache."""
    return model(**inputs, use_cache=False).logits.float()


def run(model: Any, inputs: dict[str, Any]) -> tuple[Outputs, Caches]:
    """Compute all that is compared. Eager attention stays chosen."""
    caches: Caches = {}
    found: Outputs = {"logits": logits(model, inputs)}
    found["cached decoding"] = _attempt(_decode, model, inputs, caches)
    for module in model.modules():  # parts of a model may have copies of its config
        if hasattr(module, "config"):
            module.config._attn_implementation = "eager"
    found["eager attention"] = _attempt(logits, model, inputs)
    return found, caches


def _attempt(compute: Callable[..., Tensor], *args: Any) -> Tensor | str:
    """What a function computes, or why it cannot; SOURCE may not be able to either."""
    try:
        return compute(*args)
    except Exception as problem:
        return first_line(problem)


def _decode(model: Any, inputs: dict[str, Any], caches: Caches) -> Tensor:
    """The logits [rows, _STEPS, n] of decoding steps on the cache of a prefill, whose shapes are
    noted in `caches`.
    """
    from transformers import DynamicCache

    memory, cached = dict(inputs), cache_name(model)
    name = "decoder_input_ids" if model.config.is_encoder_decoder else "input_ids"
    ids = memory.pop(name)
    if model.config.is_encoder_decoder:  # the encoder runs once, as in generation
        memory = {"encoder_outputs": model.get_encoder()(**memory)}
    memory["use_cache"] = True
    prompt, last = ids[:, :-_STEPS], ids[:, -_STEPS:]
    cache = getattr(model(**memory, **{name: prompt}), cached, None)
    if cache is None:  # RecurrentGemma only fills a cache passed to it
        cache = DynamicCache(config=model.config)
        model(**memory, **{name: prompt, cached: cache})
    caches["self"] = _layers(getattr(cache, "self_attention_cache", cache))
    if hasattr(cache, "cross_attention_cache"):
        caches["cross"] = _layers(cache.cross_attention_cache)
    memory[cached] = cache  # which every step updates in place
    steps = [model(**memory, **{name: step}).logits.float() for step in last.split(1, dim=1)]
    return torch.cat(steps, dim=1)


def _layers(cache: Any) -> list[Layer]:
    """Every layer that keeps keys and values. Other layers (recurrence, convolution) have no keys
    or an empty tensor.
    """
    found = []
    for layer in cache.layers:
        keys = getattr(layer, "keys", None)
        if keys is not None and keys.dim() == 4 and keys.numel():
            values = layer.values
            sizes = keys[:, 0].shape, values[:, 0].shape
            found.append((keys.shape[1], values.shape[1], *sizes))
    return found
