"""Runs one version: a prefill that fills the K/V cache, and decode steps by the model's forward pass.

The cache is transformers' dynamic cache, which `generate` uses by default and which copies keys and values into a longer
tensor at every step.
"""

import inspect
import time
from collections.abc import Sequence
from typing import Any

import torch

from gqa_convert.families.loading import cache_name

STEPS = 8
"""Timed decode steps of a turn."""


class Decoder:
    """A model with its cache at one batch and context.

    Args:
        model: in evaluation mode.
        batch: sequences.
        context: tokens in the cache when decoding begins, and those that an encoder of text reads.
    """

    def __init__(self, model: Any, batch: int, context: int) -> None:
        self._model = model
        random: dict[str, Any] = {
            "device": model.device,
            "generator": torch.Generator(model.device).manual_seed(0),
        }
        vocabulary = model.get_input_embeddings().num_embeddings
        tokens = torch.randint(vocabulary, (batch, context + 1), **random)
        self._prompt = tokens[:, :-1]
        self._token = tokens[:, -1:]
        self._ids = "input_ids"
        self._encoded = None
        if model.config.is_encoder_decoder:
            self._ids = "decoder_input_ids"
            self._encoded = self._prompt
            if (
                model.main_input_name != "input_ids"
            ):  # sound, of the length that the encoder expects and halves
                shape = (batch, model.config.num_mel_bins, 2 * model.config.max_source_positions)
                self._encoded = torch.randn(shape, dtype=model.dtype, **random)
        self._options: dict[str, Any] = {"use_cache": True}
        if "logits_to_keep" in inspect.signature(model.forward).parameters:
            self._options["logits_to_keep"] = 1
        self._cache: Any = None

    def prefill(self) -> float:
        """Encode the input, if there is an encoder, and read the prompt into an empty cache; return the seconds."""
        self._cache = None
        began = self._now()
        if self._encoded is not None:
            with torch.inference_mode():
                self._options["encoder_outputs"] = self._model.get_encoder()(
                    self._encoded, return_dict=True
                )
        self._read(self._prompt)
        return self._now() - began

    def turn(self) -> float:
        """Decode some tokens after the prompt, and return the seconds for each."""
        layers = getattr(self._cache, "self_attention_cache", self._cache).layers
        states = [dict(vars(layer)) for layer in layers]
        self._read(
            self._token
        )  # the version before has left its own weights in the processor's caches
        began = self._now()
        for _ in range(STEPS):
            self._read(self._token)
        seconds = self._now() - began
        for layer, state in zip(layers, states, strict=True):
            vars(layer).update(
                state
            )  # recurrent layers keep theirs, on which their time does not depend
        return seconds / STEPS

    def cache_bytes(self) -> tuple[int, int]:
        """Bytes of the live keys and values of the decoder's tokens, and of the encoder's."""
        own = getattr(self._cache, "self_attention_cache", self._cache)
        cross = getattr(self._cache, "cross_attention_cache", None)
        return _nbytes(own.layers), _nbytes(cross.layers if cross else [])

    def _read(self, ids: torch.Tensor) -> None:
        name = cache_name(self._model)
        inputs = {self._ids: ids, name: self._cache, **self._options}
        with torch.inference_mode():
            self._cache = getattr(self._model(**inputs), name)

    def _now(self) -> float:
        """The time when a GPU, which works asynchronously, has done what it was given."""
        if self._model.device.type == "cuda":
            torch.cuda.synchronize(self._model.device)
        return time.perf_counter()


def _nbytes(layers: Sequence[Any]) -> int:
    found = 0
    for layer in layers:
        for tensor in (getattr(layer, "keys", None), getattr(layer, "values", None)):
            if isinstance(tensor, torch.Tensor):  # a recurrent layer has none
                found += tensor.nbytes
    return found
