"""The loss of a GGUF file with each type of llama.cpp's K/V cache. This file runs in the interpreter that has llama.cpp.

    python cache_worker.py MODEL.gguf TOKENS.json PIECE

Standard output gets one JSON line per type: its name, the bytes per token of the size that llama.cpp logs, and the mean loss in nats
per token.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

CELLS = 8192
"""Tokens that the cache has room for; the log states its size to 0.01 MiB."""
TYPES = ("F16", "Q8_0", "Q4_0")
_SIZE = re.compile(r"llama_kv_cache: size =\s*([\d.]+) MiB \(\s*(\d+) cells")


def measured(file: str, windows: list[list[int]], piece: int, kind: str) -> dict[str, Any]:
    """Bytes per token and loss with keys and values of one type."""
    import llama_cpp
    import numpy as np

    said: list[str] = []
    kept = llama_cpp.llama_log_callback(lambda level, text, _: said.append(text.decode(errors="replace")))
    llama_cpp.llama_log_set(kept, None)
    number = getattr(llama_cpp, f"GGML_TYPE_{kind}")
    options: dict[str, Any] = {
        "type_k": number,
        "type_v": number,
        "flash_attn": True,
        "n_threads": 1,
        "n_threads_batch": 1,
    }
    model = llama_cpp.Llama(file, n_ctx=CELLS, n_batch=piece, logits_all=True, **options)
    losses = []
    for window in windows:
        model.reset()
        model.eval(window)
        logits = model.scores[: len(window) - 1].astype(np.float64)
        top = logits.max(-1)
        normaliser = top + np.log(np.exp(logits - top[:, None]).sum(-1))
        losses.append(normaliser - logits[np.arange(len(logits)), window[1:]])
    size = _SIZE.search("".join(said))
    if size is None:
        raise ValueError(f"llama.cpp did not log the size of its cache: {''.join(said)[-500:]}")
    nbytes = float(size[1]) * 2**20 / int(size[2])
    return {"cache": f"llama.cpp {kind.lower()}", "bytes_per_token": nbytes, "loss": float(np.mean(losses))}


def main() -> None:
    file, tokens, piece = sys.argv[1:]
    for kind in TYPES:
        made = measured(file, json.loads(Path(tokens).read_text(encoding="utf-8")), int(piece), kind)
        sys.stdout.write("cache " + json.dumps(made) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
