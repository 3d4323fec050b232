"""Stands in for llama-cpp-python in tests: its interface, as far as the adapter uses it,
computed by transformers.
"""

from pathlib import Path
from typing import Any

import numpy as np

GGML_TYPE_F32 = 0


class Llama:
    def __init__(
        self, model_path: str, *, n_ctx: int, verbose: bool, logits_all: bool, **options: Any
    ) -> None:
        from transformers import AutoModelForCausalLM

        assert logits_all
        assert not verbose
        assert set(options) == {"n_batch", "type_k", "type_v"}
        folder, outtype = Path(model_path).read_text(encoding="utf-8").split("\n")
        assert outtype == "f32"
        self._ids = list[int]()
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()
        self.scores = np.zeros((n_ctx, self._model.config.vocab_size), np.float32)

    @property
    def n_tokens(self) -> int:
        return len(self._ids)

    def reset(self) -> None:
        self._ids = []

    def eval(self, tokens: list[int]) -> None:
        self._ids += tokens
        import torch

        with torch.inference_mode():
            self.scores[: self.n_tokens] = self._model(torch.tensor([self._ids])).logits[0].numpy()
