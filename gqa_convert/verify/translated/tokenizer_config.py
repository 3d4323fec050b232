"""The check on tokenizer_config.json of a translated OUT, whose tokenizer class may have other defaults than SOURCE's."""

from pathlib import Path
from typing import Any

from gqa_convert.verify.checkpoint_reader import read_object
from gqa_convert.verify.json_values import check_same_object
from gqa_convert.verify.report import Failure, Finding
from gqa_convert.verify.translated.target_architectures import TargetArchitecture

TOKENIZER_CONFIG = "tokenizer_config.json"


def check_tokenizer_config(out: Path, source: Path, original: dict[str, Any], target: TargetArchitecture) -> Finding:
    """OUT states the special tokens that SOURCE's tokenizer class has by default, and is SOURCE's otherwise.

    Args:
        out: OUT's folder.
        source: SOURCE's folder.
        original: SOURCE's config.
        target: the translation.
    """
    stated = (source / TOKENIZER_CONFIG).is_file()
    exists = (out / TOKENIZER_CONFIG).is_file()
    if not stated and not (source / "tokenizer.json").is_file():
        if exists:
            raise Failure(f"{TOKENIZER_CONFIG} is not in SOURCE")
        return Finding("SOURCE has none")
    expected = read_object(source / TOKENIZER_CONFIG) if stated else {}
    # another class has these tokens only where they are stated
    named = expected.get("tokenizer_class") or original.get("tokenizer_class") or target.tokenizer
    usual = str(named).startswith(target.tokenizer)
    added = {key: "<|endoftext|>" for key in target.special_tokens if usual and key not in expected}
    if not exists:
        if stated or added:
            raise Failure(f"{TOKENIZER_CONFIG} is missing")
        return Finding("SOURCE has none")
    expected |= added
    if expected.get("tokenizer_class") == "TokenizersBackend":  # only transformers 5 has this class
        expected["tokenizer_class"] = "PreTrainedTokenizerFast"
    check_same_object(TOKENIZER_CONFIG, read_object(out / TOKENIZER_CONFIG), expected)
    return Finding(f"SOURCE's, and {len(added)} special token(s) that its class has by default", {"added": len(added)})
