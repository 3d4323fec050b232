"""The checkpoint's tokenizer: a new model type must not make another one of it."""

from pathlib import Path
from typing import Any

from gqa_convert.loading import load_tokenizer
from gqa_convert.verify.reading import first_line
from gqa_convert.verify.report import Failure

_SAMPLE = "Grouped-query attention:\tw1 w2, 12 heads\n  in 3 groups. Größe, 数, <s></s>"


_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.*", "merges.txt", "*.model", "*.spm", "*.tiktoken")


def tokenize(folder: Path, text: str, limit: int | None) -> list[int]:
    """The text's token ids by the checkpoint's own tokenizer, at most `limit` of them."""
    ids: list[int] = load_tokenizer(folder)(text, verbose=False)["input_ids"][:limit]
    if len(ids) < 2:
        raise Failure(f"the text has {len(ids)} token(s), too few for a loss")
    return ids


def check_tokenizer(out: Path, source: Path) -> str:
    """transformers finds the same tokenizer for OUT as for SOURCE, without running code."""
    if not any(path for pattern in _FILES for path in source.glob(pattern)):
        return "SOURCE has none"
    try:
        theirs = _describe(load_tokenizer(source))
    except Exception as problem:
        return f"SOURCE has none that transformers can use ({first_line(problem)})"
    ours = _describe(load_tokenizer(out))
    for what, value in theirs.items():
        if ours[what] != value:
            raise Failure(f"{what} {ours[what]!r} where SOURCE's has {value!r}")
    return f"{ours['class']} of {ours['size']:,} tokens, as in SOURCE"


def _describe(tokenizer: Any) -> dict[str, Any]:
    return {
        "class": type(tokenizer).__name__,
        "size": len(tokenizer),
        "special tokens": tokenizer.special_tokens_map,
        "token ids of a sample": tokenizer(_SAMPLE, verbose=False)["input_ids"],
    }
