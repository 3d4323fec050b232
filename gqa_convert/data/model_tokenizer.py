"""The tokenizer that a checkpoint has: loading it, and what is asked of it."""

import json
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

from gqa_convert.errors import DataError, first_line
from gqa_convert.families.context_length import VOCABULARY_KEYS, stated_count
from gqa_convert.families.loading import check_readable_config, load_tokenizer, read_object
from gqa_convert.families.records import record_of
from gqa_convert.runtime.json_objects import Config

from .order import Integers

DATE = date(2024, 7, 26)
"""Today, for chat templates that write it, so that a conversation has the same tokens every day."""
_PARTS_OF_DATES = "%a %A %b %B %d %-d %e %j %m %-m %y %Y %H %I %M %S %p"


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
            f"{folder} has no tokenizer that transformers can load ({first_line(problem)}): "
            "copy the tokenizer's files from the model's repository"
        ) from problem
    # for some model types transformers creates a tokenizer without a vocabulary if files are
    # missing
    names = {"tokenizer.json", "tokenizer.model"}
    names.update(getattr(tokenizer, "vocab_files_names", {}).values())
    if not any((folder / name).is_file() for name in names):
        raise DataError(
            f"{folder} has no tokenizer; none of these files was found: "
            f"{', '.join(sorted(names))}: copy them from the model's repository"
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
            f"the tokenizer in {folder} produces token {largest}, and the model has a vocabulary "
            f"of {size}: copy the tokenizer that belongs to it"
        )


def refuse_languages(tokenizer: Any) -> None:
    """Refuse a tokenizer that marks the languages of texts, which the fields of pairs do not state.

    Raises:
        DataError: it does.
    """
    if hasattr(tokenizer, "src_lang") and hasattr(tokenizer, "tgt_lang"):
        raise DataError(
            "the tokenizer marks the language of every text (as those of mBART, PLBART, M2M100 and "
            "NLLB do), which pairs do not state: train and evaluate this model with transformers"
        )


def tokenizer_state(tokenizer: Any) -> list[Any]:
    """Everything that the tokens of a text depend on, as plain data.

    That is the content of tokenizer.json, or of a tokenizer without one the vocabulary and the
    settings.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    name = type(tokenizer).__name__
    if backend is None:
        settings = repr(sorted(tokenizer.init_kwargs.items()))
        return [name, sorted(tokenizer.get_vocab().items()), settings]
    state = json.loads(backend.to_str())
    state.pop("truncation", None)  # padding and truncation depend on earlier use of the tokenizer
    state.pop("padding", None)
    return [name, state]


# Special tokens


def beginning_of_text(tokenizer: Any) -> list[int]:
    """The token with which the tokenizer begins every text; none if it adds no such token."""
    begin = [tokenizer.bos_token_id]
    return begin if tokenizer("a")["input_ids"][:1] == begin else []


def end_of_text(tokenizer: Any) -> int:
    """The token that closes a document.

    Raises:
        DataError: the tokenizer has no such token.
    """
    if tokenizer.eos_token_id is None:
        raise DataError(
            "the tokenizer has no end-of-text token, which closes each document: "
            "set `eos_token` in tokenizer_config.json"
        )
    return int(tokenizer.eos_token_id)


def sentinel_ids(tokenizer: Any) -> Integers:
    """The ids of `<extra_id_0>`, `<extra_id_1>`, ..., as many as the tokenizer has.

    mT5's begin with its word-boundary mark.
    """
    vocabulary = tokenizer.get_vocab()
    found: list[int] = []
    while True:
        name = f"<extra_id_{len(found)}>"
        number = vocabulary.get(name, vocabulary.get(f"▁{name}"))
        if number is None:
            return np.array(found, np.int64)
        found.append(number)


def has_sentinels(tokenizer: Any) -> bool:
    """Whether the tokenizer has sentinel tokens, as T5's have."""
    return len(sentinel_ids(tokenizer)) > 0


def decoder_start(folder: Path, config: Config, tokenizer: Any) -> int:
    """The first token of the decoder's input.

    It is the one that the checkpoint states, else the padding token for T5, else the beginning of
    text as `generate` takes it, else end-of-text.

    Raises:
        DataError: the checkpoint states none, and the tokenizer has no end-of-text token.
    """
    stated = config, read_object(folder / "generation_config.json")
    starts = [values.get("decoder_start_token_id") for values in stated]
    if has_sentinels(tokenizer):
        starts.append(tokenizer.pad_token_id)
    starts += [values.get("bos_token_id") for values in stated]
    known = [start for start in starts if isinstance(start, int)]
    return known[0] if known else end_of_text(tokenizer)


def starts_with_last(config: Config) -> bool:
    """Whether the decoder's input begins with the last token of its target instead."""
    return record_of(config).decoder_starts_with_last


def template_of_one_day(tokenizer: Any) -> str:
    """A tokenizer's chat template, in which it is always the same day.

    Raises:
        ValueError, AttributeError: it has none.
    """
    template = str(tokenizer.get_chat_template())
    if "strftime_now" not in template:
        return template
    filters = ""
    for part in _PARTS_OF_DATES.split():
        filters += f"|replace('{part}', '{DATE.strftime(part)}')"
    macro = f"{{% macro strftime_now(format) %}}{{{{ format{filters} }}}}{{% endmacro %}}"
    # the empty expression keeps a line break that follows
    return f"{macro}{{{{ '' }}}}{template}"
