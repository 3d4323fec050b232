"""The loss of models with the K/V caches of transformers (bfloat16, fp8) and of llama.cpp (f16, q8_0, q4_0).

    gqa-convert check-serving MODEL --client llama.cpp --install
    python -m benchmarks.cache_quantisation MODEL... --tokens FILE --out FILE

Text is given to the model in pieces, so that every piece reads the cache of those before. llama.cpp gets the model as a GGUF file in bfloat16; it is
left out where it is not installed.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from gqa_convert.serving.client import CLIENTS, LLAMA_CPP
from gqa_convert.serving.installing import find_place
from gqa_convert.serving.llama_cpp import CONVERT_WITHOUT_TOKENIZER

WORKER = Path(__file__).with_name("cache_worker.py")

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


def in_llama_cpp(folder: str, tokens: Path) -> Rows:
    """llama.cpp's caches, measured by `cache_worker.py` in the interpreter that has llama.cpp."""
    client = next(client for client in CLIENTS if client.name == "llama.cpp")
    place = find_place(client)
    if place is None or place.folder is None:
        sys.stderr.write("llama.cpp is not installed and left out\n")
        return
    size = json.loads((Path(folder) / "config.json").read_text())["vocab_size"]
    with tempfile.TemporaryDirectory() as made:
        file, script = Path(made) / "model.gguf", place.folder / LLAMA_CPP / "convert_hf_to_gguf.py"
        # the converter knows tokenizers by a list; the windows are token ids already
        convert = [place.python, "-c", CONVERT_WITHOUT_TOKENIZER, str(script), str(size), folder]
        convert += ["--outtype", "bf16", "--outfile", str(file)]
        subprocess.run(convert, env=place.environment(), check=True, capture_output=True)
        worker = [place.python, str(WORKER), str(file), str(tokens), str(PIECE)]
        ended = subprocess.run(worker, env=place.environment(), check=True, stdout=subprocess.PIPE, text=True)
    for line in ended.stdout.splitlines():
        if line.startswith("cache "):
            row = json.loads(line.removeprefix("cache "))
            yield row["cache"], row["bytes_per_token"], row["loss"]


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
    """Measure all caches with every model."""
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
        for cache, nbytes, loss in chain(in_transformers(model, windows), in_llama_cpp(model, options.tokens)):
            row = {"model": model, "cache": cache, "bytes_per_token": nbytes, "loss": loss}
            print(json.dumps(row), flush=True)
            rows.append(row)
            options.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
