"""The checkpoint's tokenizer: a new model type must not make another one of it."""

from pathlib import Path
from typing import Any

from gqa_convert.families.loading import load_tokenizer
from gqa_convert.verify.checkpoint_reader import first_line
from gqa_convert.verify.report import Failure

_SAMPLE = "Grouped-query attention:\tw1 w2, 12 heads\n  in 3 groups. Größe, 数, <s></s>"


_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.*", "merges.txt", "*.model", "*.spm", "*.tiktoken")


def tokenize(folder: Path, text: str, limit: int | None) -> list[int]:
    """The text's token ids by the checkpoint's own tokenizer, at most `limit` of them."""
    ids: list[int] = load_tokenizer(folder)(text, verbose=False)["input_ids"][:limit]
    if len(ids) < 2:
        raise Failure(f"the text has {len(ids)} token(s), too few for a loss")
    return ids


def check_tokenizer(out: Path, source: Path, *, other_class: bool = False) -> str:
    """transformers finds the same tokenizer for OUT as for SOURCE, without running code.

    Args:
        out: the converted folder.
        source: the source's folder.
        other_class: OUT's model type may have another class, which must do the same.
    """
    if not any(path for pattern in _FILES for path in source.glob(pattern)):
        return "SOURCE has none"
    try:
        theirs = _describe(load_tokenizer(source))
    except Exception as problem:
        return f"SOURCE has none that transformers can use ({first_line(problem)})"
    ours = _describe(load_tokenizer(out))
    for what, value in theirs.items():
        if ours[what] != value and not (other_class and what == "class"):
            raise Failure(f"{what} {_short(ours[what])} where SOURCE's has {_short(value)}")
    if ours["class"] != theirs["class"]:
        return f"{ours['class']} of {ours['size']:,} tokens in the place of {theirs['class']}, with the same ids and texts for samples"
    return f"{ours['class']} of {ours['size']:,} tokens, as in SOURCE"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 200 else f"{text[:200]}..."


def _describe(tokenizer: Any) -> dict[str, Any]:
    ids = tokenizer(_SAMPLE, verbose=False)["input_ids"]
    every = list(range(min(len(tokenizer), 1000)))
    return {
        "class": type(tokenizer).__name__,
        "size": len(tokenizer),
        "special tokens": tokenizer.special_tokens_map,
        "token ids of a sample": ids,
        "text of a sample": tokenizer.decode(ids),
        "text of its first tokens": tokenizer.decode(every),
    }
