"""The training objectives. Each is one record, which states the models it suits and how its samples are made.

docs/adding-an-objective.md names every other file that a new objective touches.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from gqa_convert.errors import DataError

if TYPE_CHECKING:
    from gqa_convert.text.collating import DecoderInput
    from gqa_convert.text.packing import Sampler

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

    @property
    def decoder_input(self) -> "DecoderInput":
        """How the decoder's input is derived from a target."""
        from gqa_convert.text.collating import DecoderInput

        start, pad = self.first_token, self.tokenizer.pad_token_id
        return DecoderInput(start, start if pad is None else int(pad), self.starts_with_last)


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """One training objective.

    Attributes:
        encoder_decoder: whether it trains encoder-decoders; otherwise it trains decoders.
        sampler: makes the sampler from settings; None where the samples are pairs, whose
            sampler needs the tokenised pairs.
        target_length: the longest decoder side of a sample in tokens, from `sequence_length`; 0 without an encoder.
        needs: what the tokenizer must have, as text for messages; empty if nothing.
        suits: whether a tokenizer has what is needed.
        closes_documents: whether each document is tokenised with end-of-text at its end.
        masks_documents: whether `document_mask` is supported.
    """

    encoder_decoder: bool
    sampler: Callable[[SampleSettings], "Sampler"] | None
    target_length: Callable[[int], int]
    needs: str = ""
    suits: Callable[[Any], bool] = lambda tokenizer: True
    closes_documents: bool = False
    masks_documents: bool = False


def _causal(settings: SampleSettings) -> "Sampler":
    from gqa_convert.text.packing import CausalSampler
    from gqa_convert.text.tokenizing import end_of_text

    return CausalSampler(settings.length, end_of_text(settings.tokenizer), document_mask=settings.document_mask)


def _span_corruption(settings: SampleSettings) -> "Sampler":
    from gqa_convert.text.span_corruption import SpanSampler

    return SpanSampler(settings.length, settings.tokenizer, decoder_start=settings.first_token)


def _has_sentinels(tokenizer: Any) -> bool:
    from gqa_convert.text.span_corruption import has_sentinels

    return has_sentinels(tokenizer)


def _span_target(length: int) -> int:
    from gqa_convert.text.span_corruption import shape_for

    return shape_for(length).target_length


_SENTINELS = "sentinel tokens <extra_id_0>, <extra_id_1>, ..."
OBJECTIVES: dict[str, Objective] = {
    "causal": Objective(
        encoder_decoder=False,
        sampler=_causal,
        target_length=lambda length: 0,
        closes_documents=True,
        masks_documents=True,
    ),
    "span_corruption": Objective(
        encoder_decoder=True,
        sampler=_span_corruption,
        target_length=_span_target,
        needs=_SENTINELS,
        suits=_has_sentinels,
    ),
    "pairs": Objective(encoder_decoder=True, sampler=None, target_length=lambda length: length),
}
"""The objectives by name. `auto` takes the first one that suits a model and its tokenizer."""
