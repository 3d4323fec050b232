"""The training objectives. Each is one record, which states the models it suits and how its samples are made.

docs/developing.md says what belongs to a new one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from gqa_convert.errors import DataError

if TYPE_CHECKING:  # recipes are read without numpy
    from gqa_convert.data.packing import Sampler

ObjectiveName = Literal["causal", "span_corruption", "pairs"]
CAUSAL: Final = "causal"
SPAN_CORRUPTION: Final = "span_corruption"
PAIRS: Final = "pairs"


@dataclass(frozen=True, slots=True)
class SampleSettings:
    """The settings of a sampler.

    Attributes:
        tokenizer: a transformers tokenizer.
        length: `sequence_length`, in tokens.
        document_mask: whether tokens attend only to their own document.
        decoder_start: the first token of the decoder's input; None for the padding token.
        starts_with_last: whether the decoder's input starts with the target's last token instead.
    """

    tokenizer: Any
    length: int
    document_mask: bool = False
    decoder_start: int | None = None
    starts_with_last: bool = False

    @property
    def first_token(self) -> int:
        """The first token of the decoder's input.

        Raises:
            DataError: there is no such token.
        """
        start = self.tokenizer.pad_token_id if self.decoder_start is None else self.decoder_start
        if start is None:
            raise DataError(
                "the tokenizer has no padding token for the decoder's input to begin with: set decoder_start_token_id in config.json"
            )
        return int(start)


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """One training objective.

    Attributes:
        encoder_decoder: whether it trains encoder-decoders; otherwise it trains decoders, on running text and
            conversations, each with end-of-text at its end.
        sampler: makes the sampler from settings.
        target_length: the longest decoder side of a sample in tokens, from `sequence_length`; 0 without an encoder.
        reads_pairs: whether it reads pairs of texts.
        needs: what the tokenizer must have, as text for messages; empty if nothing.
        suits: whether a tokenizer has what is needed.
        masks_documents: whether `document_mask` is supported.
    """

    encoder_decoder: bool
    sampler: "Callable[[SampleSettings], Sampler]"
    target_length: Callable[[int], int] = lambda length: 0
    reads_pairs: bool = False
    needs: str = ""
    suits: Callable[[Any], bool] = lambda tokenizer: True
    masks_documents: bool = False


def _causal(settings: SampleSettings) -> "Sampler":
    from gqa_convert.data.packing import CausalSampler

    return CausalSampler(settings.length, document_mask=settings.document_mask)


def _span_corruption(settings: SampleSettings) -> "Sampler":
    from gqa_convert.data.span_corruption import SpanSampler

    return SpanSampler(settings.length, settings.tokenizer, decoder_start=settings.first_token)


def _has_sentinels(tokenizer: Any) -> bool:
    from gqa_convert.data.span_corruption import has_sentinels

    return has_sentinels(tokenizer)


def _span_target(length: int) -> int:
    from gqa_convert.data.span_corruption import shape_for

    return shape_for(length).target_length


def _pairs(settings: SampleSettings) -> "Sampler":
    from gqa_convert.data.pairs import DecoderInput, PairSampler

    start, pad = settings.first_token, settings.tokenizer.pad_token_id
    decoder = DecoderInput(start, start if pad is None else int(pad), settings.starts_with_last)
    return PairSampler(settings.length, settings.tokenizer, decoder)


OBJECTIVES: dict[str, Objective] = {
    "causal": Objective(encoder_decoder=False, sampler=_causal, masks_documents=True),
    "span_corruption": Objective(
        encoder_decoder=True,
        sampler=_span_corruption,
        target_length=_span_target,
        needs="sentinel tokens <extra_id_0>, <extra_id_1>, ...",
        suits=_has_sentinels,
    ),
    "pairs": Objective(encoder_decoder=True, sampler=_pairs, target_length=lambda length: length, reads_pairs=True),
}
"""The objectives by name. `auto` takes the first one that suits a model and its tokenizer."""


def make_sampler(objective: str, settings: SampleSettings) -> "Sampler":
    """The sampler of an objective.

    Raises:
        DataError: there is no such objective, the tokenizer lacks a token that it needs, or the length does not allow a
            sample.
    """
    record = OBJECTIVES.get(objective)
    if record is None:
        raise DataError(f"there is no objective {objective!r}: choose one of {', '.join(OBJECTIVES)}")
    if settings.length < 1:
        raise DataError(f"sequence_length is {settings.length}, expected a number above 0")
    if settings.document_mask and not record.masks_documents:
        raise DataError(
            f"document_mask needs the objective causal, and the objective is {objective}: remove document_mask"
        )
    return record.sampler(settings)
