"""What the tests of encoder-decoders' training data share: tokenizers as BART's, mBART's, Marian's
and T5's, tiny models, and pairs.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import processors

from tests.helpers.data_helpers import word_tokenizer
from tests.helpers.own_files import SIZES, make_source

BOS, PAD, EOS, UNK, MASK = range(5)
WORDS = 40


def bart_tokenizer() -> Any:
    """Words w0, w1, ... from the token 5 on, `<s>` and `</s>` around a text as BART writes them."""
    names = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", *(f"w{number}" for number in range(WORDS))]
    tokenizer = word_tokenizer(names, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    frame = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", BOS), ("</s>", EOS)]
    )
    tokenizer.backend_tokenizer.post_processor = frame
    return tokenizer


def words(random: np.random.Generator, count: int) -> str:
    return " ".join(f"w{number}" for number in random.integers(0, WORDS, count))


def write_pairs(
    path: Path, count: int, *, longest: int = 12, seed: int = 0
) -> list[tuple[str, str]]:
    """Write pairs whose target is the source backwards, as JSON lines."""
    random = np.random.default_rng(seed)
    pairs = []
    for _ in range(count):
        source = words(random, int(random.integers(1, longest)))
        pairs.append((source, " ".join(reversed(source.split()))))
    path.write_text(
        "".join(json.dumps(dict(zip("ab", pair, strict=True))) + "\n" for pair in pairs),
        encoding="utf-8",
    )
    return pairs


def model(folder: Path, model_type: str, tokenizer: Any, **config: Any) -> Path:
    """A tiny random encoder-decoder with a tokenizer."""
    size = max(tokenizer.get_vocab().values()) + 1
    sizes = {
        "vocab_size": size,
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    if "decoder_vocab_size" in SIZES[model_type]:
        sizes["decoder_vocab_size"] = size
    make_source(model_type, folder, **sizes | config)
    tokenizer.save_pretrained(folder)
    return folder
