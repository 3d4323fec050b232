"""Time the decoding of several versions of a model in one engine. This file runs in the interpreter that has the engine.

    python engine_worker.py llama.cpp|vLLM '{"3": "3.gguf", "1": "1.gguf"}' '[[512, 1], [2048, 8]]'

The arguments are the versions (K/V heads to path: a GGUF file or a checkpoint folder) and the cells (tokens in the cache,
sequences decoded at once). Standard output gets one JSON line per cell and version: the milliseconds of each sample of
a decode step. vLLM gets one version, because a process of it has room for one engine.
"""

import json
import random
import sys
import time
from collections.abc import Iterator
from typing import Any

STEPS = 8
"""Decode steps of a sample."""
SAMPLES = 7
_PREFILL = 512
_TOKENS = 40_000
"""Random token ids are below it."""


def prompt(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(1000, _TOKENS), k=length)


class LlamaCpp:
    """A context of llama.cpp with `batch` sequences of `length` tokens each, K/V cache in float16."""

    def __init__(self, model: Any, length: int, batch: int) -> None:
        import llama_cpp

        self._lib, self._batch, self._at = llama_cpp, batch, length
        options = llama_cpp.llama_context_default_params()
        options.n_ctx = batch * (length + STEPS * (SAMPLES + 2))
        options.n_batch = options.n_ubatch = max(_PREFILL, batch)
        options.n_seq_max = batch
        options.n_threads = options.n_threads_batch = 1
        self._context = llama_cpp.llama_init_from_model(model, options)
        self._tokens = llama_cpp.llama_batch_init(max(_PREFILL, batch), 0, 1)
        for sequence in range(batch):
            ids = prompt(length, sequence)
            for start in range(0, length, _PREFILL):
                chunk = ids[start : start + _PREFILL]
                self._decode([(token, start + offset, sequence) for offset, token in enumerate(chunk)])

    def _decode(self, tokens: list[tuple[int, int, int]]) -> None:
        batch = self._tokens
        batch.n_tokens = len(tokens)
        for index, (token, position, sequence) in enumerate(tokens):
            batch.token[index], batch.pos[index] = token, position
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, sequence
            batch.logits[index] = index == len(tokens) - 1 or len(tokens) == self._batch
        if self._lib.llama_decode(self._context, batch):
            raise RuntimeError("llama.cpp did not decode")
        self._lib.llama_synchronize(self._context)

    def sample(self) -> float:
        """Milliseconds of a decode step, averaged over STEPS."""
        began = time.perf_counter()
        for _ in range(STEPS):
            self._decode([(1000 + self._at % 1000, self._at, sequence) for sequence in range(self._batch)])
            self._at += 1
        return (time.perf_counter() - began) / STEPS * 1000

    def close(self) -> None:
        self._lib.llama_batch_free(self._tokens)
        self._lib.llama_free(self._context)


def llama_cpp_times(versions: dict[str, str], cells: list[list[int]]) -> Iterator[dict[str, Any]]:
    """Every version in turn, sample by sample."""
    import llama_cpp

    llama_cpp.llama_backend_init()
    quiet = llama_cpp.llama_log_callback(lambda *_: None)
    llama_cpp.llama_log_set(quiet, None)
    options = llama_cpp.llama_model_default_params()
    models = {name: llama_cpp.llama_model_load_from_file(path.encode(), options) for name, path in versions.items()}
    for length, batch in cells:
        contexts = {name: LlamaCpp(model, length, batch) for name, model in models.items()}
        samples: dict[str, list[float]] = {name: [] for name in models}
        for turn in range(SAMPLES + 1):
            for name, context in contexts.items():
                taken = context.sample()
                if turn:  # the first one warms up
                    samples[name].append(taken)
        for name, context in contexts.items():
            context.close()
            yield {"groups": int(name), "context": length, "batch": batch, "ms": samples[name]}


def vllm_times(versions: dict[str, str], cells: list[list[int]]) -> Iterator[dict[str, Any]]:
    """The time of 1 + STEPS tokens less that of one, for prompts whose keys and values are cached already."""
    import os

    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams

    ((name, folder),) = versions.items()
    longest = max(length for length, _ in cells)
    engine = LLM(
        folder,
        dtype="bfloat16",
        skip_tokenizer_init=True,
        enable_prefix_caching=True,
        max_model_len=longest + 4 * STEPS + 1,
    )

    def seconds(prompts: list[dict[str, list[int]]], new: int) -> float:
        greedy = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
        began = time.perf_counter()
        engine.generate(prompts, greedy, use_tqdm=False)
        return time.perf_counter() - began

    for length, batch in cells:
        prompts = [{"prompt_token_ids": prompt(length, sequence)} for sequence in range(batch)]
        seconds(prompts, 1 + 4 * STEPS)
        samples = []
        for _ in range(SAMPLES):
            one = seconds(prompts, 1)
            samples.append((seconds(prompts, 1 + 4 * STEPS) - one) / (4 * STEPS) * 1000)
        yield {"groups": int(name), "context": length, "batch": batch, "ms": samples}


def main() -> None:
    engine, versions, cells = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
    for each in {"llama.cpp": llama_cpp_times, "vLLM": vllm_times}[engine](versions, cells):
        sys.stdout.write("cell " + json.dumps(each) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
