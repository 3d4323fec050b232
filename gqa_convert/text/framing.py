"""The special tokens that a tokenizer puts around the texts of an encoder-decoder."""

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


def refuse_languages(tokenizer: Any) -> None:
    """Refuse a tokenizer that marks the languages of texts, which the fields of pairs do not state.

    Raises:
        DataError: it does.
    """
    if hasattr(tokenizer, "src_lang") and hasattr(tokenizer, "tgt_lang"):
        raise DataError(
            "the tokenizer marks the language of every text (as those of mBART, PLBART, M2M100 and NLLB do), which pairs do not state: "
            "train and evaluate this model with transformers"
        )


def frames_of(tokenizer: Any) -> tuple[Frame, Frame]:
    """The special tokens around sources and around targets.

    A target ends with end-of-text even if the tokenizer does not add it, because a decoder must learn to stop.

    Raises:
        DataError: the tokenizer marks the languages of texts.
    """
    refuse_languages(tokenizer)
    source, target = frame_around(tokenizer, "text"), frame_around(tokenizer, "text_target")
    eos = tokenizer.eos_token_id
    if eos is not None and eos not in target.after:
        target = target._replace(after=[*target.after, int(eos)])
    return source, target


def frame_around(tokenizer: Any, argument: str) -> Frame:
    """The special tokens that a tokenizer puts around a text.

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
