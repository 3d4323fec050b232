"""llama.cpp, through its converter to GGUF and its Python package, which decodes one sequence."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from .request import NEW_TOKENS, AbsentError, NotSupportedError, Request, TokenIds

_REFUSALS = (
    "is not supported",
    "BPE pre-tokenizer was not recognized",
    "Cannot find Llama BPE tokenizer",
    "Llama 3 must be converted with BpeVocab",
)
"""What the converter says of an architecture or a tokenizer that it does not know."""


class Adapter:
    """A checkpoint in llama.cpp.

    Raises:
        AbsentError: the converter is missing.
        NotSupportedError: the converter does not know this architecture or tokenizer.
    """

    def __init__(self, request: Request) -> None:
        import llama_cpp

        file = str(Path("model.gguf").absolute())
        _convert(request.folder, file)
        exact = llama_cpp.GGML_TYPE_F32
        self._model = llama_cpp.Llama(
            file,
            n_ctx=request.context,
            n_batch=request.context,
            logits_all=True,
            type_k=exact,
            type_v=exact,
            verbose=False,
        )

    def generate(self, prompts: list[TokenIds]) -> list[TokenIds]:
        """The greedy tokens after each prompt."""
        found = []
        for prompt in prompts:
            self._model.reset()
            made: TokenIds = []
            read = prompt
            while len(made) < NEW_TOKENS:
                self._model.eval(read)
                read = [int(self._model.scores[self._model.n_tokens - 1].argmax())]
                made += read
            found.append(made)
        return found

    def logits(self, prompt: TokenIds, written: TokenIds) -> Any:
        """The logits [1 + written, vocabulary] that choose the tokens after a prompt."""
        self._model.reset()
        self._model.eval(prompt + written)
        return self._model.scores[len(prompt) - 1 : self._model.n_tokens].copy()


def _convert(folder: str, file: str) -> None:
    script = Path(os.environ.get("LLAMA_CPP", "")) / "convert_hf_to_gguf.py"
    if not script.is_file():
        raise AbsentError(
            f"{script} does not exist: "
            "set the environment variable LLAMA_CPP to the absolute path of a checkout of llama.cpp"
        )
    command = [sys.executable, str(script), folder, "--outtype", "f32", "--outfile", file]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return
    reason = ": ".join(["its converter failed", *done.stderr.strip().splitlines()[-1:]])
    for words in _REFUSALS:
        if words in done.stderr:
            raise NotSupportedError(reason)
    raise ValueError(reason)
