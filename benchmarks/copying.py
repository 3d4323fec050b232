"""How well models copy what they have read, which small ones can that answer no questions about
facts.

    python -m benchmarks.copying OUT.json --text TEXT SOURCE CONVERTED ...

A span of the text is read, then others, then the span again. The figure is the share of the tokens
of the second span that are the model's likeliest, behind its first `WARM` tokens, which show where
it is copied from.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from gqa_convert.data.files import Fields
from gqa_convert.data.model_tokenizer import usable_tokenizer
from gqa_convert.data.sources import as_source, open_source
from gqa_convert.families.loading import load_model

SPAN = 64
BETWEEN = 256
"""Tokens of other text between the two spans."""
WARM = 4
BLOCKS = 128


def make_blocks(text: Any, tokenizer: Any) -> torch.Tensor:
    """[BLOCKS, 2 * SPAN + BETWEEN], in the order of the text."""
    ids: list[int] = []
    for document in text.pieces(Fields()):
        ids += tokenizer(document.text, add_special_tokens=False)["input_ids"]
        if len(ids) >= BLOCKS * (SPAN + BETWEEN):
            break
    read = torch.tensor(ids[: BLOCKS * (SPAN + BETWEEN)]).view(BLOCKS, -1)
    return torch.cat([read, read[:, :SPAN]], 1)


def copied(model: Any, blocks: torch.Tensor) -> torch.Tensor:
    """[BLOCKS], the share of each second span that the model predicts."""
    shares = []
    with torch.inference_mode():
        for block in blocks.split(8):
            likeliest = model(block).logits[:, -SPAN + WARM - 1 : -1].argmax(-1)
            shares.append((likeliest == block[:, -SPAN + WARM :]).float().mean(1))
    return torch.cat(shares)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("models", nargs="+", help="the source first")
    parser.add_argument("--text", required=True, help="a file, a folder, or python-stdlib:held-out")
    given = parser.parse_args()
    text = open_source(as_source(given.text))
    blocks = make_blocks(text, usable_tokenizer(Path(given.models[0])))
    found, source = {}, None
    for name in given.models:
        shares = copied(load_model(Path(name), torch.float32)[0], blocks)
        source = shares if source is None else source
        less = shares - source
        found[Path(name).name] = {
            "copied": float(shares.mean()),
            "difference": float(less.mean()),
            "standard_error": float(less.std() / len(less) ** 0.5),
        }
        print(name, found[Path(name).name], flush=True)
    given.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
