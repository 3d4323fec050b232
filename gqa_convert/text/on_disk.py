"""What is on disk of the text of a run, without tokenising or downloading any."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from gqa_convert.errors import DataError
from gqa_convert.text.objectives import CAUSAL, OBJECTIVES, SampleSettings
from gqa_convert.text.opening import Opener, PairOpener, TextOpener
from gqa_convert.text.pair_files import PairFile
from gqa_convert.text.pair_sampling import PairSampler
from gqa_convert.text.sources import Source, is_on_hub, open_source
from gqa_convert.text.text_files import FileText
from gqa_convert.text.token_files import TokenSource, default_cache


@dataclass(frozen=True, slots=True)
class TextOnDisk:
    """What is on disk of one source.

    Attributes:
        source: as the recipe names it.
        weight: its share of the samples, relative to the other sources.
        bytes: those of its files; None for a Hub dataset.
        tokens: those that are tokenised already; None where the source is not tokenised or generated yet.
        complete: whether these are all of the source.
    """

    source: str
    weight: float
    bytes: int | None
    tokens: int | None
    complete: bool


def text_on_disk(
    sources: Sequence[Source], objective: str, settings: SampleSettings
) -> tuple[list[TextOnDisk], int | Fraction]:
    """What is on disk of each source, and the tokens that a sample consumes.

    Args:
        sources: the training text.
        objective: one of OBJECTIVES.
        settings: of the samples.

    Raises:
        DataError: a local source does not exist, or pairs, whose lengths are unknown before, are not tokenised yet.
    """
    record = OBJECTIVES[objective]
    opener: Opener
    if record.sampler is None:
        opener = PairOpener(settings.tokenizer, default_cache(), _silent)
    else:
        closed = record.closes_documents
        opener = TextOpener(
            settings.tokenizer,
            default_cache(),
            _silent,
            closed=closed,
            shortest=0,
            chats=objective == CAUSAL,
        )
    found = [_found(source, opener, settings.length) for source in sources]
    if record.sampler is not None:
        return [text for text, _ in found], record.sampler(settings).raw_tokens
    pairs = [(tokens, text.weight) for text, tokens in found if isinstance(tokens, PairFile)]
    if len(pairs) < len(sources):
        missing = next(text.source for text, tokens in found if tokens is None)
        raise DataError(
            f"{missing} is not tokenised, and the length of its pairs is unknown: run gqa-convert uptrain --tokenize-only with this recipe first"
        )
    return [text for text, _ in found], PairSampler(settings.length, pairs, settings.decoder_input).raw_tokens


def _found(source: Source, opener: Opener, length: int) -> tuple[TextOnDisk, TokenSource | None]:
    size: int | None = None
    if source.is_self:  # generated when the run begins
        return TextOnDisk(source.source, source.weight, None, None, False), None
    if not is_on_hub(source):
        text = open_source(source, default_cache(), ask=False, chats=True)
        assert isinstance(text, FileText)
        size = text.total_bytes
    try:
        tokens = opener.find(source)
    except DataError:  # not tokenised yet
        return TextOnDisk(source.source, source.weight, size, None, False), None
    count, complete = tokens.size()
    if isinstance(tokens, PairFile):
        count = int(tokens.lengths(length).sum())
    return TextOnDisk(source.source, source.weight, size, count, complete), tokens


def _silent(label: str, done: int, total: int) -> None:
    """Nothing is tokenised, so that there is no progress to report."""
    del label, done, total
