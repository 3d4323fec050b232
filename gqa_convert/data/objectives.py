"""The training objectives: what a model learns to predict, and from which data.

An objective is one entry of `OBJECTIVES` and one class in a file of its own, which encodes
documents and makes batches. docs/developing.md says what belongs to a new one.
"""

from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from gqa_convert.data.sources import SourceKind

if TYPE_CHECKING:  # recipes are read without numpy
    from gqa_convert.data.sampler import Sampler

ModelKind = Literal["a decoder-only model", "an encoder-decoder"]


class SampleSettings(NamedTuple):
    """What determines the samples of a model, beside the data and the seed.

    Attributes:
        tokenizer: a transformers tokenizer.
        objective: one of `OBJECTIVES`.
        length: `sequence_length`, in tokens.
        decoder_start: the first token of the decoder's input; None for a model without an encoder.
        starts_with_last: whether the decoder's input starts with the target's last token instead.
    """

    tokenizer: Any
    objective: str
    length: int
    decoder_start: int | None = None
    starts_with_last: bool = False

    def __str__(self) -> str:
        """What tells the samples from others, without the tokenizer, which the tokens depend on."""
        return f"{self.objective} {self.length} {self.decoder_start} {self.starts_with_last}"


class Objective(NamedTuple):
    """One training objective.

    Attributes:
        models: the kind of models that it trains.
        reads: the kinds of sources that it reads.
        sampler: the class that derives from `Sampler`, as `module:name`.
    """

    models: ModelKind
    reads: tuple[SourceKind, ...]
    sampler: str


OBJECTIVES: dict[str, Objective] = {
    "causal": Objective(
        models="a decoder-only model",
        reads=("text", "chat"),
        sampler="gqa_convert.data.sampler:CausalSampler",
    ),
    "span_corruption": Objective(
        models="an encoder-decoder",
        reads=("text",),
        sampler="gqa_convert.data.span_corruption:SpanSampler",
    ),
    "pairs": Objective(
        models="an encoder-decoder", reads=("pairs",), sampler="gqa_convert.data.pairs:PairSampler"
    ),
}
"""The objectives by name. `auto` takes the first one that suits a model and the data."""


def make_sampler(settings: SampleSettings) -> "Sampler":
    """The sampler of an objective.

    Raises:
        DataError: the tokenizer lacks a token that it needs, or the length does not allow a sample.
    """
    sampler: Sampler = resolve_name(OBJECTIVES[settings.objective].sampler)(settings)
    return sampler
