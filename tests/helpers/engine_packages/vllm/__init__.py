"""Stands in for vLLM in tests: its interface, as far as the adapter uses it, computed by
transformers.
"""

from types import SimpleNamespace
from typing import Any

SamplingParams = SimpleNamespace


class LLM:
    def __init__(
        self, model: str, *, dtype: str, max_model_len: int, trust_remote_code: bool, **options: Any
    ) -> None:
        from transformers import AutoModelForCausalLM

        assert not trust_remote_code
        assert set(options) == {
            "skip_tokenizer_init",
            "enforce_eager",
            "logprobs_mode",
            "max_logprobs",
        }
        self._longest = max_model_len
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).eval()

    def generate(
        self, prompts: list[dict[str, list[int]]], sampling: Any, *, use_tqdm: bool
    ) -> list[Any]:
        assert not use_tqdm
        return [
            SimpleNamespace(outputs=[self._decode(each["prompt_token_ids"], sampling)])
            for each in prompts
        ]

    def _decode(self, prompt: list[int], sampling: Any) -> Any:
        assert len(prompt) + sampling.max_tokens <= self._longest
        import torch

        ids, rows = list(prompt), []
        for _ in range(sampling.max_tokens):
            with torch.inference_mode():
                row = self._model(torch.tensor([ids])).logits[0, -1].float()
            rows.append(
                {token: SimpleNamespace(logprob=float(value)) for token, value in enumerate(row)}
            )
            ids.append(int(row.argmax()))
        return SimpleNamespace(
            token_ids=ids[len(prompt) :], logprobs=rows if sampling.logprobs == -1 else None
        )
