"""Training samples by number, independent of the number of processes."""

import hashlib
import math
from collections.abc import Sequence
from fractions import Fraction

from gqa_convert.errors import DataError

from .files import PAIR_KEYS, FieldError
from .objectives import make_sampler
from .order import mix
from .sampler import Batch, Sampler, SampleSettings, Shares
from .sources import Source, open_source
from .token_files import OnTokenize, TokenSource, tokenize

_LONGEST_PERIOD = 1 << 16


class Samples:
    """An endless list of training samples, numbered from 0, with a new order each epoch.

    A sample is a function of its number, the seed, the tokenizer and the data alone.

    Args:
        sources: the tokens of each source, and its weight.
        sampler: of the objective.
        seed: determines the order and the corruption.

    Attributes:
        tokens_per_sample: the mean number of text tokens that a sample consumes.
        fingerprint: a hash of the tokens, the objective and the seed; equal fingerprints mean equal
            samples.
    """

    def __init__(
        self, sources: Sequence[tuple[TokenSource, float]], sampler: Sampler, seed: int
    ) -> None:
        self.sources = [tokens for tokens, _ in sources]
        self.sampler = sampler
        self._seed = seed
        self._mixture = Mixture([weight for _, weight in sources])
        shares = list(zip(self.sources, self._mixture.parts, strict=True))
        self.tokens_per_sample = sampler.mean_tokens(shares)
        self.fingerprint = _digest(shares, str(sampler.settings), str(seed))

    def batch(self, indices: Sequence[int]) -> Batch:
        """The samples with these numbers; see the `batch` of the samplers.

        Raises:
            IndexError: a stream is not tokenised so far.
        """
        places = []
        for index in indices:
            source, number = self._mixture.locate(index)
            tokens = self.sources[source]
            places.append((tokens, self.sampler.cut(tokens, number, mix(self._seed, source))))
        return self.sampler.batch(places, [(mix(self._seed), index) for index in indices])

    def times_read(self, tokens: int) -> list[float]:
        """How often each source is read in training on so many tokens of text."""
        parts = self._mixture.parts
        shares = zip(self.sources, parts, strict=True)
        return [tokens * part / sum(parts) / text.size for text, part in shares]


def _digest(sources: Shares, *settings: str) -> str:
    stated = [*settings, *(f"{tokens.fingerprint} {count}" for tokens, count in sources)]
    return hashlib.sha256("\n".join(stated).encode()).hexdigest()


class EvaluationBlocks:
    """A fixed list of samples in the order of the text, each token of which is scored once.

    Args:
        sources: the tokens of each source, and how many of them are scored.
        sampler: makes the samples.

    Attributes:
        fingerprint: a hash of the tokens and of how many are scored.
    """

    def __init__(self, sources: Sequence[tuple[TokenSource, int]], sampler: Sampler) -> None:
        self.sampler = sampler
        self.fingerprint = _digest(sources)
        self._places = []
        for tokens, limit in sources:
            self._places += [(tokens, place) for place in sampler.first(tokens, limit)]

    def __len__(self) -> int:
        return len(self._places)

    def batch(self, indices: Sequence[int]) -> Batch:
        """The blocks with these numbers, all of them below `len`."""
        places = [self._places[index] for index in indices]
        return self.sampler.batch(places, [(0, index) for index in indices])


def open_samples(
    sources: Sequence[Source],
    settings: SampleSettings,
    progress: OnTokenize,
    *,
    tokens: int,
    seed: int,
) -> Samples:
    """Open training samples. What the cache lacks is tokenised: files and pairs wholly, and streams
    as far as a run needs them.

    Args:
        sources: at least one.
        settings: of the samples.
        progress: called with the source, what is tokenised and the total.
        tokens: how many tokens of text are trained on.
        seed: determines the order and the corruption.

    Raises:
        DataError: the text can't be found or read, is too short, or does not fit the tokenizer; or
            the cache can't be written.
    """
    sampler = make_sampler(settings)
    count = int(tokens // sampler.raw_tokens) + 1
    parts = Mixture([source.weight for source in sources]).parts
    opened = []
    for source, part in zip(sources, parts, strict=True):
        needed = sampler.tokens_for(-(-count * part // sum(parts)))
        opened.append((_tokens(source, sampler, needed, progress), source.weight))
    return Samples(opened, sampler, seed)


def evaluation_blocks(
    sources: Sequence[Source], settings: SampleSettings, progress: OnTokenize, *, tokens: int
) -> EvaluationBlocks:
    """Open consecutive blocks of the first `tokens` tokens of the data, divided among the sources
    by weight. The other arguments are those of `open_samples`.
    """
    sampler = make_sampler(settings)
    total = sum(source.weight for source in sources)
    reads_all = sampler.tokens_for(1) is None
    opened = []
    for source in sources:
        limit = max(sampler.shortest, round(tokens * source.weight / total))
        needed = None if reads_all else limit + sampler.shortest
        opened.append((_tokens(source, sampler, needed, progress), limit))
    return EvaluationBlocks(opened, sampler)


def _tokens(
    source: Source, sampler: Sampler, needed: int | None, progress: OnTokenize
) -> TokenSource:
    """The tokens of a source, as many as needed if it is a stream."""
    text = open_source(source)
    encoder = sampler.encoder(source, text)
    needed = needed if text.is_stream else None
    try:
        tokens = tokenize(text, encoder, needed=needed, progress=progress)
    except FieldError as problem:
        key = "`text_field`, or set `format: chat` for conversations"
        if encoder.fields.holds == "pair":
            key = PAIR_KEYS
        raise DataError(f"{problem}, or name another with {key}") from None
    if tokens.size < sampler.shortest:
        raise DataError(
            f"{text.label} has {tokens.size} tokens, fewer than one sample of {sampler.shortest}: "
            "add text, or make sequence_length smaller"
        )
    return tokens


class Mixture:
    """An endless order of sources: for every n, the number of times a source is chosen in n samples
    differs from n times its weight by less than one.

    The order repeats after as many samples as the weights' common denominator, so that any position
    is found in constant time. Weights with a denominator above 65536 are rounded to multiples of
    1/65536.

    Attributes:
        parts: the smallest whole numbers in the proportion of the weights.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        exact = [Fraction(str(weight)) for weight in weights]
        shares = [weight / sum(exact) for weight in exact]
        period = min(math.lcm(*(share.denominator for share in shares)), _LONGEST_PERIOD)
        parts = [max(1, round(share * period)) for share in shares]
        self.parts = [part // math.gcd(*parts) for part in parts]
        self._order = _spread(self.parts)

    def locate(self, index: int) -> tuple[int, int]:
        """The source of a sample, and the number of earlier samples from that source."""
        turns, place = divmod(index, len(self._order))
        source, turn = self._order[place]
        return source, turns * self.parts[source] + turn


def _spread(parts: list[int]) -> list[tuple[int, int]]:
    """One period of the order: the source at each position, and the number of earlier positions
    with that source.

    Turn m of a source with share w is released at position floor(m / w) and due before ceil((m + 1)
    / w). Choosing the earliest deadline first meets all deadlines, as in the scheduling of periodic
    unit tasks on one processor, which bounds the error by one.
    """
    period = sum(parts)
    turns = [0] * len(parts)
    order = []
    for place in range(period):
        released = [
            each for each, part in enumerate(parts) if turns[each] * period // part <= place
        ]
        chosen = min(released, key=lambda each: -(-(turns[each] + 1) * period // parts[each]))
        order.append((chosen, turns[chosen]))
        turns[chosen] += 1
    return order
