"""Random inputs, the same for both models, and what the models make of them: outputs, steps on a cache, and what the
cache holds.

The outputs are logits or, of a model without a language-model head, the last hidden states.
"""

import inspect
import math
from collections.abc import Callable
from typing import Any

from gqa_convert.verify.checkpoint_reader import first_line
from gqa_convert.verify.report import Failure

Shapes = tuple[tuple[int, ...], tuple[int, ...]]
Caches = dict[str, list[Shapes]]
"""Shapes of keys and values by layer, of `self` and `cross` attention."""

TOLERANCE = {"float32": 1e-4, "float64": 1e-4}
"""Largest difference of two outputs over the outputs' standard deviation."""
HALF_TOLERANCE = 5e-2
"""The same for half precisions, of the root mean square: single numbers may be off by more, as where a router tips
over.
"""

STEPS = 4
_LENGTH, _ENCODER_LENGTH = 32, 24


class Probe:
    """Three rows of random tokens, padded to the left by different lengths, and for cross-attention something to attend
    to.

    Args:
        model: a loaded model, whose config says what it takes: tokens; or, for an encoder-decoder model, padded tokens
            or audio for
            the encoder and unpadded tokens for the decoder.
        seed: of the random numbers.
        cross: whether the model has cross-attention; a decoder by itself is given random states then.
    """

    def __init__(self, model: Any, seed: int, *, cross: bool = False) -> None:
        import torch

        config = model.config.get_text_config()
        self._generator = torch.Generator().manual_seed(seed)
        self._pairs = bool(config.is_encoder_decoder)
        length = _fitting(config, _LENGTH, "max_target_positions", "max_position_embeddings")
        pad = getattr(config, "pad_token_id", None)  # which some classes lack until a config states it
        self._pad = pad if isinstance(pad, int) and 0 <= pad < config.vocab_size else None
        self._ids = self._tokens(length, getattr(config, "decoder_vocab_size", None) or config.vocab_size)
        self._mask = torch.ones_like(self._ids)
        if not self._pairs:
            for row, padding in ((1, length // 8), (2, length // 3)):
                self._mask[row, :padding] = 0
                self._ids[row, :padding] = self._pad or 0
        self._positions = (self._mask.cumsum(1) - 1).clamp(min=0)
        self._real = self._mask.bool()
        dtype = str(model.dtype).removeprefix("torch.")
        self._exact = dtype in TOLERANCE
        self.tolerance = TOLERANCE.get(dtype, HALF_TOLERANCE)
        self._memory, self._read = (
            self._encoder_side(model, config) if self._pairs else self._states(model, config) if cross else ({}, "")
        )

    def _tokens(self, length: int, vocabulary: int) -> Any:
        """[3, length], without padding: some models count positions by it."""
        import torch

        ids = torch.randint(0, vocabulary, (3, length), generator=self._generator)
        return ids if self._pad is None else torch.where(ids == self._pad, (ids + 1) % vocabulary, ids)

    def _encoder_side(self, model: Any, config: Any) -> tuple[dict[str, Any], str]:
        """What the encoder is given: audio [3, mel bins, frames], or padded tokens [3, length]."""
        import torch

        if model.main_input_name == "input_features":
            shape = (3, config.num_mel_bins, 2 * config.max_source_positions)
            features = torch.randn(shape, generator=self._generator).to(model.dtype)
            return {"input_features": features}, f"{shape[2]} frames of random audio"
        ids = self._tokens(_fitting(config, _ENCODER_LENGTH, "max_position_embeddings"), config.vocab_size)
        mask = _padded(ids)
        if self._pad is not None:
            ids = torch.where(mask.bool(), ids, self._pad)
        return {
            "input_ids": ids,
            "attention_mask": mask,
        }, f"{int(mask.sum())} random tokens of the encoder, right padding"

    def _states(self, model: Any, config: Any) -> tuple[dict[str, Any], str]:
        """Random states [3, length, d] in the place of an encoder's output, for a decoder by itself."""
        import torch

        states = torch.randn((3, _ENCODER_LENGTH, config.hidden_size), generator=self._generator).to(model.dtype)
        known = inspect.signature(model.forward).parameters
        if "encoder_hidden_states" in known:
            mask = _padded(states[..., 0])
            return {
                "encoder_hidden_states": states,
                "encoder_attention_mask": mask,
            }, f"{int(mask.sum())} random states of an encoder"
        return (
            ({"encoder_outputs": (states,)}, "random states of an encoder") if "encoder_outputs" in known else ({}, "")
        )

    def describe(self) -> str:
        tokens = int(self._real.sum())
        return f"{tokens} random tokens, " + (
            self._read if self._pairs else "left padding" + (f", {self._read}" if self._read else "")
        )

    def _forward(self, model: Any, start: int, stop: int, memory: dict[str, Any], **options: Any) -> Any:
        import torch

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
        """What the decoder is given besides tokens: the encoder's output, as where text is generated."""
        import torch

        if not self._pairs:
            return self._memory
        with torch.no_grad():
            output = model.get_encoder()(**self._memory)
        return {"encoder_outputs": output} | {
            key: value for key, value in self._memory.items() if key == "attention_mask"
        }

    def _prefill(self, model: Any, stop: int, memory: dict[str, Any]) -> tuple[Any, Any]:
        """Outputs and the cache, which is updated in place by later steps; some models fill only one given to them."""
        from transformers import DynamicCache, EncoderDecoderCache

        result = self._forward(model, 0, stop, memory, use_cache=True)
        cache = getattr(result, "past_key_values", None)
        if cache is None:
            cache = DynamicCache(config=model.config)
            if self._memory:
                cache = EncoderDecoderCache(cache, DynamicCache(config=model.config))
            result = self._forward(model, 0, stop, memory, use_cache=True, past_key_values=cache)
        return _output(result), cache

    def output(self, model: Any) -> Any:
        """Logits or hidden states of every token that is no padding, without a cache."""
        return _output(self._forward(model, 0, self._ids.shape[1], self._memory, use_cache=False))[self._real].double()

    def difference(self, ours: Any, theirs: Any, *, rounded: bool = False) -> float:
        """Distance of outputs, as a share of their standard deviation; NaN counts as infinite. In root mean square
        where `rounded`.
        """
        if ours.shape != theirs.shape:
            return math.inf
        distance = (
            (ours - theirs).abs().max() if self._exact and not rounded else (ours - theirs).square().mean().sqrt()
        )
        error = float(distance / theirs.std().clamp(min=1e-30))
        return error if math.isfinite(error) else math.inf

    def decoding_error(self, model: Any, step: Callable[[], None]) -> tuple[float, str]:
        """Difference of outputs from a prefill and steps on its cache to those of one pass; infinite, and why, on
        failure.
        """
        import torch

        length = self._ids.shape[1]
        prefill = length - STEPS
        try:
            memory = self._encoded(model)
            first, cache = self._prefill(model, prefill, memory)
            parts = [first]
            step()
            for at in range(prefill, length):
                parts.append(_output(self._forward(model, at, at + 1, memory, use_cache=True, past_key_values=cache)))
                step()
            return self.difference(torch.cat(parts, dim=1)[self._real].double(), self.output(model)), ""
        except Exception as problem:  # judged as any other difference: unless SOURCE can do it, OUT need not
            return math.inf, first_line(problem)

    def cached_shapes(self, model: Any) -> tuple[Caches, str]:
        """The shapes of keys and values that the model keeps after a pass; none, and why, if there is no cache."""
        try:
            cache = self._prefill(model, self._ids.shape[1], self._encoded(model))[1]
            if not hasattr(cache, "self_attention_cache"):
                return {"self": cache_shapes(cache)}, "its cache is empty"
            pair = {"self": cache.self_attention_cache, "cross": cache.cross_attention_cache}
            return {kind: cache_shapes(one) for kind, one in pair.items()}, "its cache is empty"
        except Exception as problem:
            return {}, first_line(problem)


def _output(result: Any) -> Any:
    """[3, length, vocabulary or d]."""
    return result.logits if hasattr(result, "logits") else result.last_hidden_state


def _fitting(config: Any, length: int, *keys: str) -> int:
    """`length`, unless the config allows for fewer positions."""
    longest = next((value for key in keys if isinstance(value := getattr(config, key, None), int)), length)
    return min(length, longest) if longest > STEPS + 4 else length


def _padded(rows: Any) -> Any:
    """A mask [3, length] of which the second and the third row end in padding of different lengths."""
    import torch

    mask = torch.ones(rows.shape, dtype=torch.long)
    length = rows.shape[1]
    mask[1, length - length // 6 :] = 0
    mask[2, length - length // 3 :] = 0
    return mask


def cache_shapes(cache: Any) -> list[Shapes]:
    """The shapes [batch, heads, length, width] of keys and values, in every layer of a cache that keeps them."""
    if hasattr(cache, "layers"):
        return _shapes([(getattr(layer, "keys", None), getattr(layer, "values", None)) for layer in cache.layers])
    if hasattr(cache, "key_cache"):
        return _shapes(list(zip(cache.key_cache, cache.value_cache, strict=True)))
    raise Failure(f"the model's cache is a {type(cache).__name__}, which has no keys to look at")


def _shapes(pairs: list[tuple[Any, Any]]) -> list[Shapes]:
    """Layers of other kinds (recurrence, convolution) keep no keys, or an empty tensor in their place."""
    shapes = [tuple(tuple(getattr(tensor, "shape", ())) for tensor in pair) for pair in pairs]
    return [(keys, values) for keys, values in shapes if len(keys) == len(values) == 4 and 0 not in keys]
