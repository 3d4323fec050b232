"""What both models run on: their logits, decoding steps on a cache, and the shapes of the cache."""

import inspect
import math
from typing import Any

import torch
from torch import Tensor

from gqa_convert.errors import first_line
from gqa_convert.families.loading import cache_name

TOLERANCE = 1e-4
"""The tolerance in float32 for the largest difference of two outputs, relative to the outputs' standard deviation."""
HALF_TOLERANCE = 5e-2
"""The tolerance in half precision, for the root mean square of the difference. Single numbers may be off by more, for
example where a router chooses another expert.
"""
STEPS = 4
"""Decoding steps on a cache."""
_ROWS = 3
_LENGTH = 32
_ENCODER_LENGTH = 24

Shape = tuple[int, ...]
Shapes = list[tuple[Shape, Shape]]
"""The shapes [batch, heads, tokens, width] of keys and of values, by layer that keeps them."""
Caches = dict[str, Shapes]
"""By kind of attention: `self` and `cross`."""


class Probe:
    """Rows of random tokens, and an encoder's input where there is one.

    Args:
        model: a loaded model. An encoder-decoder model gets random tokens or audio for its encoder too.
        cross: whether the model has cross-attention. A decoder without its encoder then gets random encoder states.
    """

    def __init__(self, model: Any, *, cross: bool) -> None:
        config = model.config.get_text_config()
        self._generator = torch.Generator().manual_seed(0)
        self._pairs = bool(config.is_encoder_decoder)
        self._ids = self._tokens(
            config, _LENGTH, getattr(config, "decoder_vocab_size", None) or config.vocab_size
        )
        self._exact = model.dtype in (torch.float32, torch.float64)
        self.tolerance = TOLERANCE if self._exact else HALF_TOLERANCE
        self._memory: dict[str, Any] = {}
        """The inputs besides the decoder's tokens."""
        if self._pairs and model.main_input_name == "input_features":
            self._memory["input_features"] = self._noise(
                model, config.num_mel_bins, 2 * config.max_source_positions
            )
        elif self._pairs:
            self._memory["input_ids"] = self._tokens(config, _ENCODER_LENGTH, config.vocab_size)
        elif cross:
            states = self._noise(model, _ENCODER_LENGTH, config.hidden_size)
            known = inspect.signature(model.forward).parameters
            if "encoder_hidden_states" in known:
                self._memory["encoder_hidden_states"] = states
            elif "encoder_outputs" in known:
                self._memory["encoder_outputs"] = (states,)

    def _tokens(self, config: Any, length: int, vocabulary: int) -> Tensor:
        """Random ids [rows, length] without the padding token, by which some models count positions."""
        for key in ("max_target_positions", "max_position_embeddings"):
            longest = getattr(config, key, None)
            if isinstance(longest, int) and longest > STEPS + 4:
                length = min(length, longest)
        ids = torch.randint(0, vocabulary, (_ROWS, length), generator=self._generator)
        padding = getattr(config, "pad_token_id", None)
        return ids if padding is None else torch.where(ids == padding, (ids + 1) % vocabulary, ids)

    def _noise(self, model: Any, *shape: int) -> Tensor:
        return torch.randn((_ROWS, *shape), generator=self._generator).to(model.dtype)

    def run(self, model: Any) -> tuple[dict[str, Any], Caches]:
        """All that is compared.

        Returns:
            Logits, those of decoding steps and those with eager attention, or why the model has none; and the cache after
            a prefill, by kind of attention: `self` and `cross`. Eager attention stays chosen.
        """
        logits = self.output(model)
        steps, caches = self._decode(model)
        for module in model.modules():  # parts of a model may have copies of its config
            if hasattr(module, "config"):
                module.config._attn_implementation = "eager"
        eager: Tensor | str
        try:
            eager = self.output(model)
        except Exception as problem:
            eager = first_line(problem)
        return {"logits": logits, "steps": steps, "eager": eager}, caches

    def output(self, model: Any) -> Tensor:
        """The logits [rows, length, n] of every token, computed without a cache."""
        return self._forward(model, self._ids, self._memory, use_cache=False)[0]

    def difference(self, ours: Tensor, theirs: Tensor) -> float:
        """The distance of two outputs, relative to the standard deviation of the second; infinite if it is not finite."""
        if ours.shape != theirs.shape:
            return math.inf
        distance = (
            (ours - theirs).abs().max() if self._exact else (ours - theirs).square().mean().sqrt()
        )
        return float((distance / theirs.std().clamp(min=1e-30)).nan_to_num(math.inf))

    def _decode(self, model: Any) -> tuple[Tensor | str, Caches]:
        """Decode with a cache, and look at the cache. The caller compares with SOURCE, which may not be able to either.

        Returns:
            The outputs [rows, STEPS, n] of steps on the cache of a prefill, or why the model cannot decode; and the cache
            after the prefill, by kind of attention: `self` and `cross`.
        """
        from transformers import DynamicCache, EncoderDecoderCache

        caches: Caches = {}
        prompt, *steps = self._ids.split([self._ids.shape[1] - STEPS, *[1] * STEPS], dim=1)
        memory, name = self._memory, cache_name(model)
        try:
            if self._pairs:  # the encoder runs once, as in generation
                with torch.no_grad():
                    memory = {"encoder_outputs": model.get_encoder()(**memory)}
            _, cache = self._forward(model, prompt, memory, use_cache=True)
            if cache is None:  # some models only fill a cache passed to them
                cache = DynamicCache(config=model.config)
                if memory:
                    cache = EncoderDecoderCache(cache, DynamicCache(config=model.config))
                self._forward(model, prompt, memory, use_cache=True, **{name: cache})
            caches = _cached_shapes(cache)
            parts = [
                self._forward(model, step, memory, use_cache=True, **{name: cache})[0]
                for step in steps
            ]
            return torch.cat(parts, dim=1), caches
        except Exception as problem:
            return first_line(problem), caches

    def _forward(
        self, model: Any, ids: Tensor, memory: dict[str, Any], **options: Any
    ) -> tuple[Tensor, Any]:
        """The outputs, and the cache, which later steps update in place."""
        options["decoder_input_ids" if self._pairs else "input_ids"] = ids
        with torch.no_grad():
            result = model(**memory, **options)
        return result.logits.float(), getattr(result, cache_name(model), None)


def _cached_shapes(cache: Any) -> Caches:
    """The shapes of keys and values in every layer that keeps them, by kind of attention. Other layers (recurrence,
    convolution) have no keys or an empty tensor.
    """
    if hasattr(cache, "self_attention_cache"):
        cross = _cached_shapes(cache.cross_attention_cache)["self"]
        return _cached_shapes(cache.self_attention_cache) | {"cross": cross}
    found: Shapes = []
    for layer in cache.layers:
        keys = getattr(layer, "keys", None)
        if keys is not None and keys.dim() == 4 and keys.numel():
            found.append((tuple(keys.shape), tuple(layer.values.shape)))
    return {"self": found}
