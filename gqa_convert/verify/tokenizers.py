"""The checkpoint's tokenizer: a new model type must not make another one of it."""

from pathlib import Path
from typing import Any

from gqa_convert.loading import load_tokenizer
from gqa_convert.verify.reading import first_line
from gqa_convert.verify.report import Failure

_SAMPLE = "Grouped-query attention:\tw1 w2, 12 heads\n  in 3 groups. Größe, 数, <s></s>"


def tokenize(folder: Path, text: str, limit: int | None) -> list[int]:
    """The text's token ids by the checkpoint's own tokenizer, at most `limit` of them."""
    ids: list[int] = load_tokenizer(folder)(text, verbose=False)["input_ids"][:limit]
    if len(ids) < 2:
        raise Failure(f"the text has {len(ids)} token(s), too few for a loss")
    return ids


def check_tokenizer(out: Path, source: Path) -> str:
    """transformers finds the same tokenizer for OUT as for SOURCE, without running code."""
    try:
        theirs = load_tokenizer(source)
    except Exception as problem:
        return f"SOURCE has none that transformers loads ({first_line(problem)})"
    ours = load_tokenizer(out)
    for what, read in (("class", _class), ("size", len), ("special tokens", _special), ("token ids of a sample", _ids)):
        if read(ours) != read(theirs):
            raise Failure(f"{what} {read(ours)!r} where SOURCE's has {read(theirs)!r}")
    return f"{_class(ours)} of {len(ours):,} tokens, as in SOURCE"


def _class(tokenizer: Any) -> str:
    return type(tokenizer).__name__


def _special(tokenizer: Any) -> Any:
    return tokenizer.special_tokens_map


def _ids(tokenizer: Any) -> Any:
    return tokenizer(_SAMPLE, verbose=False)["input_ids"]
