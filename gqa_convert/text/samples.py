"""What a training loop sees of its data: samples by number, the same whatever the number of processes."""

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gqa_convert.errors import DataError
from gqa_convert.text.collating import DecoderInput
from gqa_convert.text.infilling import InfillingSampler, mask_token
from gqa_convert.text.opening import Opener, PairOpener, TextOpener, infilling_frames
from gqa_convert.text.order import Integers, Mixture, mix
from gqa_convert.text.packing import CausalSampler, Sampler
from gqa_convert.text.pair_files import PairFile
from gqa_convert.text.pair_sampling import PairSampler
from gqa_convert.text.sources import Source, as_source
from gqa_convert.text.spans import T5, UL2, SpanSampler
from gqa_convert.text.token_files import Progress, TokenSource, default_cache
from gqa_convert.text.tokenizing import end_of_text

CAUSAL, SPAN_CORRUPTION, UL2_MIXTURE, TEXT_INFILLING, PAIRS = OBJECTIVES = (
    "causal",
    "span_corruption",
    "ul2",
    "text_infilling",
    "pairs",
)


class Samples:
    """Training samples by number, from 0 on and without end: epoch follows epoch, each in an order of its own.

    A sample is a function of its number, the seed, the tokenizer and the data alone.

    Attributes:
        tokens_per_sample: tokens of text that a sample uses up (in the mean, where samples differ).
        fingerprint: a hash of the tokens, the objective and the seed; with the same one, samples are the same.
        longest: tokens of the longest encoder input and target, where the data decide that; otherwise None.
        notes: what a user should know about the data.
    """

    def __init__(
        self, sources: Sequence[tuple[TokenSource, float]], sampler: Sampler, seed: int, settings: str
    ) -> None:
        self._tokens = [tokens for tokens, _ in sources]
        self._mixture = Mixture([weight for _, weight in sources])
        self._sampler, self._seed = sampler, seed
        self._keys = [mix(seed, number) for number in range(len(sources))]
        self._grows = [tokens.grows for tokens in self._tokens]
        self.tokens_per_sample = sampler.raw_tokens
        self.longest, self.notes = sampler.longest, list(sampler.notes)
        parts = [
            settings,
            str(seed),
            *(f"{tokens.fingerprint} {part}" for tokens, part in zip(self._tokens, self._mixture.parts, strict=True)),
        ]
        self.fingerprint = hashlib.sha256("\n".join(parts).encode()).hexdigest()

    @property
    def epoch_samples(self) -> int | None:
        """Samples until every source has been read once; None while a stream has not ended."""
        sizes = [tokens.size() for tokens in self._tokens]
        if not all(complete for _, complete in sizes):
            return None
        counts = [self._sampler.count(size) for size, _ in sizes]
        return max(self._mixture.samples_for(source, count) for source, count in enumerate(counts))

    def batch(self, indices: Sequence[int]) -> dict[str, Integers]:
        """The samples of these numbers, as `causal_batch`, `SpanSampler.batch` and `collated` say."""
        places = []
        for index in indices:
            source, number = self._mixture.locate(index)
            place = self._sampler.cut(self._tokens[source], number, self._keys[source], grows=self._grows[source])
            places.append((self._tokens[source], place))
        return self._sampler.batch(places, [(mix(self._seed), index) for index in indices])

    def close(self) -> None:
        """Stop reading ahead."""
        for tokens in self._tokens:
            tokens.close()


class EvaluationBlocks:
    """A fixed list of samples in the order of the text, each token of which is scored once.

    Attributes:
        fingerprint: a hash of the tokens and settings.
    """

    def __init__(
        self, sources: Sequence[tuple[TokenSource, float]], sampler: Sampler, tokens: int, settings: str
    ) -> None:
        total = sum(weight for _, weight in sources)
        self._sampler = sampler
        self._places: list[tuple[TokenSource, Any]] = []
        for source, weight in sources:
            limit = max(sampler.shortest, round(tokens * weight / total))
            self._places += [(source, place) for place in sampler.first(source, limit)]
        parts = [settings, str(tokens), *(f"{source.fingerprint} {weight}" for source, weight in sources)]
        self.fingerprint = hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def __len__(self) -> int:
        return len(self._places)

    def batch(self, indices: Sequence[int]) -> dict[str, Integers]:
        """The blocks of these numbers, all below `len`."""
        return self._sampler.batch([self._places[index] for index in indices], [(0, index) for index in indices])


def open_samples(
    sources: Sequence[Any] | str,
    tokenizer: Any,
    *,
    objective: str,
    sequence_length: int,
    seed: int = 0,
    document_mask: bool = False,
    decoder_start: int | None = None,
    starts_with_last: bool = False,
    cache: Path | None = None,
    is_local_main: bool = True,
    wait: Callable[[], None] = lambda: None,
    progress: Progress = lambda label, done, total: None,
) -> Samples:
    """Training samples; what has not been tokenised yet is tokenised by the local main process while the others wait.

    Args:
        sources: strings, mappings or objects with the attributes of `Source`.
        tokenizer: a transformers tokenizer.
        objective: one of OBJECTIVES.
        sequence_length: tokens of a causal block, of the encoder's input in span corruption, of the decoder's text in
            text infilling, and
            of either text of a pair at most.
        seed: of the order and the corruption.
        document_mask: number the documents of causal blocks, for attention within each.
        decoder_start: what the decoder's input begins with; the padding token by default, as for T5.
        starts_with_last: in text infilling and pairs it begins with the target's last token instead, as for mBART.
        cache: folder of the token files; by default one for all of the user's runs.
        is_local_main: whether this is the one process of this machine that writes to the cache.
        wait: a barrier of the processes of this machine; called exactly once, also before an error is raised.
        progress: called with the source, the bytes tokenised and their total.

    Raises:
        DataError: the text can't be found or read, is too short, or does not suit the tokenizer; or the cache can't be
            written.
    """
    opened, sampler, settings = _open(
        sources,
        tokenizer,
        objective,
        sequence_length,
        document_mask,
        (decoder_start, starts_with_last),
        cache,
        is_local_main,
        wait,
        progress,
    )
    return Samples(opened, sampler, seed, settings)


def evaluation_blocks(
    sources: Sequence[Any] | str,
    tokenizer: Any,
    *,
    objective: str,
    sequence_length: int,
    tokens: int,
    document_mask: bool = False,
    decoder_start: int | None = None,
    starts_with_last: bool = False,
    cache: Path | None = None,
    is_local_main: bool = True,
    wait: Callable[[], None] = lambda: None,
    progress: Progress = lambda label, done, total: None,
) -> EvaluationBlocks:
    """Consecutive blocks of the first `tokens` tokens of the data, shared among the sources by weight; otherwise as
    `open_samples`.
    """
    opened, sampler, settings = _open(
        sources,
        tokenizer,
        objective,
        sequence_length,
        document_mask,
        (decoder_start, starts_with_last),
        cache,
        is_local_main,
        wait,
        progress,
    )
    blocks = EvaluationBlocks(opened, sampler, tokens, settings)
    for source, _ in opened:
        source.close()
    return blocks


def _open(
    sources: Sequence[Any] | str,
    tokenizer: Any,
    objective: str,
    sequence_length: int,
    document_mask: bool,
    decoder: tuple[int | None, bool],
    cache: Path | None,
    is_local_main: bool,
    wait: Callable[[], None],
    progress: Progress,
) -> tuple[list[tuple[TokenSource, float]], Sampler, str]:
    folder = default_cache() if cache is None else cache
    try:
        given = [as_source(source) for source in ([sources] if isinstance(sources, str) else sources)]
        if not given:
            raise DataError("there is no data: name at least one source of text")
        _check_objective(objective, sequence_length, document_mask=document_mask)
        Mixture([source.weight for source in given])
        if objective == PAIRS:
            opener: Opener = PairOpener(tokenizer, folder, progress)
        else:
            sampler: Sampler = _text_sampler(given, tokenizer, objective, sequence_length, document_mask, decoder)
            opener = TextOpener(
                tokenizer,
                folder,
                progress,
                closed=objective == CAUSAL,
                framed=objective == TEXT_INFILLING,
                shortest=sampler.shortest,
            )
        opened = [opener.make(source) for source in given] if is_local_main else []
    finally:
        wait()
    if not is_local_main:
        opened = [opener.find(source) for source in given]
    weighted = [(tokens, source.weight) for tokens, source in zip(opened, given, strict=True)]
    if objective == PAIRS:  # whose mean length is known only now
        pairs = [(tokens, weight) for tokens, weight in weighted if isinstance(tokens, PairFile)]
        sampler = PairSampler(sequence_length, pairs, _decoder_input(tokenizer, *decoder))
    settings = f"{objective} {sequence_length} {document_mask} {decoder[0]}" + (" last" if decoder[1] else "")
    return weighted, sampler, settings


def _check_objective(objective: str, sequence_length: int, *, document_mask: bool) -> None:
    if objective not in OBJECTIVES:
        raise DataError(f"there is no objective {objective!r}: choose one of {', '.join(OBJECTIVES)}")
    if sequence_length < 1:
        raise DataError(f"sequence_length is {sequence_length}, expected a number above 0")
    if document_mask and objective != CAUSAL:
        raise DataError(f"document_mask is for the objective causal, and this is {objective}: leave it out")


def _text_sampler(
    given: Sequence[Source],
    tokenizer: Any,
    objective: str,
    length: int,
    document_mask: bool,
    decoder: tuple[int | None, bool],
) -> Sampler:
    if objective != TEXT_INFILLING:
        return make_sampler(tokenizer, objective, length, document_mask=document_mask, decoder_start=decoder[0])
    mask = mask_token(tokenizer)
    frame = max(frame.size for source in given for frame in infilling_frames(tokenizer, source))
    return InfillingSampler(length, frame, mask, _decoder_input(tokenizer, *decoder))


def _decoder_input(tokenizer: Any, start: int | None, last_first: bool) -> DecoderInput:
    start = _decoder_start(tokenizer, start)
    return DecoderInput(start, start if tokenizer.pad_token_id is None else int(tokenizer.pad_token_id), last_first)


def _decoder_start(tokenizer: Any, stated: int | None) -> int:
    start = tokenizer.pad_token_id if stated is None else stated
    if start is None:
        raise DataError(
            "the tokenizer has no padding token, which the decoder's input begins with: set decoder_start_token_id in config.json"
        )
    return int(start)


def make_sampler(
    tokenizer: Any, objective: str, sequence_length: int, *, document_mask: bool, decoder_start: int | None
) -> Sampler:
    """What makes the samples of causal, span_corruption or ul2.

    Raises:
        DataError: the tokenizer lacks a token that the objective needs, or the lengths make no sense.
    """
    _check_objective(objective, sequence_length, document_mask=document_mask)
    if objective == CAUSAL:
        return CausalSampler(sequence_length, end_of_text(tokenizer), document_mask=document_mask)
    start = _decoder_start(tokenizer, decoder_start)
    if objective == UL2_MIXTURE:
        return SpanSampler(sequence_length, tokenizer, UL2, decoder_start=start, cap_spans=True)
    return SpanSampler(sequence_length, tokenizer, T5, decoder_start=start, cap_spans=False)
