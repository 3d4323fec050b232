"""Runs one version: prefill, the live cache, and decode steps by the model's forward pass.

The cache is the one that `generate` uses by default, transformers' dynamic cache, which copies keys and values into a
longer tensor at every step.
"""

import inspect
from typing import Any

import torch

from gqa_convert.errors import OptionError


class Decoder:
    """A model with its cache at one batch and context.

    Shape legend: b batch, N K/V heads, k cached tokens, c head_dim.
    """

    def __init__(self, model: Any, batch: int, context: int, encoder_tokens: int | None) -> None:
        """
        Args:
            model: in evaluation mode.
            batch: sequences.
            context: tokens in the cache when decoding begins.
            encoder_tokens: of the input, for an encoder-decoder.
        """
        self._model, self._batch, self._context, self._encoder_tokens = model, batch, context, encoder_tokens
        self._generator = torch.Generator(model.device).manual_seed(0)
        self._cache: Any = None
        self._states: list[dict[str, Any]] = []
        self._arguments: dict[str, Any] = {}
        accepted = inspect.signature(model.forward).parameters
        self._options = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}
        self._token = self._tokens(1)
        self._prompt: torch.Tensor | None = None

    def drop(self) -> None:
        """Free the cache."""
        self._cache, self._states, self._arguments = None, [], {}

    def prefill(self) -> None:
        """Read the prompt of `context` tokens or, in an encoder-decoder, encode the input and decode the first
        token.
        """
        self.drop()
        with torch.inference_mode():
            if self._prompt is None:
                self._prompt = self._make_prompt(self._encoder_tokens or self._context)
            if self._encoder_tokens is None:
                self._cache = self._model(input_ids=self._prompt, use_cache=True, **self._options).past_key_values
                return
            self._arguments = {"encoder_outputs": self._model.get_encoder()(self._prompt, return_dict=True)}
            self._cache = self._model(**self._arguments, decoder_input_ids=self._token, use_cache=True).past_key_values

    def fill(self) -> None:
        """Keep the cache of the prefill, or begin one with a step, and extend it to the context with random keys and
        values.
        """
        with torch.inference_mode():
            if self._cache is None:
                self._begin()
            for layer in self._self_layers():
                _lengthen(layer, self._context, self._generator)
            for layer in self._cross_layers():
                _lengthen(layer, self._encoder_tokens or 0, self._generator)
        self._states = [dict(vars(layer)) for layer in self._self_layers()]

    def step(self) -> None:
        """Decode one token."""
        with torch.inference_mode():
            if self._encoder_tokens is None:
                self._model(input_ids=self._token, past_key_values=self._cache, use_cache=True)
            else:
                self._model(
                    **self._arguments, decoder_input_ids=self._token, past_key_values=self._cache, use_cache=True
                )

    def rewind(self) -> None:
        """Return to the state after `fill`; recurrent layers keep their state, since their cost does not depend on it."""
        for layer, state in zip(self._self_layers(), self._states, strict=True):
            vars(layer).update(state)

    def cache_bytes(self) -> tuple[int, int]:
        """Bytes of the live keys and values of the decoder's tokens and, in an encoder-decoder, of the encoder's."""
        own, cross = (sum(_nbytes(layer) for layer in layers) for layers in (self._self_layers(), self._cross_layers()))
        return own, cross

    def cache_shapes(self) -> list[tuple[int, ...]]:
        """The shapes [b, N, k, c] of the live keys of every layer that has any; cross-attention comes last."""
        layers = (*self._self_layers(), *self._cross_layers())
        return [tuple(layer.keys.shape) for layer in layers if _holds(layer)]

    def _begin(self) -> None:
        """A cache of one token."""
        if self._encoder_tokens is None:
            self._cache = self._model(input_ids=self._token, use_cache=True, **self._options).past_key_values
            return
        encoded = self._model.get_encoder()(self._make_prompt(1), return_dict=True)
        self._arguments = {"encoder_outputs": encoded}
        self._cache = self._model(**self._arguments, decoder_input_ids=self._token, use_cache=True).past_key_values
        width = encoded.last_hidden_state.shape[-1]
        encoded.last_hidden_state = self._random(self._batch, self._encoder_tokens, width)

    def _self_layers(self) -> list[Any]:
        return list(getattr(self._cache, "self_attention_cache", self._cache).layers)

    def _cross_layers(self) -> list[Any]:
        cross = getattr(self._cache, "cross_attention_cache", None)
        return [] if cross is None else list(cross.layers)

    def _tokens(self, count: int) -> torch.Tensor:
        vocabulary = self._model.get_input_embeddings().num_embeddings
        return torch.randint(vocabulary, (self._batch, count), device=self._model.device, generator=self._generator)

    def _make_prompt(self, tokens: int) -> torch.Tensor:
        """Input tokens or, for a speech model, audio features of the fixed length that its encoder expects and halves."""
        if self._model.main_input_name == "input_ids":
            return self._tokens(tokens)
        config = self._model.config
        return self._random(self._batch, config.num_mel_bins, 2 * config.max_source_positions)

    def _random(self, *shape: int) -> torch.Tensor:
        model = self._model
        return torch.randn(*shape, device=model.device, dtype=model.dtype, generator=self._generator)


def _holds(layer: Any) -> bool:
    return isinstance(getattr(layer, "keys", None), torch.Tensor) and layer.keys.dim() == 4


def _nbytes(layer: Any) -> int:
    return sum(states.numel() * states.element_size() for states in (layer.keys, layer.values)) if _holds(layer) else 0


def _lengthen(layer: Any, tokens: int, generator: torch.Generator) -> None:
    """Extend a cache layer to `tokens` tokens, or to its window, with random keys and values of the same shape."""
    if not _holds(layer) or layer.get_seq_length() == tokens:
        return
    if hasattr(layer, "indexer_keys"):
        raise OptionError("--no-prefill: this model's cache holds more than keys and values: leave it out")
    sliding = getattr(layer, "is_sliding", False)
    length = min(tokens, layer.sliding_window - 1) if sliding else tokens
    for name in ("keys", "values"):
        states = getattr(layer, name)
        shape = (*states.shape[:2], length, states.shape[3])
        setattr(layer, name, torch.randn(shape, device=states.device, dtype=states.dtype, generator=generator))
    if sliding:
        layer.cumulative_length = tokens
