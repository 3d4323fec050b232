"""Runs one version: a prefill that fills the K/V cache, and decode steps by the model's forward pass.

The cache is transformers' dynamic cache, which `generate` uses by default and which copies keys and values into a longer
tensor at every step.
"""

import inspect
from typing import Any

import torch


class Decoder:
    """A model with its cache at one batch and context."""

    def __init__(self, model: Any, batch: int, context: int) -> None:
        """
        Args:
            model: in evaluation mode.
            batch: sequences.
            context: tokens in the cache when decoding begins.
        """
        self._model = model
        vocabulary = model.get_input_embeddings().num_embeddings
        generator = torch.Generator(model.device).manual_seed(0)
        tokens = torch.randint(vocabulary, (batch, context + 1), generator=generator, device=model.device)
        self._prompt, self._token = tokens[:, :-1], tokens[:, -1:]
        accepted = inspect.signature(model.forward).parameters
        self._options = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}
        self._cache: Any = None
        self._states: list[dict[str, Any]] = []

    def prefill(self) -> None:
        """Read a prompt of `context` tokens."""
        self._cache = None
        self._read(self._prompt)
        self._states = [dict(vars(layer)) for layer in self._cache.layers]

    def step(self) -> None:
        """Decode one token."""
        self._read(self._token)

    def rewind(self) -> None:
        """Return to the state after `prefill`; recurrent layers keep theirs, on which their time does not depend."""
        for layer, state in zip(self._cache.layers, self._states, strict=True):
            vars(layer).update(state)

    def cache_bytes(self) -> int:
        """Bytes of the live keys and values."""
        return sum(_nbytes(layer) for layer in self._cache.layers)

    def _read(self, ids: torch.Tensor) -> None:
        with torch.inference_mode():
            read = self._model(input_ids=ids, past_key_values=self._cache, use_cache=True, **self._options)
        self._cache = read.past_key_values


def _nbytes(layer: Any) -> int:
    keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
    if not isinstance(keys, torch.Tensor) or not isinstance(values, torch.Tensor):
        return 0  # a recurrent layer
    return int(keys.nbytes + values.nbytes)
