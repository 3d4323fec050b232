"""Random inputs that both models run on: their outputs, decoding steps on a cache, and the cache's shapes.

The outputs are logits or, for a model without a language-model head, the last hidden states.
"""

import inspect
import math
from collections.abc import Callable
from typing import Any

from gqa_convert.verify.behaviour.caches import Caches, cache_shapes
from gqa_convert.verify.checkpoint_reader import first_line

TOLERANCE = {"float32": 1e-4, "float64": 1e-4}
"""The tolerance for the largest difference of two outputs, relative to the outputs' standard deviation."""
HALF_TOLERANCE = 5e-2
"""The tolerance in half precision, for the root mean square of the difference. Single numbers may be off by more, for
example where a router chooses another expert.
"""

STEPS = 4
"""Decoding steps on a cache."""
_LENGTH, _ENCODER_LENGTH = 32, 24


class Probe:
    """Three rows of random tokens with left padding of different lengths, and an encoder's input where there is one.

    Args:
        model: a loaded model. An encoder-decoder model gets padded tokens or audio for the encoder, and tokens without
            padding for the decoder.
        seed: of the random numbers.
        cross: whether the model has cross-attention. A decoder without its encoder then gets random encoder states.
    """

    def __init__(self, model: Any, seed: int, *, cross: bool = False) -> None:
        import torch

        config = model.config.get_text_config()
        self._generator = torch.Generator().manual_seed(seed)
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
        dtype = str(model.dtype).removeprefix("torch.")
        self._exact = dtype in TOLERANCE
        self.tolerance = TOLERANCE.get(dtype, HALF_TOLERANCE)
        self._memory, self._read = (
            self._encoder_side(model, config) if self._pairs else self._states(model, config) if cross else ({}, "")
        )

    def _tokens(self, length: int, vocabulary: int) -> Any:
        """Random ids [3, length] without the padding token, by which some models count positions."""
        import torch

        ids = torch.randint(0, vocabulary, (3, length), generator=self._generator)
        return ids if self._pad is None else torch.where(ids == self._pad, (ids + 1) % vocabulary, ids)

    def _encoder_side(self, model: Any, config: Any) -> tuple[dict[str, Any], str]:
        """The encoder's input, audio [3, mel bins, frames] or padded tokens [3, length], and its description."""
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
        """Random states [3, length, hidden_size] in place of an encoder's output, and their description."""
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
        """The inputs in words."""
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
        """The decoder's inputs besides tokens. The encoder runs once, as in generation."""
        import torch

        if not self._pairs:
            return self._memory
        with torch.no_grad():
            output = model.get_encoder()(**self._memory)
        return {"encoder_outputs": output} | {
            key: value for key, value in self._memory.items() if key == "attention_mask"
        }

    def _prefill(self, model: Any, stop: int, memory: dict[str, Any]) -> tuple[Any, Any]:
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

    def output(self, model: Any) -> Any:
        """The logits or hidden states of every token except padding, computed without a cache."""
        return _output(self._forward(model, 0, self._ids.shape[1], self._memory, use_cache=False))[self._real].double()

    def difference(self, ours: Any, theirs: Any) -> float:
        """The distance of two outputs, relative to their standard deviation; infinite if it is not finite.

        Args:
            ours: OUT's outputs.
            theirs: SOURCE's outputs.
        """
        if ours.shape != theirs.shape:
            return math.inf
        distance = (ours - theirs).abs().max() if self._exact else (ours - theirs).square().mean().sqrt()
        error = float(distance / theirs.std().clamp(min=1e-30))
        return error if math.isfinite(error) else math.inf

    def decoding_error(self, model: Any, step: Callable[[], None]) -> tuple[float, str]:
        """The distance between the outputs of a prefill with steps on its cache and those of one pass.

        Args:
            model: the model.
            step: called after each pass.

        Returns:
            The distance and "", or infinity and the reason if the model cannot decode.
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
        except Exception as problem:  # the caller compares with SOURCE, which may not be able to decode either
            return math.inf, first_line(problem)

    def cached_shapes(self, model: Any) -> tuple[Caches, str]:
        """The shapes in the model's cache after one pass; with the reason, if there are none."""
        try:
            cache = self._prefill(model, self._ids.shape[1], self._encoded(model))[1]
            if not hasattr(cache, "self_attention_cache"):
                return {"self": cache_shapes(cache)}, "its cache is empty"
            pair = {"self": cache.self_attention_cache, "cross": cache.cross_attention_cache}
            return {kind: cache_shapes(one) for kind, one in pair.items()}, "its cache is empty"
        except Exception as problem:
            return {}, first_line(problem)


def _output(result: Any) -> Any:
    """[3, length, vocabulary or hidden_size]."""
    return result.logits if hasattr(result, "logits") else result.last_hidden_state


def _fitting(config: Any, length: int, *keys: str) -> int:
    """`length`, or fewer positions if the config allows only those."""
    longest = next((value for key in keys if isinstance(value := getattr(config, key, None), int)), length)
    return min(length, longest) if longest > STEPS + 4 else length


def _padded(rows: Any) -> Any:
    """A mask [3, length] whose second and third rows end in padding of different lengths."""
    import torch

    mask = torch.ones(rows.shape, dtype=torch.long)
    length = rows.shape[1]
    mask[1, length - length // 6 :] = 0
    mask[2, length - length // 3 :] = 0
    return mask
