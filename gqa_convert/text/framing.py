"""What a tokenizer puts around the texts of an encoder-decoder: marks of their beginning, their end and their
language.
"""

from typing import Any, NamedTuple

from gqa_convert.errors import DataError


class Frame(NamedTuple):
    """The special tokens around a text."""

    before: list[int]
    after: list[int]

    @property
    def size(self) -> int:
        """How many there are."""
        return len(self.before) + len(self.after)


Languages = tuple[str | None, str | None]
"""Of the source and of the target, as the tokenizer writes them."""


def speak(tokenizer: Any, languages: Languages) -> None:
    """Tell a tokenizer the languages of the texts that come next.

    Raises:
        DataError: it marks languages and none are named, or one that it does not know; or it marks none.
    """
    if not (hasattr(tokenizer, "src_lang") and hasattr(tokenizer, "tgt_lang")):
        if languages != (None, None):
            raise DataError(
                f"the tokenizer marks no languages, and the data source names {languages[0] or languages[1]!r}: remove source_language and "
                "target_language"
            )
        return
    if None in languages:
        raise DataError(
            "the tokenizer marks the language of every text, and the data source does not name it: add source_language (and, for pairs, "
            f"target_language), such as {tokenizer.src_lang!r}"
        )
    try:
        tokenizer.src_lang, tokenizer.tgt_lang = languages
        frames = frame_around(tokenizer, "text"), frame_around(tokenizer, "text_target")
    except KeyError as unknown:
        raise _unknown(tokenizer, unknown.args[0]) from None
    for language, frame in zip(languages, frames, strict=True):
        if tokenizer.unk_token_id in (*frame.before, *frame.after):
            raise _unknown(tokenizer, language)


def _unknown(tokenizer: Any, language: object) -> DataError:
    known = list(getattr(tokenizer, "lang_code_to_id", None) or ())[:5]
    example = f", such as {', '.join(known)}" if known else ""
    return DataError(f"the tokenizer does not know the language {language!r}: write it as the tokenizer does{example}")


def frames_of(tokenizer: Any, languages: Languages) -> tuple[Frame, Frame]:
    """What stands around sources and targets.

    A target ends with end-of-text even where the tokenizer would not write it, as a decoder must learn to stop.

    Args:
        tokenizer: a transformers tokenizer.
        languages: of source and target; None where the tokenizer marks none.

    Raises:
        DataError: as `speak`.
    """
    speak(tokenizer, languages)
    source, target = frame_around(tokenizer, "text"), frame_around(tokenizer, "text_target")
    eos = tokenizer.eos_token_id
    if eos is not None and eos not in target.after:
        target = target._replace(after=[*target.after, int(eos)])
    return source, target


def frame_around(tokenizer: Any, argument: str) -> Frame:
    """What a tokenizer puts around a text, in the languages that it was told last.

    Args:
        tokenizer: a transformers tokenizer.
        argument: `text` for what is read, `text_target` for what is to be written.

    Raises:
        DataError: the text's own tokens change with it.
    """
    whole, bare = (
        list(
            tokenizer(**{argument: "a"}, add_special_tokens=special, return_attention_mask=False, verbose=False)[
                "input_ids"
            ]
        )
        for special in (True, False)
    )
    for start in range(len(whole) - len(bare) + 1):
        if bare and whole[start : start + len(bare)] == bare:
            return Frame(whole[:start], whole[start + len(bare) :])
    raise DataError(
        "the tokenizer changes a text's tokens when it adds special tokens: use the tokenizer that belongs to the model"
    )
