"""The special tokens that a tokenizer puts around the texts of an encoder-decoder: beginning, end and language."""

from typing import Any, NamedTuple

from gqa_convert.errors import DataError


class Frame(NamedTuple):
    """The special tokens around a text."""

    before: list[int]
    after: list[int]

    @property
    def size(self) -> int:
        """The number of special tokens."""
        return len(self.before) + len(self.after)


Languages = tuple[str | None, str | None]
"""The languages of source and target, in the tokenizer's notation."""


def speak(tokenizer: Any, languages: Languages) -> None:
    """Set the source and target languages of a tokenizer.

    Raises:
        DataError: the tokenizer marks languages and none or an unknown one is given, or it marks none and one is given.
    """
    if not (hasattr(tokenizer, "src_lang") and hasattr(tokenizer, "tgt_lang")):
        if languages != (None, None):
            raise DataError(
                f"the tokenizer does not mark languages, and the data source names {languages[0] or languages[1]!r}: remove source_language and "
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
    return DataError(f"the tokenizer does not know the language {language!r}: use the tokenizer's notation{example}")


def frames_of(tokenizer: Any, languages: Languages) -> tuple[Frame, Frame]:
    """The special tokens around sources and around targets.

    A target ends with end-of-text even if the tokenizer does not add it, because a decoder must learn to stop.

    Args:
        tokenizer: a transformers tokenizer.
        languages: of source and target; None where the tokenizer marks none.

    Raises:
        DataError: see `speak`.
    """
    speak(tokenizer, languages)
    source, target = frame_around(tokenizer, "text"), frame_around(tokenizer, "text_target")
    eos = tokenizer.eos_token_id
    if eos is not None and eos not in target.after:
        target = target._replace(after=[*target.after, int(eos)])
    return source, target


def frame_around(tokenizer: Any, argument: str) -> Frame:
    """The special tokens that a tokenizer puts around a text, for the languages set last.

    Args:
        tokenizer: a transformers tokenizer.
        argument: `text` for sources, `text_target` for targets.

    Raises:
        DataError: the tokens of the text itself change when special tokens are added.
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
