"""What both models run on: their logits, decoding steps on a cache, and the shapes of the cache."""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gqa_convert.errors import first_line
from gqa_convert.families.loading import cache_name, encoder_shape

TOLERANCE = 1e-4
"""In float32, for the largest difference of two outputs, relative to their standard deviation."""
HALF_TOLERANCE = 5e-2
"""In half precision, for the root mean square of the difference. Single numbers may be off by more,
for example where a router chooses another expert.
"""
STEPS = 4
"""Decoding steps on a cache."""
_ROWS = 3
_LENGTH = 32
_ENCODER_LENGTH = 24


class CachedLayer(NamedTuple):
    """What a layer keeps.

    Attributes:
        heads: of keys and of values.
        sizes: the shapes [batch, tokens, width] of one head of each.
    """

    heads: tuple[int, int]
    sizes: tuple[torch.Size, torch.Size]


Caches = dict[str, list[CachedLayer]]
"""By kind of attention, `self` and `cross`: the layers that keep keys and values."""


class Run(NamedTuple):
    """What a model computed: outputs [rows, length, n], or why it has none.

    Attributes:
        logits: of every token, without a cache.
        steps: of decoding on the cache of a prefill.
        eager: the logits with eager attention.
        caches: after the prefill.
    """

    logits: Tensor
    steps: Tensor | str
    eager: Tensor | str
    caches: Caches


class Probe:
    """Rows of random tokens, and an encoder's input where there is one.

    Args:
        model: a loaded model. An encoder-decoder model gets random tokens, audio or pictures for
            its encoder too.
        cross: whether the model has cross-attention. A decoder without its encoder then gets random
            encoder states.
    """

    def __init__(self, model: Any, *, cross: bool) -> None:
        config = model.config.get_text_config()
        self._generator = torch.Generator().manual_seed(0)
        self._pairs = bool(model.config.is_encoder_decoder)
        vocabulary = getattr(config, "decoder_vocab_size", None) or config.vocab_size
        self._ids = self._tokens(config, _LENGTH, vocabulary)
        self._exact = model.dtype in (torch.float32, torch.float64)
        self.tolerance = TOLERANCE if self._exact else HALF_TOLERANCE
        # the inputs besides the decoder's tokens
        self._memory: dict[str, Any] = {}
        name = model.main_input_name
        if self._pairs and name == "input_ids":
            self._memory[name] = self._tokens(config, _ENCODER_LENGTH, config.vocab_size)
        elif self._pairs:
            shape = encoder_shape(model.config, 4 * _ENCODER_LENGTH)
            self._memory[name] = self._noise(model, *shape)
        elif cross:
            states = self._noise(model, _ENCODER_LENGTH, config.hidden_size)
            known = inspect.signature(model.forward).parameters
            if "encoder_hidden_states" in known:
                self._memory["encoder_hidden_states"] = states
            elif "encoder_outputs" in known:
                self._memory["encoder_outputs"] = (states,)

    def _tokens(self, config: Any, length: int, vocabulary: int) -> Tensor:
        """Random ids [rows, length] without the padding token, by which some models count
        positions.
        """
        for key in ("max_target_positions", "max_position_embeddings"):
            length = min(length, getattr(config, key, None) or length)
        ids = torch.randint(0, vocabulary, (_ROWS, length), generator=self._generator)
        padding = getattr(config, "pad_token_id", None)
        return ids if padding is None else ids.where(ids != padding, (ids + 1) % vocabulary)

    def _noise(self, model: Any, *shape: int) -> Tensor:
        return torch.randn((_ROWS, *shape), generator=self._generator).to(model.dtype)

    def run(self, model: Any) -> Run:
        """Compute all that is compared. Eager attention stays chosen."""
        logits = self.logits(model)
        caches: Caches = {}
        steps = _attempt(self._decode, model, caches)
        for module in model.modules():  # parts of a model may have copies of its config
            if hasattr(module, "config"):
                module.config._attn_implementation = "eager"
        return Run(logits, steps, _attempt(self.logits, model), caches)

    def logits(self, model: Any) -> Tensor:
        """The logits [rows, length, n] of every token, computed without a cache."""
        return self._forward(model, self._ids, self._memory, use_cache=False)[0]

    def difference(self, ours: Tensor, theirs: Tensor) -> float:
        """The distance of two outputs, relative to the standard deviation of the second."""
        gap = ours - theirs
        distance = gap.abs().max() if self._exact else gap.square().mean().sqrt()
        return float(distance / theirs.std().clamp(min=1e-30))

    def _decode(self, model: Any, caches: Caches) -> Tensor:
        """The outputs [rows, STEPS, n] of decoding steps on the cache of a prefill, whose shapes
        are noted in `caches`.
        """
        from transformers import DynamicCache

        prompt, last = self._ids[:, :-STEPS], self._ids[:, -STEPS:]
        memory = self._memory
        if self._pairs:  # the encoder runs once, as in generation
            memory = {"encoder_outputs": model.get_encoder()(**memory)}
        _, cache = self._forward(model, prompt, memory, use_cache=True)
        name = cache_name(model)
        if cache is None:  # RecurrentGemma only fills a cache passed to it
            cache = DynamicCache(config=model.config)
            self._forward(model, prompt, memory, use_cache=True, **{name: cache})
        caches["self"] = _layers(getattr(cache, "self_attention_cache", cache))
        if hasattr(cache, "cross_attention_cache"):
            caches["cross"] = _layers(cache.cross_attention_cache)
        outputs = []
        for step in last.split(1, dim=1):
            found, _ = self._forward(model, step, memory, use_cache=True, **{name: cache})
            outputs.append(found)
        return torch.cat(outputs, dim=1)

    def _forward(
        self, model: Any, ids: Tensor, memory: dict[str, Any], **options: Any
    ) -> tuple[Tensor, Any]:
        """The outputs, and the cache, which later steps update in place."""
        options["decoder_input_ids" if self._pairs else "input_ids"] = ids
        result = model(**memory, **options)
        return result.logits.float(), getattr(result, cache_name(model), None)


def _attempt(compute: Callable[..., Tensor], *args: Any) -> Tensor | str:
    """What a function computes, or why it cannot; SOURCE may not be able to either."""
    try:
        return compute(*args)
    except Exception as problem:
        return first_line(problem)


def _layers(cache: Any) -> list[CachedLayer]:
    """Every layer that keeps keys and values. Other layers (recurrence, convolution) have no keys
    or an empty tensor.
    """
    found = []
    for layer in cache.layers:
        keys = getattr(layer, "keys", None)
        if keys is not None and keys.dim() == 4 and keys.numel():
            heads = keys.shape[1], layer.values.shape[1]
            found.append(CachedLayer(heads, (keys[:, 0].shape, layer.values[:, 0].shape)))
    return found
