"""The tokenizer that a checkpoint has, and whether it belongs to the model."""

from pathlib import Path
from typing import Any

from gqa_convert.errors import DataError, first_line
from gqa_convert.families.config_sizes import VOCABULARY_KEYS
from gqa_convert.families.context_length import stated_count
from gqa_convert.families.loading import check_readable_config, load_tokenizer
from gqa_convert.runtime.json_objects import Config


def usable_tokenizer(folder: Path) -> Any:
    """The checkpoint's tokenizer.

    Raises:
        DataError: there is none, or transformers can't load it.
        CorruptCheckpointError: transformers refuses the config, which it reads first.
    """
    try:
        tokenizer = load_tokenizer(folder)
    except Exception as problem:
        check_readable_config(folder)
        raise DataError(
            f"{folder} has no tokenizer that transformers can load ({first_line(problem)}): copy the tokenizer's files "
            "from the model's repository"
        ) from problem
    # for some model types transformers creates a tokenizer without a vocabulary if the files are missing
    names = {
        "tokenizer.json",
        "tokenizer.model",
        *getattr(tokenizer, "vocab_files_names", {}).values(),
    }
    if not any((folder / name).is_file() for name in names):
        raise DataError(
            f"{folder} has no tokenizer; none of these files was found: {', '.join(sorted(names))}: copy them from the model's repository"
        )
    return tokenizer


def check_vocabulary(config: Config, largest: int, folder: Path) -> None:
    """Refuse text with tokens that the model has no embedding for.

    Args:
        config: of the model.
        largest: the largest token of the text.
        folder: of the tokenizer.

    Raises:
        DataError: the text has such a token.
    """
    size = stated_count(config, VOCABULARY_KEYS)
    if size is not None and largest >= size:
        raise DataError(
            f"the tokenizer in {folder} produces token {largest}, and the model has a vocabulary of {size}: "
            "copy the tokenizer that belongs to it"
        )
