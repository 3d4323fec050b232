"""vLLM, in this process."""

import os
from typing import Any

from .request import NEW_TOKENS, NotSupportedError, Request, TokenIds


class Adapter:
    """A checkpoint in vLLM."""

    def __init__(self, request: Request) -> None:
        # in this process, so that an error is raised here instead of being logged elsewhere
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        from vllm import LLM

        self._engine = LLM(
            request.folder,
            trust_remote_code=request.run_code,
            dtype="float32",
            skip_tokenizer_init=True,
            max_model_len=request.context,
            enforce_eager=True,
            logprobs_mode="raw_logits",
            max_logprobs=-1,
        )

    def generate(self, prompts: list[TokenIds]) -> list[TokenIds]:
        """The greedy tokens after each prompt, all prompts at once.

        Raises:
            NotSupportedError: its attention has no kernel for this head_dim.
        """
        try:
            return [list(each.token_ids) for each in self._complete(prompts, NEW_TOKENS)]
        except RuntimeError as problem:
            if "Unsupported CPU attention configuration: head_dim" in str(problem):
                raise NotSupportedError(f"it says: {problem}") from None
            raise

    def logits(self, prompt: TokenIds, written: TokenIds) -> Any:
        """The logits [1 + written, vocabulary] that choose the tokens after a prompt."""
        import numpy as np

        rows = []
        for count in range(1 + len(written)):  # one by one: a vocabulary of objects is large
            (made,) = self._complete([prompt + written[:count]], 1, logprobs=-1)
            row = made.logprobs[0]
            rows.append([row[token].logprob for token in range(len(row))])
        return np.array(rows, np.float32)

    def _complete(
        self, prompts: list[TokenIds], new_tokens: int, logprobs: int | None = None
    ) -> list[Any]:
        from vllm import SamplingParams

        greedy = SamplingParams(
            temperature=0,
            max_tokens=new_tokens,
            ignore_eos=True,
            detokenize=False,
            logprobs=logprobs,
        )
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        return [each.outputs[0] for each in self._engine.generate(given, greedy, use_tqdm=False)]
