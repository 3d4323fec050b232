"""Random inputs that both models run on: their outputs, decoding steps on a cache, and the shapes in the cache.

The outputs are logits or, for a model without a language-model head, the last hidden states.
"""

import inspect
import math
from dataclasses import dataclass, field
from typing import Any

import torch

from gqa_convert.verify.report import Failure, first_line

TOLERANCE = 1e-4
"""The tolerance in float32 for the largest difference of two outputs, relative to the outputs' standard deviation."""
HALF_TOLERANCE = 5e-2
"""The tolerance in half precision, for the root mean square of the difference. Single numbers may be off by more, for
example where a router chooses another expert.
"""
STEPS = 4
"""Decoding steps on a cache."""
_LENGTH, _ENCODER_LENGTH = 32, 24

Shapes = tuple[tuple[int, ...], tuple[int, ...]]
"""The shapes [batch, heads, length, head_dim] of a layer's keys and values."""


@dataclass
class Decoding:
    """What a model does with a cache."""

    error: float = math.inf
    """The distance between the outputs of a prefill with steps on its cache and those of one pass."""
    problem: str = ""
    """Why the model cannot decode, if it cannot."""
    caches: dict[str, list[Shapes]] = field(default_factory=dict)
    """The shapes in its caches after one pass, of `self` and `cross` attention, by layer with keys."""
    no_cache: str = "its cache is empty"
    """Why `caches` is empty, if it is."""


class Probe:
    """Three rows of random tokens with left padding of different lengths, and an encoder's input where there is one.

    Args:
        model: a loaded model. An encoder-decoder model gets padded tokens or audio for the encoder, and tokens without
            padding for the decoder.
        cross: whether the model has cross-attention. A decoder without its encoder then gets random encoder states.
    """

    def __init__(self, model: Any, *, cross: bool) -> None:
        config = model.config.get_text_config()
        self._generator = torch.Generator().manual_seed(0)
        self._pairs = bool(config.is_encoder_decoder)
        length = _fitting(config, _LENGTH, "max_target_positions", "max_position_embeddings")
        pad = getattr(config, "pad_token_id", None)  # some classes lack the attribute until a config states it
        self._pad = pad if isinstance(pad, int) and 0 <= pad < config.vocab_size else None
        self._ids = self._tokens(length, getattr(config, "decoder_vocab_size", None) or config.vocab_size)
        self._mask = torch.ones_like(self._ids)
        if not self._pairs:
            for row, padding in ((1, length // 8), (2, length // 3)):
                self._mask[row, :padding] = 0
                self._ids[row, :padding] = self._pad or 0
        self._positions = (self._mask.cumsum(1) - 1).clamp(min=0)
        self._real = self._mask.bool()
        self._exact = model.dtype in (torch.float32, torch.float64)
        self.tolerance = TOLERANCE if self._exact else HALF_TOLERANCE
        self._memory: dict[str, Any] = {}
        read = "left padding"
        if self._pairs:
            read = self._add_encoder_input(model, config)
        elif cross:
            read = ", ".join([read, *self._add_encoder_states(model, config)])
        self.description = f"{int(self._real.sum())} random tokens, {read}"
        """The inputs in words."""

    def _tokens(self, length: int, vocabulary: int) -> torch.Tensor:
        """Random ids [3, length] without the padding token, by which some models count positions."""
        ids = torch.randint(0, vocabulary, (3, length), generator=self._generator)
        return ids if self._pad is None else torch.where(ids == self._pad, (ids + 1) % vocabulary, ids)

    def _add_encoder_input(self, model: Any, config: Any) -> str:
        """Add audio [3, mel bins, frames] or padded tokens [3, length], and describe it."""
        if model.main_input_name == "input_features":
            shape = (3, config.num_mel_bins, 2 * config.max_source_positions)
            self._memory = {"input_features": torch.randn(shape, generator=self._generator).to(model.dtype)}
            return f"{shape[2]} frames of random audio"
        ids = self._tokens(_fitting(config, _ENCODER_LENGTH, "max_position_embeddings"), config.vocab_size)
        mask = _padded(ids)
        if self._pad is not None:
            ids = torch.where(mask.bool(), ids, self._pad)
        self._memory = {"input_ids": ids, "attention_mask": mask}
        return f"{int(mask.sum())} random tokens of the encoder, right padding"

    def _add_encoder_states(self, model: Any, config: Any) -> list[str]:
        """Add random states [3, length, hidden_size] in place of an encoder's output, and describe them."""
        states = torch.randn((3, _ENCODER_LENGTH, config.hidden_size), generator=self._generator).to(model.dtype)
        known = inspect.signature(model.forward).parameters
        if "encoder_hidden_states" in known:
            mask = _padded(states[..., 0])
            self._memory = {"encoder_hidden_states": states, "encoder_attention_mask": mask}
            return [f"{int(mask.sum())} random states of an encoder"]
        if "encoder_outputs" in known:
            self._memory = {"encoder_outputs": (states,)}
            return ["random states of an encoder"]
        return []

    def output(self, model: Any) -> torch.Tensor:
        """The logits or hidden states of every token except padding, computed without a cache."""
        result = self._forward(model, 0, self._ids.shape[1], self._memory, use_cache=False)
        return _output(result)[self._real].double()

    def difference(self, ours: torch.Tensor, theirs: torch.Tensor) -> float:
        """The distance of two outputs, relative to the standard deviation of the second; infinite if it is not finite."""
        if ours.shape != theirs.shape:
            return math.inf
        distance = (ours - theirs).abs().max() if self._exact else (ours - theirs).square().mean().sqrt()
        error = float(distance / theirs.std().clamp(min=1e-30))
        return error if math.isfinite(error) else math.inf

    def decode(self, model: Any) -> Decoding:
        """Decode with a cache, and look at the cache. The caller compares with SOURCE, which may not be able to either."""
        found = Decoding()
        length = self._ids.shape[1]
        prefill = length - STEPS
        try:
            memory = self._encoded(model)
            first, cache = self._prefill(model, prefill, memory)
            parts = [first]
            for at in range(prefill, length):
                step = self._forward(model, at, at + 1, memory, use_cache=True, past_key_values=cache)
                parts += [_output(step)]
            found.error = self.difference(torch.cat(parts, dim=1)[self._real].double(), self.output(model))
        except Exception as problem:
            found.problem = first_line(problem)
        try:
            cache = self._prefill(model, length, self._encoded(model))[1]
            if hasattr(cache, "self_attention_cache"):
                pair = {"self": cache.self_attention_cache, "cross": cache.cross_attention_cache}
                found.caches = {kind: cache_shapes(one) for kind, one in pair.items()}
            else:
                found.caches = {"self": cache_shapes(cache)}
        except Exception as problem:
            found.no_cache = first_line(problem)
        return found

    def _forward(self, model: Any, start: int, stop: int, memory: dict[str, Any], **options: Any) -> Any:
        options |= memory
        if self._pairs:
            options["decoder_input_ids"] = self._ids[:, start:stop]
        else:
            options |= {"input_ids": self._ids[:, start:stop], "attention_mask": self._mask[:, :stop]}
            if "position_ids" in inspect.signature(model.forward).parameters:
                options["position_ids"] = self._positions[:, start:stop]
        with torch.no_grad():
            return model(**options)

    def _encoded(self, model: Any) -> dict[str, Any]:
        """The decoder's inputs besides tokens. The encoder runs once, as in generation."""
        if not self._pairs:
            return self._memory
        with torch.no_grad():
            found = {"encoder_outputs": model.get_encoder()(**self._memory)}
        if "attention_mask" in self._memory:
            found["attention_mask"] = self._memory["attention_mask"]
        return found

    def _prefill(self, model: Any, stop: int, memory: dict[str, Any]) -> tuple[torch.Tensor, Any]:
        """The outputs, and the cache, which later steps update in place. Some models only fill a cache passed to them."""
        from transformers import DynamicCache, EncoderDecoderCache

        result = self._forward(model, 0, stop, memory, use_cache=True)
        cache = getattr(result, "past_key_values", None)
        if cache is None:
            cache = DynamicCache(config=model.config)
            if self._memory:
                cache = EncoderDecoderCache(cache, DynamicCache(config=model.config))
            result = self._forward(model, 0, stop, memory, use_cache=True, past_key_values=cache)
        return _output(result), cache


def cache_shapes(cache: Any) -> list[Shapes]:
    """The shapes of keys and values in every layer of a cache that keeps them. Other layers (recurrence, convolution) have
    no keys or an empty tensor.

    Raises:
        Failure: the cache is of an unknown class.
    """
    if hasattr(cache, "layers"):
        pairs = [(getattr(layer, "keys", None), getattr(layer, "values", None)) for layer in cache.layers]
    elif hasattr(cache, "key_cache"):
        pairs = list(zip(cache.key_cache, cache.value_cache, strict=True))
    else:
        raise Failure(f"the model's cache is a {type(cache).__name__}, which has no keys to look at")
    shapes = [(tuple(getattr(keys, "shape", ())), tuple(getattr(values, "shape", ()))) for keys, values in pairs]
    return [(keys, values) for keys, values in shapes if len(keys) == len(values) == 4 and 0 not in keys]


def _output(result: Any) -> torch.Tensor:
    """[3, length, vocabulary or hidden_size]."""
    return result.logits if hasattr(result, "logits") else result.last_hidden_state


def _fitting(config: Any, length: int, *keys: str) -> int:
    """`length`, or fewer positions if the config allows only those."""
    stated = [value for key in keys if isinstance(value := getattr(config, key, None), int)]
    return min(length, stated[0]) if stated and stated[0] > STEPS + 4 else length


def _padded(rows: torch.Tensor) -> torch.Tensor:
    """A mask [3, length] whose second and third rows end in padding of different lengths."""
    mask = torch.ones(rows.shape, dtype=torch.long)
    length = rows.shape[1]
    mask[1, length - length // 6 :] = 0
    mask[2, length - length // 3 :] = 0
    return mask
