"""The loss of models with transformers' own K/V cache and with its fp8 cache.

    python -m benchmarks.cache_quantisation MODEL... --tokens FILE --out FILE

Text is given to the model in pieces, so that every piece reads the cache of those before.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

WINDOW, WINDOWS, PIECE = 512, 8, 32
"""Tokens of a window of text, how many windows, and tokens that are given to the model at once."""

Rows = Iterator[tuple[str, float, float]]
"""The name of a cache's type, its bytes per token, and the mean loss in nats per token."""


def write_tokens(path: Path, model: str) -> None:
    """Write windows of the held-out part of the standard library, as the model's tokenizer cuts it."""
    from transformers import AutoTokenizer

    from gqa_convert.text.sources import HELD_OUT, as_source, open_source
    from gqa_convert.text.text_files import FileText

    text = ""
    source = open_source(as_source(HELD_OUT), path.parent)
    assert isinstance(source, FileText)
    for piece in source:
        text += piece.text
        if len(text) > 16 * WINDOW * WINDOWS:
            break
    ids = AutoTokenizer.from_pretrained(model)(text)["input_ids"]
    path.write_text(json.dumps([ids[start : start + WINDOW] for start in range(0, WINDOW * WINDOWS, WINDOW)]))


def in_transformers(folder: str, windows: list[list[int]]) -> Rows:
    """transformers' own cache and its fp8 cache."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.cache_utils import DynamicCache, QuantizedCache

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    ids = torch.tensor(windows)
    caches: dict[str, Callable[[], Any]] = {
        "bfloat16": lambda: DynamicCache(config=model.config),
        "fp8": lambda: QuantizedCache("fp8", model.config),
    }
    for name, make in caches.items():
        cache, losses = make(), []
        with torch.no_grad():
            for start in range(0, WINDOW, PIECE):
                logits = model(ids[:, start : start + PIECE], past_key_values=cache).logits.float()
                targets = ids[:, start + 1 : start + PIECE + 1]
                scores = logits[:, : targets.shape[1]].log_softmax(-1)
                losses.append(-scores.gather(-1, targets[..., None]).flatten())
        yield name, _stored_bytes(cache) / ids.numel(), torch.cat(losses).mean().item()


def _stored_bytes(cache: Any) -> int:
    """The bytes of all tensors that a cache holds."""
    import torch

    seen: dict[int, int] = {}

    def walk(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            seen[value.data_ptr()] = value.untyped_storage().nbytes() if value.numel() else 0
        elif isinstance(value, list | tuple):
            for each in value:
                walk(each)

    for layer in cache.layers:
        for each in vars(layer).values():
            walk(each)
    return sum(seen.values())


def main(arguments: Sequence[str]) -> None:
    """Measure both caches with every model."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cache_quantisation", description=__doc__)
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument(
        "--tokens", type=Path, required=True, help="windows of tokens; written if there is no such file"
    )
    parser.add_argument("--out", type=Path, required=True, help="JSON file to which the rows are added")
    options = parser.parse_args(arguments)
    if not options.tokens.is_file():
        write_tokens(options.tokens, options.models[0])
    windows = json.loads(options.tokens.read_text())
    rows = json.loads(options.out.read_text()) if options.out.is_file() else []
    for model in options.models:
        for cache, nbytes, loss in in_transformers(model, windows):
            row = {"model": model, "cache": cache, "bytes_per_token": nbytes, "loss": loss}
            print(json.dumps(row), flush=True)
            rows.append(row)
            options.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
