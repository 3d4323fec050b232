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
        files: the tokens of each source.
    """

    def __init__(
        self,
        sources: Sequence[tuple[TokenSource, float]],
        sampler: Sampler,
        seed: int,
        settings: str,
        window: int = SHUFFLE_WINDOW,
    ) -> None:
        self.files = [tokens for tokens, _ in sources]
        self._mixture = Mixture([weight for _, weight in sources])
        self._sampler, self._seed = sampler, seed
        self._keys = [mix(seed, number) for number in range(len(sources))]
        self._windows = [window if tokens.is_stream else None for tokens in self.files]
        shares = list(zip(self.files, self._mixture.parts, strict=True))
        sampler.measure(shares)
        self.tokens_per_sample = sampler.raw_tokens
        self.longest, self.notes = sampler.longest, list(sampler.notes)
        parts = [
            settings,
            str(seed),
            f"window {window}",
            *(f"{tokens.fingerprint} {share}" for tokens, share in shares),
        ]
        self.fingerprint = hashlib.sha256("\n".join(parts).encode()).hexdigest()

    @property
    def epoch_samples(self) -> int | None:
        """The number of samples after which every source has been read once; None if a stream goes on."""
        if not all(tokens.complete for tokens in self.files):
            return None
        counts = [self._sampler.count(tokens) for tokens in self.files]
        return max(self._mixture.samples_for(source, count) for source, count in enumerate(counts))

    def batch(self, indices: Sequence[int]) -> dict[str, Integers]:
        """The samples with these numbers; see the `batch` of the samplers.

        Raises:
            IndexError: a stream is not tokenised so far.
        """
        places = []
        for index in indices:
            source, number = self._mixture.locate(index)
            tokens, window = self.files[source], self._windows[source]
            if window is not None and not tokens.complete:
                needed = self._sampler.tokens_for(number + 1, window)
                if needed is None or needed > tokens.size:
                    raise IndexError(f"sample {index} is cut from tokens of {tokens.label} that are not there yet")
            places.append((tokens, self._sampler.cut(tokens, number, self._keys[source], window)))
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
        parts = [settings, *(tokens.fingerprint for tokens, _ in sources)]
        self.fingerprint = hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def __len__(self) -> int:
        return len(self._places)

    def batch(self, indices: Sequence[int]) -> dict[str, Integers]:
        """The blocks with these numbers, all of them below `len`."""
        return self._sampler.batch([self._places[index] for index in indices], [(0, index) for index in indices])


class Tokenizing(TypedDict, total=False):
    """How sources are tokenised.

    Attributes:
        cache: folder of the token files; by default one for all of the user's runs.
        is_local_main: whether this is the one process of this machine that writes to the cache.
        processes: how many processes tokenise files.
        wait: a barrier of the processes of this machine; called exactly once, also before an error is raised.
        progress: called with the source, what is tokenised and the total.
    """

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
    document_mask: bool = False,
    decoder_start: int | None = None,
    starts_with_last: bool = False,
    shuffle_window: int = SHUFFLE_WINDOW,
    **tokenizing: Unpack[Tokenizing],
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
        document_mask: number the documents of causal blocks, for attention within each.
        decoder_start: the first token of the decoder's input; by default the padding token, as for T5.
        starts_with_last: for pairs: whether the decoder's input begins with the target's last token instead, as for
            mBART.
        shuffle_window: the tokens of a stream over which the samples of its first epoch are shuffled.
        tokenizing: see `Tokenizing`.

    Raises:
        DataError: the text can't be found or read, is too short, or does not fit the tokenizer; or the cache can't be
            written.
    """
    given = _read(sources)
    settings = SampleSettings(tokenizer, sequence_length, document_mask, decoder_start, starts_with_last)
    sampler = make_sampler(objective, settings)
    weights = [source.weight for source in given]
    counts = Mixture(weights).counts(0 if tokens is None else int(tokens // sampler.raw_tokens) + 1)
    needed = [None if tokens is None else sampler.tokens_for(count, shuffle_window) for count in counts]
    files = _tokenized(given, needed, tokenizer, objective, sampler.shortest, **tokenizing)
    return Samples(list(zip(files, weights, strict=True)), sampler, seed, settings.stated(objective), shuffle_window)


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
    **tokenizing: Unpack[Tokenizing],
) -> EvaluationBlocks:
    """Open consecutive blocks of the first `tokens` tokens of the data, divided among the sources by weight. The other
    arguments are those of `open_samples`.
    """
    given = _read(sources)
    settings = SampleSettings(tokenizer, sequence_length, document_mask, decoder_start, starts_with_last)
    sampler = make_sampler(objective, settings)
    weights = [source.weight for source in given]
    limits = [max(sampler.shortest, round(tokens * weight / sum(weights))) for weight in weights]
    needed = [limit if OBJECTIVES[objective].reads_pairs else limit + sampler.shortest for limit in limits]
    files = _tokenized(given, needed, tokenizer, objective, sampler.shortest, **tokenizing)
    stated = f"{settings.stated(objective)} {tokens} {weights}"
    return EvaluationBlocks(list(zip(files, limits, strict=True)), sampler, stated)


def _read(sources: Sequence[Any] | str) -> list[Source]:
    given = [as_source(source) for source in ([sources] if isinstance(sources, str) else sources)]
    if not given:
        raise DataError("there is no data: name at least one source of text")
    return given


def _tokenized(
    sources: Sequence[Source],
    needed: Sequence[int | None],
    tokenizer: Any,
    objective: str,
    shortest: int,
    *,
    cache: Path | None = None,
    is_local_main: bool = True,
    processes: int = 1,
    wait: Callable[[], None] = lambda: None,
    progress: Progress = lambda label, done, total: None,
) -> list[TokenSource]:
    """The tokens of each source, as many as needed; see `Tokenizing`."""
    folder = default_cache() if cache is None else cache
    files: list[TokenSource] = []
    if not is_local_main:
        wait()
    try:
        for source, count in zip(sources, needed, strict=True):
            text = open_source(source, folder)
            encoder = encoder_for(OBJECTIVES[objective], source, text, tokenizer)
            if is_local_main:
                least = None if count is None or not text.is_stream else max(count, shortest)
                tokens = tokenize(text, encoder, folder, needed=least, progress=progress, processes=processes)
                _check(tokens, shortest)
            else:
                tokens = open_tokens(text, encoder, folder)
            files.append(tokens)
    finally:
        if is_local_main:
            wait()
    return files


def _check(tokens: TokenSource, shortest: int) -> None:
    if tokens.size < shortest:
        raise DataError(
            f"{tokens.label} has {tokens.size} tokens, fewer than one sample of {shortest}: add text, or make sequence_length smaller"
        )
    if not tokens.learns_any():
        raise DataError(
            f"{tokens.label} has no message of the assistant, whose tokens are learned: name other conversations, or set loss_on to all"
        )
