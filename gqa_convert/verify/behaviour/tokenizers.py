"""The check on the tokenizer that transformers finds for OUT, which a new model type must not change."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gqa_convert.families.loading import load_tokenizer
from gqa_convert.verify.checkpoint_reader import first_line
from gqa_convert.verify.report import Failure, Finding

_SAMPLE = "Grouped-query attention:\tw1 w2, 12 heads\n  in 3 groups. Größe, 数, <s></s>"
_FIRST = 1000
"""Token ids that are decoded."""
_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.*", "merges.txt", "*.model", "*.spm", "*.tiktoken")


def tokenize(folder: Path, text: str, limit: int | None) -> list[int]:
    """The token ids of a text by the checkpoint's tokenizer, at most `limit` of them.

    Raises:
        Failure: the text is too short.
    """
    ids: list[int] = load_tokenizer(folder)(text, verbose=False)["input_ids"][:limit]
    if len(ids) < 2:
        raise Failure(f"the text has {len(ids)} token(s), a loss needs at least 2")
    return ids


def check_tokenizer(out: Path, source: Path, *, other_class: bool = False) -> Finding:
    """transformers finds the same tokenizer for OUT as for SOURCE, without running code.

    Args:
        out: OUT's folder.
        source: SOURCE's folder.
        other_class: whether OUT's model type may have another tokenizer class, which must do the same.
    """
    if not any(path for pattern in _FILES for path in source.glob(pattern)):
        return Finding("SOURCE has none")
    try:
        theirs = _Behaviour.of(load_tokenizer(source))
    except Exception as problem:
        return Finding(f"SOURCE has none that transformers can use ({first_line(problem)})")
    ours = _Behaviour.of(load_tokenizer(out))
    for field, expected in asdict(theirs).items():
        found = getattr(ours, field)
        if found != expected and not (other_class and field == "class_name"):
            raise Failure(f"{field.replace('_', ' ')} {_short(found)}, expected {_short(expected)} as in SOURCE")
    size = {"tokens": ours.size}
    if ours.class_name != theirs.class_name:
        return Finding(
            f"{ours.class_name} of {ours.size:,} tokens in place of {theirs.class_name}, with the same ids and texts for "
            "samples",
            size,
        )
    return Finding(f"{ours.class_name} of {ours.size:,} tokens, as in SOURCE", size)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 200 else f"{text[:200]}..."


@dataclass(frozen=True, slots=True)
class _Behaviour:
    """What a tokenizer makes of samples."""

    class_name: str
    size: int
    special_tokens: dict[str, Any]
    token_ids_of_a_sample: list[int]
    text_of_a_sample: str
    text_of_its_first_tokens: str

    @classmethod
    def of(cls, tokenizer: Any) -> "_Behaviour":
        ids = tokenizer(_SAMPLE, verbose=False)["input_ids"]
        return cls(
            type(tokenizer).__name__,
            len(tokenizer),
            tokenizer.special_tokens_map,
            ids,
            tokenizer.decode(ids),
            tokenizer.decode(list(range(min(len(tokenizer), _FIRST)))),
        )
