"""Tokenizers, and token sources without files."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import gqa_convert
from gqa_convert.text.token_files import circular

DEMO = Path(gqa_convert.__file__).parent / "demo_checkpoint"
WORDS = 500
PAD, EOS = 0, 1


def demo_tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(DEMO)


def span_tokenizer(sentinels: int = 100, eos: str | None = "</s>") -> Any:
    """Words w0, w1, ... and sentinels as T5 has them, the first one last; the word w0 is the token 3."""
    names = ["<pad>", "</s>", "<unk>", *(f"w{number}" for number in range(WORDS)), "[NLU]", "[NLG]", "[S2S]"]
    names += [f"<extra_id_{number}>" for number in reversed(range(sentinels))]
    tokenizer = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos, pad_token="<pad>", unk_token="<unk>")


class ArrayTokens:
    """Tokens in memory; with `growing`, they come as they are asked for, and their end is seen only when it is
    reached.
    """

    fingerprint = "array"
    grows = False

    def __init__(self, tokens: npt.ArrayLike, *, growing: bool = False) -> None:
        self.tokens = np.asarray(tokens)
        self.seen = 0 if growing else len(self.tokens)

    def size(self, needed: int | None = None) -> tuple[int, bool]:
        self.seen = min(len(self.tokens), max(self.seen, needed or 0))
        return self.seen, self.seen == len(self.tokens)

    def read(self, start: int, count: int) -> npt.NDArray[Any]:
        assert start + count <= self.seen or self.seen == len(self.tokens)
        return circular(self.tokens, start, count)

    def close(self) -> None:
        pass
