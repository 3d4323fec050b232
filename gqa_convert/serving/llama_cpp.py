"""llama.cpp, through its converter to GGUF and its Python binding."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from .client import LLAMA_CPP, NEW_TOKENS, AbsentError, Answer, NotSupportedError, Request

_SCRIPT = "convert_hf_to_gguf.py"
CONVERT_WITHOUT_TOKENIZER = """
import runpy, sys
script, size = sys.argv[1], int(sys.argv[2])
sys.argv = [script, *sys.argv[3:]]
sys.path.insert(0, script.rpartition("/")[0])
import conversion
known = conversion.get_model_class
def set_vocab(model):
    model._set_vocab_none()
    model.gguf_writer.add_vocab_size(size)
def get_model_class(*args, **options):
    found = known(*args, **options)
    found.set_vocab = set_vocab
    return found
conversion.get_model_class = get_model_class
runpy.run_path(script, run_name="__main__")
"""
"""Runs the converter, which requires a tokenizer, on a checkpoint without one."""

_GGML_ERROR = 4
"""Level of a line in ggml's log."""
_kept: list[Any] = []
"""A callback that C code uses until the process ends."""


def answer(request: Request) -> Answer:
    """Convert the checkpoint to GGUF in float32, load the result and answer the request.

    Raises:
        AbsentError: the converter is missing.
        NotSupportedError: the converter does not know this architecture, or this tokenizer.
    """
    model = _load(request)
    tokens = [_greedy(model, prompt) for prompt in request.prompts]
    return Answer(tokens, [_logits(model, *each) for each in zip(request.sequences, request.positions, strict=True)])


def _load(request: Request) -> Any:
    import llama_cpp

    file = request.scratch / "model.gguf"
    _convert(request, _script(Path(llama_cpp.__file__)), file)
    longest = max(map(len, request.sequences))
    said: list[str] = []

    def log(level: int, text: bytes, _: Any) -> None:
        if level == _GGML_ERROR:
            said.append(text.decode(errors="replace").strip())

    _kept.append(llama_cpp.llama_log_callback(log))
    llama_cpp.llama_log_set(_kept[-1], None)
    try:
        return llama_cpp.Llama(
            str(file),
            n_ctx=longest + NEW_TOKENS,
            n_batch=longest,
            logits_all=True,
            verbose=False,
            type_k=llama_cpp.GGML_TYPE_F32,
            type_v=llama_cpp.GGML_TYPE_F32,
        )
    except ValueError:
        heads, kv_heads = (request.config.get(key) for key in ("num_attention_heads", "num_key_value_heads"))
        if request.config["model_type"] == "phi" and heads != kv_heads:
            raise NotSupportedError("its converter assumes that phi has as many K/V heads as query heads") from None
        raise ValueError(f"the converted file did not load: {said[0] if said else 'no reason given'}") from None


def _script(package: Path) -> Path:
    """The converter's script, in the checkout that the environment names or in the folder that `--install` made."""
    named = os.environ.get("LLAMA_CPP")
    script = (Path(named) if named else package.parent.parent / LLAMA_CPP) / _SCRIPT
    if not script.is_file():
        raise AbsentError(f"{script} does not exist: set the environment variable LLAMA_CPP to a checkout of llama.cpp")
    return script


def _convert(request: Request, script: Path, file: Path) -> None:
    command = (
        [str(script)]
        if request.has_tokenizer
        else ["-c", CONVERT_WITHOUT_TOKENIZER, str(script), str(request.config["vocab_size"])]
    )
    command = [sys.executable, *command, str(request.folder), "--outtype", "f32", "--outfile", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        if "is not supported" in done.stderr:
            raise NotSupportedError(f"its converter says: {last}")
        if "BPE pre-tokenizer was not recognized" in last:
            raise NotSupportedError("its converter recognises tokenizers by a list, which lacks this one")
        if "Cannot find Llama BPE tokenizer" in last or "Llama 3 must be converted with BpeVocab" in last:
            raise NotSupportedError(
                "its converter gives a DeciLM of other than 128,256 tokens the tokenizer of a Llama 2, and this one is BPE"
            )
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
