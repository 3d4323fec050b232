"""Training samples by number, independent of the number of processes."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gqa_convert.data.objectives import SampleSettings, make_sampler
from gqa_convert.data.order import Mixture, mix
from gqa_convert.data.sampler import SHUFFLE_WINDOW, Batch, Sampler
from gqa_convert.data.sources import Source, as_source
from gqa_convert.data.token_files import OnTokenize, TokenSource, default_cache, open_tokens, tokenize
from gqa_convert.errors import DataError


class Samples:
    """An endless list of training samples, numbered from 0, with a new order each epoch.

    A sample is a function of its number, the seed, the tokenizer and the data alone.

    Attributes:
        tokens_per_sample: the text tokens that a sample consumes (the mean if samples differ).
        fingerprint: a hash of the tokens, the objective and the seed; equal fingerprints mean equal samples.
            notes: messages about the data, for the user.
        sampler: of the objective.
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
        self.sampler, self._seed, self._window = sampler, seed, window
        shares = list(zip(self.sources, self._mixture.parts, strict=True))
        sampler.measure(shares)
        self.tokens_per_sample = sampler.raw_tokens
        self.notes = list(sampler.notes)
        stated = [f"{tokens.fingerprint} {share}" for tokens, share in shares]
        self.fingerprint = _hash([settings, str(seed), str(window), *stated])

    def batch(self, indices: Sequence[int]) -> Batch:
        """The samples with these numbers; see the `batch` of the samplers.

        Raises:
            IndexError: a stream is not tokenised so far.
        """
        places = []
        for index in indices:
            source, number = self._mixture.locate(index)
            tokens = self.sources[source]
            places.append((tokens, self.sampler.cut(tokens, number, mix(self._seed, source), self._window)))
        return self.sampler.batch(places, [(mix(self._seed), index) for index in indices])


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
        self.sampler = sampler
        self._places = [(tokens, place) for tokens, limit in sources for place in sampler.first(tokens, limit)]
        self.fingerprint = _hash([settings, *(f"{tokens.fingerprint} {limit}" for tokens, limit in sources)])

    def __len__(self) -> int:
        return len(self._places)

    def batch(self, indices: Sequence[int]) -> Batch:
        """The blocks with these numbers, all of them below `len`."""
        return self.sampler.batch([self._places[index] for index in indices], [(0, index) for index in indices])


def _hash(parts: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class TokenCache:
    """Where tokens are kept, and who makes them.

    Attributes:
        folder: of the token files.
        is_local_main: whether this is the one process of this machine that writes there.
        processes: how many processes tokenise.
        wait: a barrier of the processes of this machine; called exactly once, also before an error is raised.
        progress: called with the source, what is tokenised and the total.
    """

    folder: Path = field(default_factory=default_cache)
    is_local_main: bool = True
    processes: int = 1
    wait: Callable[[], None] = lambda: None
    progress: OnTokenize = lambda label, done, total: None


def open_samples(
    sources: Sequence[Any] | str,
    settings: SampleSettings,
    cache: TokenCache | None = None,
    *,
    seed: int = 0,
    tokens: int | None = None,
    shuffle_window: int = SHUFFLE_WINDOW,
) -> Samples:
    """Open training samples. The local main process tokenises what is not cached while the others wait: files and pairs
    wholly, and streams as far as a run needs them.

    Args:
        sources: strings, mappings or `Source` objects.
        settings: of the samples.
        cache: of the tokens; by default one for all of the user's runs.
        seed: determines the order and the corruption.
        tokens: how many tokens of text are trained on; None if streams are to be read to their ends.
        shuffle_window: the tokens of a stream over which the samples of its first epoch are shuffled.

    Raises:
        DataError: the text can't be found or read, is too short, or does not fit the tokenizer; or the cache can't be
            written.
    """
    given, sampler = _sources(sources), make_sampler(settings)
    weights = [source.weight for source in given]
    needed: list[int | None] = [None] * len(given)
    if tokens is not None:
        counts = Mixture(weights).counts(int(tokens // sampler.raw_tokens) + 1)
        needed = [sampler.tokens_for(count, shuffle_window) for count in counts]
    opened = _open(given, sampler, cache or TokenCache(), needed)
    return Samples(list(zip(opened, weights, strict=True)), sampler, seed, str(settings), shuffle_window)


def evaluation_blocks(
    sources: Sequence[Any] | str, settings: SampleSettings, cache: TokenCache | None = None, *, tokens: int
) -> EvaluationBlocks:
    """Open consecutive blocks of the first `tokens` tokens of the data, divided among the sources by weight. The other
    arguments are those of `open_samples`.
    """
    given, sampler = _sources(sources), make_sampler(settings)
    total, shortest = sum(source.weight for source in given), sampler.shortest
    limits = [max(shortest, round(tokens * source.weight / total)) for source in given]
    reads_all = sampler.tokens_for(1, 1) is None
    needed = [None if reads_all else limit + shortest for limit in limits]
    opened = _open(given, sampler, cache or TokenCache(), needed)
    return EvaluationBlocks(list(zip(opened, limits, strict=True)), sampler, str(settings))


def _sources(given: Sequence[Any] | str) -> list[Source]:
    sources = [as_source(source) for source in ([given] if isinstance(given, str) else given)]
    if not sources:
        raise DataError("there is no data: name at least one source of text")
    return sources


def _open(
    sources: Sequence[Source], sampler: Sampler, cache: TokenCache, needed: Sequence[int | None]
) -> list[TokenSource]:
    """The tokens of each source, as many as needed."""
    if not cache.is_local_main:
        cache.wait()
    try:
        return [_tokens(source, sampler, cache, count) for source, count in zip(sources, needed, strict=True)]
    finally:
        if cache.is_local_main:
            cache.wait()


def _tokens(source: Source, sampler: Sampler, cache: TokenCache, needed: int | None) -> TokenSource:
    text = sampler.open(source, cache.folder)
    encoder = sampler.encoder(source, text)
    if not cache.is_local_main:
        return open_tokens(text, encoder, cache.folder)
    least = None if needed is None or not text.is_stream else max(needed, sampler.shortest)
    tokens = tokenize(text, encoder, cache.folder, needed=least, progress=cache.progress, processes=cache.processes)
    if tokens.size < sampler.shortest:
        raise DataError(
            f"{text.label} has {tokens.size} tokens, fewer than one sample of {sampler.shortest}: add text, or make sequence_length smaller"
        )
    if not tokens.learns_any():
        raise DataError(
            f"{text.label} has no message of the assistant, whose tokens are learned: name other conversations, or set loss_on to all"
        )
    return tokens
