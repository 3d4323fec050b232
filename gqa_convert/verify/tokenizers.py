"""The check on the tokenizer that transformers finds for OUT, which a new model type must not change."""

from typing import Any

from gqa_convert.errors import first_line
from gqa_convert.families.loading import load_tokenizer
from gqa_convert.verify.inputs import Inputs
from gqa_convert.verify.report import Failure
from gqa_convert.verify.weights import JsonObject

_SAMPLE = "Grouped-query attention:\tw1 w2, 12 heads\n  in 3 groups. Größe, 数, <s></s>"
_FIRST = 1000
"""Token ids that are decoded."""
_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "*.spm",
    "*.tiktoken",
)


def check_tokenizer(inputs: Inputs) -> str:
    """transformers finds the same tokenizer for OUT as for SOURCE, without running code."""
    source = inputs.original.folder
    if not any(path for pattern in _FILES for path in source.glob(pattern)):
        return "SOURCE has none"
    try:
        theirs = _behaviour(load_tokenizer(source))
    except Exception as problem:
        return f"SOURCE has none that transformers can use ({first_line(problem)})"
    ours = _behaviour(load_tokenizer(inputs.out))
    for what, expected in theirs.items():
        # transformers 5 has no tokenizer class for gpt_bigcode, so that its class may be another
        may_differ = what == "class name" and inputs.family.model_type == "gpt_bigcode"
        if ours[what] != expected and not may_differ:
            raise Failure(
                f"{what} {repr(ours[what])[:200]}, expected {repr(expected)[:200]} as in SOURCE"
            )
    return f"{ours['class name']} of {ours['size']:,} tokens, which do what those of SOURCE's {theirs['class name']} do"


def _behaviour(tokenizer: Any) -> JsonObject:
    """What a tokenizer makes of samples."""
    ids = tokenizer(_SAMPLE, verbose=False)["input_ids"]
    return {
        "class name": type(tokenizer).__name__,
        "size": len(tokenizer),
        "special tokens": tokenizer.special_tokens_map,
        "token ids of a sample": ids,
        "text of a sample": tokenizer.decode(ids),
        "text of its first tokens": tokenizer.decode(list(range(min(len(tokenizer), _FIRST)))),
    }
