"""Training samples by number, independent of the number of processes."""

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gqa_convert.errors import DataError
from gqa_convert.text.objectives import CAUSAL, OBJECTIVES, Objective, SampleSettings
from gqa_convert.text.opening import Opener, PairOpener, TextOpener
from gqa_convert.text.order import Integers, Mixture, mix
from gqa_convert.text.packing import SHUFFLE_WINDOW, Sampler
from gqa_convert.text.pair_files import PairFile
from gqa_convert.text.pair_sampling import PairSampler
from gqa_convert.text.sources import as_source
from gqa_convert.text.token_files import Progress, TokenSource, default_cache

_LOOKS = 100
"""How often the progress of a stream is reported."""


class Samples:
    """An endless list of training samples, numbered from 0, with a new order each epoch.

    A sample is a function of its number, the seed, the tokenizer and the data alone.

    Attributes:
        tokens_per_sample: the text tokens that a sample consumes (the mean if samples differ).
        fingerprint: a hash of the tokens, the objective and the seed; equal fingerprints mean equal samples.
        longest: the tokens of the longest encoder input and target if the data determine them; otherwise None.
        notes: messages about the data, for the user.
        names: the name of each source.
    """

    def __init__(
        self,
        sources: Sequence[tuple[TokenSource, float]],
        sampler: Sampler,
        seed: int,
        settings: str,
        window: int = SHUFFLE_WINDOW,
        names: Sequence[str] = (),
    ) -> None:
        self._tokens = [tokens for tokens, _ in sources]
        self._mixture = Mixture([weight for _, weight in sources])
        self.names = tuple(names)
        self._sampler, self._seed = sampler, seed
        self._keys = [mix(seed, number) for number in range(len(sources))]
        self._windows = [window if tokens.grows else None for tokens in self._tokens]
        self.tokens_per_sample = sampler.raw_tokens
        self.longest, self.notes = sampler.longest, list(sampler.notes)
        parts = [
            settings,
            str(seed),
            *([f"window {window}"] if any(self._windows) else []),
            *(f"{tokens.fingerprint} {part}" for tokens, part in zip(self._tokens, self._mixture.parts, strict=True)),
        ]
        self.fingerprint = hashlib.sha256("\n".join(parts).encode()).hexdigest()

    @property
    def epoch_samples(self) -> int | None:
        """The number of samples after which every source has been read once; None while a stream has not ended."""
        sizes = [tokens.size() for tokens in self._tokens]
        if not all(complete for _, complete in sizes):
            return None
        counts = [self._sampler.count(size) for size, _ in sizes]
        return max(self._mixture.samples_for(source, count) for source, count in enumerate(counts))

    def batch(self, indices: Sequence[int]) -> dict[str, Integers]:
        """The samples with these numbers; see `causal_batch`, `SpanSampler.batch` and `collated`."""
        places = []
        for index in indices:
            source, number = self._mixture.locate(index)
            place = self._sampler.cut(self._tokens[source], number, self._keys[source], window=self._windows[source])
            places.append((self._tokens[source], place))
        return self._sampler.batch(places, [(mix(self._seed), index) for index in indices])

    def sizes(self) -> list[tuple[int, bool]]:
        """The tokens (of pairs, the pairs) of each source that are available, and whether they are all of it."""
        return [tokens.size() for tokens in self._tokens]

    def fetch(self, count: int, progress: Callable[[str, int, int], None]) -> None:
        """Wait until streams have delivered what the first `count` samples are cut from.

        Args:
            count: the number of samples.
            progress: called with the name of a stream, the samples that can be cut, and their number.
        """
        for source, window in enumerate(self._windows):
            number = self._mixture.counts(count)[source]
            for share in range(1, _LOOKS + 1) if window is not None else ():
                ready = -(-number * share // _LOOKS)
                if ready:
                    self._sampler.cut(self._tokens[source], ready - 1, self._keys[source], window=window)
                    progress(self.names[source], ready, number)

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
        """The blocks with these numbers, all of them below `len`."""
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
    shuffle_window: int = SHUFFLE_WINDOW,
    cache: Path | None = None,
    is_local_main: bool = True,
    processes: int = 1,
    wait: Callable[[], None] = lambda: None,
    progress: Progress = lambda label, done, total: None,
) -> Samples:
    """Open training samples. The local main process tokenises what is not cached while the others wait.

    Args:
        sources: strings, mappings or `Source` objects.
        tokenizer: a transformers tokenizer.
        objective: one of OBJECTIVES.
        sequence_length: the tokens of a causal block, or of the encoder's input in span corruption; for pairs, the most
            tokens of either text.
        seed: determines the order and the corruption.
        document_mask: number the documents of causal blocks, for attention within each.
        decoder_start: the first token of the decoder's input; by default the padding token, as for T5.
        starts_with_last: for pairs: whether the decoder's input begins with the target's last token
            instead, as for mBART.
        shuffle_window: the tokens of a stream over which the samples of its first epoch are shuffled.
        cache: folder of the token files; by default one for all of the user's runs.
        is_local_main: whether this is the one process of this machine that writes to the cache.
        processes: how many processes tokenise files.
        wait: a barrier of the processes of this machine; called exactly once, also before an error is raised.
        progress: called with the source, the bytes tokenised and their total.

    Raises:
        DataError: the text can't be found or read, is too short, or does not fit the tokenizer; or the cache can't be
            written.
    """
    settings = SampleSettings(tokenizer, sequence_length, document_mask, decoder_start, starts_with_last)
    opened, sampler, stated = _open(sources, objective, settings, cache, is_local_main, wait, progress, processes)
    return Samples(opened, sampler, seed, stated, shuffle_window, _names(sources))


def _names(sources: Sequence[Any] | str) -> list[str]:
    """A name of each source; sources that are named alike are numbered."""
    given = [as_source(source).source for source in ([sources] if isinstance(sources, str) else sources)]
    return [
        name if given.count(name) == 1 else f"{name} ({given[: place + 1].count(name)})"
        for place, name in enumerate(given)
    ]


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
    processes: int = 1,
    wait: Callable[[], None] = lambda: None,
    progress: Progress = lambda label, done, total: None,
) -> EvaluationBlocks:
    """Open consecutive blocks of the first `tokens` tokens of the data, divided among the sources by weight. The other
    arguments are those of `open_samples`.
    """
    settings = SampleSettings(tokenizer, sequence_length, document_mask, decoder_start, starts_with_last)
    opened, sampler, stated = _open(sources, objective, settings, cache, is_local_main, wait, progress, processes)
    blocks = EvaluationBlocks(opened, sampler, tokens, stated)
    for source, _ in opened:
        source.close()
    return blocks


def _open(
    sources: Sequence[Any] | str,
    objective: str,
    settings: SampleSettings,
    cache: Path | None,
    is_local_main: bool,
    wait: Callable[[], None],
    progress: Progress,
    processes: int,
) -> tuple[list[tuple[TokenSource, float]], Sampler, str]:
    """The tokens and weight of each source, the sampler, and a text that identifies the settings."""
    folder = default_cache() if cache is None else cache
    try:
        given = [as_source(source) for source in ([sources] if isinstance(sources, str) else sources)]
        if not given:
            raise DataError("there is no data: name at least one source of text")
        record = _checked(objective, settings)
        Mixture([source.weight for source in given])
        sampler = None
        if record.sampler is None:
            opener: Opener = PairOpener(settings.tokenizer, folder, progress)
        else:
            sampler = record.sampler(settings)
            opener = TextOpener(
                settings.tokenizer,
                folder,
                progress,
                closed=record.closes_documents,
                shortest=sampler.shortest,
                chats=objective == CAUSAL,
                processes=processes,
            )
        opened = [opener.make(source) for source in given] if is_local_main else []
    finally:
        wait()
    if not is_local_main:
        opened = [opener.find(source) for source in given]
    weighted = [(tokens, source.weight) for tokens, source in zip(opened, given, strict=True)]
    if sampler is None:  # the mean length of the pairs is known only now
        pairs = [(tokens, weight) for tokens, weight in weighted if isinstance(tokens, PairFile)]
        sampler = PairSampler(settings.length, pairs, settings.decoder_input)
    stated = f"{objective} {settings.length} {settings.document_mask} {settings.decoder_start}"
    return weighted, sampler, stated + (" last" if settings.starts_with_last else "")


def _checked(objective: str, settings: SampleSettings) -> Objective:
    """The record of an objective, checked against the settings."""
    if objective not in OBJECTIVES:
        raise DataError(f"there is no objective {objective!r}: choose one of {', '.join(OBJECTIVES)}")
    if settings.length < 1:
        raise DataError(f"sequence_length is {settings.length}, expected a number above 0")
    if settings.document_mask and not OBJECTIVES[objective].masks_documents:
        raise DataError(
            f"document_mask needs the objective causal, and the objective is {objective}: remove document_mask"
        )
    return OBJECTIVES[objective]


def make_sampler(
    tokenizer: Any, objective: str, sequence_length: int, *, document_mask: bool, decoder_start: int | None
) -> Sampler:
    """The sampler of an objective on running text.

    Raises:
        DataError: the tokenizer lacks a token that the objective needs, or the lengths do not allow a sample.
    """
    settings = SampleSettings(tokenizer, sequence_length, document_mask, decoder_start)
    record = _checked(objective, settings)
    if record.sampler is None:
        raise DataError(f"samples of {objective} depend on their source: open them with open_samples")
    return record.sampler(settings)
