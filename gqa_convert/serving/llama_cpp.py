"""llama.cpp: its own converter to GGUF, then its Python binding."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from .client import NEW_TOKENS, AbsentError, Answer, NotSupportedError, Request


def answer(request: Request) -> Answer:
    """Convert the checkpoint to GGUF in float32, load that and ask it.

    Raises:
        AbsentError: there is no converter.
        NotSupportedError: the converter does not know this architecture.
    """
    import llama_cpp

    file = request.scratch / "model.gguf"
    _convert(request, file)
    longest = max(map(len, request.sequences))
    model = llama_cpp.Llama(
        str(file), n_ctx=longest + NEW_TOKENS, n_batch=longest, logits_all=True, verbose=False,
        type_k=llama_cpp.GGML_TYPE_F32, type_v=llama_cpp.GGML_TYPE_F32,
    )  # fmt: skip
    tokens = [_greedy(model, prompt) for prompt in request.prompts]
    return Answer(tokens, [_logits(model, *each) for each in zip(request.sequences, request.positions, strict=True)])


def _convert(request: Request, file: Path) -> None:
    script = Path(os.environ.get("LLAMA_CPP", "")) / "convert_hf_to_gguf.py"
    if not script.is_file():
        raise AbsentError(f"{script} is no file: let the environment variable LLAMA_CPP name a checkout of llama.cpp")
    command = [sys.executable, str(script), str(request.folder), "--outtype", "f32", "--outfile", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        if "is not supported" in done.stderr:
            raise NotSupportedError(f"its converter says: {last}")
        raise ValueError(f"its converter failed: {last}")


def _greedy(model: Any, prompt: list[int]) -> list[int]:
    import numpy as np

    model.reset()
    model.eval(prompt)
    made = [int(np.argmax(model.scores[len(prompt) - 1]))]
    while len(made) < NEW_TOKENS:
        model.eval(made[-1:])
        made.append(int(np.argmax(model.scores[model.n_tokens - 1])))
    return made


def _logits(model: Any, sequence: list[int], positions: list[int]) -> Any:
    model.reset()
    model.eval(sequence)
    return model.scores[positions].copy()
