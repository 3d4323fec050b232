"""Stands in for llama-cpp-python in tests: its interface, as far as the adapter uses it, computed by transformers."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

GGML_TYPE_F32 = 0


def llama_supports_gpu_offload() -> bool:
    return False


class Llama:
    def __init__(self, model_path: str, *, n_ctx: int, verbose: bool, logits_all: bool = False, **options: Any) -> None:
        assert not verbose
        assert set(options) == ({"n_batch", "type_k", "type_v"} if logits_all else {"n_gpu_layers"})
        folder, outtype = Path(model_path).read_text(encoding="utf-8").split("\n")
        dtype = {"f32": torch.float32, "bf16": torch.bfloat16}[outtype]
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        self._logits_all, self._ids = logits_all, list[int]()
        self.scores = np.zeros((n_ctx, self._model.config.vocab_size), np.float32)

    @property
    def n_tokens(self) -> int:
        return len(self._ids)

    def reset(self) -> None:
        self._ids = []

    def eval(self, tokens: list[int]) -> None:
        self._ids += tokens
        with torch.inference_mode():
            self._rows = self._model(torch.tensor([self._ids])).logits[0].float().numpy()
        if self._logits_all:
            self.scores[: self.n_tokens] = self._rows

    def sample(self, *, temp: float) -> int:
        assert temp == 0
        return int(self._rows[-1].argmax())
