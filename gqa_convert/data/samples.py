"""Training samples by number, independent of the number of processes."""

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypedDict, Unpack

from gqa_convert.data.encoders import encoder_for
from gqa_convert.data.objectives import OBJECTIVES, SampleSettings, make_sampler
from gqa_convert.data.order import Integers, Mixture, mix
from gqa_convert.data.packing import SHUFFLE_WINDOW, Sampler
from gqa_convert.data.sources import Source, as_source, open_source
from gqa_convert.data.token_files import Progress, TokenSource, default_cache, open_tokens, tokenize
from gqa_convert.errors import DataError


class Samples:
    """An endless list of training samples, numbered from 0, with a new order each epoch.

    A sample is a function of its number, the seed, the tokenizer and the data alone.

    Attributes:
        tokens_per_sample: the text tokens that a sample consumes (the mean if samples differ).
        fingerprint: a hash of the tokens, the objective and the seed; equal fingerprints mean equal samples.
        longest: the tokens of the longest encoder input and target if the data determine them; otherwise None.
        notes: messages about the data, for the user.
        sources: the tokens of each source.
    """

    def __init__(
        self,
        sources: Sequence[tuple[TokenSource, float]],
        sampler: Sampler,
        seed: int,
        settings: str,
        window: int = SHUFFLE_WINDOW,
    ) -> None:
        self.sources = [tokens for tokens, _ in sources]
        self._mixture = Mixture([weight for _, weight in sources])
        self._sampler, self._seed, self._window = sampler, seed, window
        shares = list(zip(self.sources, self._mixture.parts, strict=True))
        sampler.measure(shares)
        self.tokens_per_sample = sampler.raw_tokens
        self.longest, self.notes = sampler.longest, list(sampler.notes)
        stated = [f"{tokens.fingerprint} {share}" for tokens, share in shares]
        self.fingerprint = _hash([settings, str(seed), str(window), *stated])

    @property
    def epoch_samples(self) -> int | None:
        """The number of samples after which every source has been read once; None if a stream goes on."""
        if not all(tokens.complete for tokens in self.sources):
            return None
        counts = [self._sampler.count(tokens) for tokens in self.sources]
        return max(self._mixture.samples_for(source, count) for source, count in enumerate(counts))

    def batch(self, indices: Sequence[int]) -> dict[str, Integers]:
        """The samples with these numbers; see the `batch` of the samplers.

        Raises:
            IndexError: a stream is not tokenised so far.
        """
        places = []
        for index in indices:
            source, number = self._mixture.locate(index)
            tokens = self.sources[source]
            places.append((tokens, self._sampler.cut(tokens, number, mix(self._seed, source), self._window)))
        return self._sampler.batch(places, [(mix(self._seed), index) for index in indices])


class EvaluationBlocks:
    """A fixed list of samples in the order of the text, each token of which is scored once.

    Args:
        sources: the tokens of each source, and how many of them are scored.
        sampler: makes the samples.
        settings: what else determines them, as text.

    Attributes:
        fingerprint: a hash of the tokens and settings.
    """

    def __init__(self, sources: Sequence[tuple[TokenSource, int]], sampler: Sampler, settings: str) -> None:
        self._sampler = sampler
        self._places = [(tokens, place) for tokens, limit in sources for place in sampler.first(tokens, limit)]
        self.fingerprint = _hash([settings, *(f"{tokens.fingerprint} {limit}" for tokens, limit in sources)])

    def __len__(self) -> int:
        return len(self._places)

    def batch(self, indices: Sequence[int]) -> dict[str, Integers]:
        """The blocks with these numbers, all of them below `len`."""
        return self._sampler.batch([self._places[index] for index in indices], [(0, index) for index in indices])


def _hash(parts: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


class OpeningSettings(TypedDict, total=False):
    """Settings that training and evaluation samples have in common.

    Attributes:
        document_mask: number the documents of causal blocks, for attention within each.
        decoder_start: the first token of the decoder's input; by default the padding token, as for T5.
        starts_with_last: for pairs: whether the decoder's input begins with the target's last token instead, as for
            mBART.
        cache: folder of the token files; by default one for all of the user's runs.
        is_local_main: whether this is the one process of this machine that writes to the cache.
        processes: how many processes tokenise.
        wait: a barrier of the processes of this machine; called exactly once, also before an error is raised.
        progress: called with the source, what is tokenised and the total.
    """

    document_mask: bool
    decoder_start: int | None
    starts_with_last: bool
    cache: Path | None
    is_local_main: bool
    processes: int
    wait: Callable[[], None]
    progress: Progress


def open_samples(
    sources: Sequence[Any] | str,
    tokenizer: Any,
    *,
    objective: str,
    sequence_length: int,
    seed: int = 0,
    tokens: int | None = None,
    shuffle_window: int = SHUFFLE_WINDOW,
    **settings: Unpack[OpeningSettings],
) -> Samples:
    """Open training samples. The local main process tokenises what is not cached while the others wait: files and pairs
    wholly, and streams as far as a run needs them.

    Args:
        sources: strings, mappings or `Source` objects.
        tokenizer: a transformers tokenizer.
        objective: one of OBJECTIVES.
        sequence_length: the tokens of a causal block, or of the encoder's input in span corruption; for pairs, the most
            tokens of either text.
        seed: determines the order and the corruption.
        tokens: how many tokens of text are trained on; None if streams are to be read to their ends.
        shuffle_window: the tokens of a stream over which the samples of its first epoch are shuffled.
        settings: see `OpeningSettings`.

    Raises:
        DataError: the text can't be found or read, is too short, or does not fit the tokenizer; or the cache can't be
            written.
    """
    opening = _Opening(sources, tokenizer, objective, sequence_length, **settings)
    sampler, needed = opening.sampler, list[int | None]([None] * len(opening.weights))
    if tokens is not None:
        counts = Mixture(opening.weights).counts(int(tokens // sampler.raw_tokens) + 1)
        needed = [sampler.tokens_for(count, shuffle_window) for count in counts]
    weighted = list(zip(opening.tokenize(needed), opening.weights, strict=True))
    return Samples(weighted, sampler, seed, opening.stated, shuffle_window)


def evaluation_blocks(
    sources: Sequence[Any] | str,
    tokenizer: Any,
    *,
    objective: str,
    sequence_length: int,
    tokens: int,
    **settings: Unpack[OpeningSettings],
) -> EvaluationBlocks:
    """Open consecutive blocks of the first `tokens` tokens of the data, divided among the sources by weight. The other
    arguments are those of `open_samples`.
    """
    opening = _Opening(sources, tokenizer, objective, sequence_length, **settings)
    total, shortest = sum(opening.weights), opening.sampler.shortest
    limits = [max(shortest, round(tokens * weight / total)) for weight in opening.weights]
    reads_pairs = OBJECTIVES[objective].reads_pairs  # which are counted by their tokens after they are truncated
    files = opening.tokenize([None if reads_pairs else limit + shortest for limit in limits])
    return EvaluationBlocks(list(zip(files, limits, strict=True)), opening.sampler, opening.stated)


class _Opening:
    """Sources that are opened for an objective; see `open_samples` and `OpeningSettings`."""

    def __init__(
        self,
        sources: Sequence[Any] | str,
        tokenizer: Any,
        objective: str,
        length: int,
        *,
        document_mask: bool = False,
        decoder_start: int | None = None,
        starts_with_last: bool = False,
        cache: Path | None = None,
        is_local_main: bool = True,
        processes: int = 1,
        wait: Callable[[], None] = lambda: None,
        progress: Progress = lambda label, done, total: None,
    ) -> None:
        self._given = [as_source(source) for source in ([sources] if isinstance(sources, str) else sources)]
        if not self._given:
            raise DataError("there is no data: name at least one source of text")
        self.weights = [source.weight for source in self._given]
        self.sampler = make_sampler(
            objective, SampleSettings(tokenizer, length, document_mask, decoder_start, starts_with_last)
        )
        self.stated = f"{objective} {length} {document_mask} {decoder_start} {starts_with_last}"
        self._objective, self._tokenizer = OBJECTIVES[objective], tokenizer
        self._cache = default_cache() if cache is None else cache
        self._is_local_main, self._wait = is_local_main, wait
        self._processes, self._progress = processes, progress

    def tokenize(self, needed: Sequence[int | None]) -> list[TokenSource]:
        """The tokens of each source, as many as needed."""
        if not self._is_local_main:
            self._wait()
        try:
            return [self._tokens(source, count) for source, count in zip(self._given, needed, strict=True)]
        finally:
            if self._is_local_main:
                self._wait()

    def _tokens(self, source: Source, needed: int | None) -> TokenSource:
        text = open_source(source, self._cache)
        encoder = encoder_for(self._objective, source, text, self._tokenizer)
        if not self._is_local_main:
            return open_tokens(text, encoder, self._cache)
        shortest = self.sampler.shortest
        least = None if needed is None or not text.is_stream else max(needed, shortest)
        tokens = tokenize(text, encoder, self._cache, needed=least, progress=self._progress, processes=self._processes)
        if tokens.size < shortest:
            raise DataError(
                f"{text.label} has {tokens.size} tokens, fewer than one sample of {shortest}: add text, or make sequence_length smaller"
            )
        if not tokens.learns_any():
            raise DataError(
                f"{text.label} has no message of the assistant, whose tokens are learned: name other conversations, or set loss_on to all"
            )
        return tokens
