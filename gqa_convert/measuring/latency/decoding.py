"""Runs one version: a prefill that fills the K/V cache, and decode steps by the model's forward pass.

The cache is transformers' dynamic cache, which `generate` uses by default and which copies keys and values into a longer
tensor at every step.
"""

import inspect
from typing import Any

import torch


class Decoder:
    """A model with its cache at one batch and context."""

    def __init__(self, model: Any, batch: int, context: int, encoder_tokens: int | None) -> None:
        """
        Args:
            model: in evaluation mode.
            batch: sequences.
            context: tokens in the cache when decoding begins.
            encoder_tokens: of the input; None without an encoder.
        """
        self._model = model
        self.hears: bool = model.main_input_name != "input_ids"
        self._random = {"device": model.device, "generator": torch.Generator(model.device).manual_seed(0)}
        self._vocabulary = model.get_input_embeddings().num_embeddings
        self._prompt = self._tokens(batch, context)
        self._token = self._tokens(batch, 1)
        self._input = None if encoder_tokens is None else self._encoder_input(batch, encoder_tokens)
        self._ids = "input_ids" if encoder_tokens is None else "decoder_input_ids"
        self._options: dict[str, Any] = {"use_cache": True}
        if "logits_to_keep" in inspect.signature(model.forward).parameters:
            self._options["logits_to_keep"] = 1
        self._cache: Any = None
        self._states: list[dict[str, Any]] = []

    def prefill(self) -> None:
        """Encode the input, if there is an encoder, and read a prompt of `context` tokens."""
        self._cache = None
        if self._input is not None:
            with torch.inference_mode():
                self._options["encoder_outputs"] = self._model.get_encoder()(self._input, return_dict=True)
        self._read(self._prompt)
        self._states = [dict(vars(layer)) for layer in self._self_layers()]

    def step(self) -> None:
        """Decode one token."""
        self._read(self._token)

    def rewind(self) -> None:
        """Return to the state after `prefill`; recurrent layers keep theirs, on which their time does not depend."""
        for layer, state in zip(self._self_layers(), self._states, strict=True):
            vars(layer).update(state)

    def cache_bytes(self) -> tuple[int, int]:
        """Bytes of the live keys and values of the decoder's tokens, and of the encoder's."""
        cross = getattr(self._cache, "cross_attention_cache", None)
        crossed = [] if cross is None else cross.layers
        return sum(map(_nbytes, self._self_layers())), sum(map(_nbytes, crossed))

    def _read(self, ids: torch.Tensor) -> None:
        inputs = {self._ids: ids, "past_key_values": self._cache, **self._options}
        with torch.inference_mode():
            self._cache = self._model(**inputs).past_key_values

    def _self_layers(self) -> list[Any]:
        return list(getattr(self._cache, "self_attention_cache", self._cache).layers)

    def _tokens(self, batch: int, count: int) -> torch.Tensor:
        return torch.randint(self._vocabulary, (batch, count), **self._random)

    def _encoder_input(self, batch: int, tokens: int) -> torch.Tensor:
        """Input tokens or, for a speech model, audio features of the fixed length that its encoder expects and halves."""
        if not self.hears:
            return self._tokens(batch, tokens)
        shape = (batch, self._model.config.num_mel_bins, 2 * tokens)
        return torch.randn(shape, dtype=self._model.dtype, **self._random)


def _nbytes(layer: Any) -> int:
    keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
    if not isinstance(keys, torch.Tensor) or not isinstance(values, torch.Tensor):
        return 0  # a recurrent layer
    return int(keys.nbytes + values.nbytes)
