"""What a model card states of measurements: a record for each evaluation and each benchmark."""

from dataclasses import dataclass
from pathlib import Path

from gqa_convert.measuring.results.kv_heads import KVHeads


@dataclass(frozen=True)
class Origin:
    """Where results come from.

    Attributes:
        path: of the file.
        command: as a shell would take it, None if it was not recorded.
        machine: that the command ran on, in words; None if it was not recorded.
        created: time of creation, as ISO 8601.
    """

    path: Path
    command: str | None = None
    machine: str | None = None
    created: str | None = None


@dataclass(frozen=True)
class Score:
    """A model on a text; losses, differences and divergences in nats per token, None where not measured.

    Attributes:
        nan: windows or tokens whose loss was not finite.
        difference: to another model over the same tokens: its name, the mean and its standard error.
        note: what the evaluation says of it.
    """

    model: str
    loss: float | None = None
    loss_error: float | None = None
    perplexity: float | None = None
    bits_per_byte: float | None = None
    bits_error: float | None = None
    tokens: int | None = None
    nan: int = 0
    difference: tuple[str, float | None, float | None] | None = None
    kl: float | None = None
    kl_error: float | None = None
    top1: float | None = None
    note: str | None = None


@dataclass(frozen=True)
class Evaluation:
    """Models on one text.

    Attributes:
        text: what was scored and how, in words; figures of the same text may stand side by side.
        reference: of the divergences.
    """

    origin: Origin
    text: str
    reference: str | None
    scores: tuple[Score, ...]


@dataclass(frozen=True)
class Timing:
    """Decoding at one N, batch and context; times in ms."""

    groups: KVHeads
    batch: int | None = None
    context: int | None = None
    decode: float | None = None
    low: float | None = None
    high: float | None = None
    tokens_per_second: float | None = None

    @property
    def setting(self) -> tuple[int, int]:
        """Batch and context, 0 where not stated."""
        return self.batch or 0, self.context or 0


@dataclass(frozen=True)
class Benchmark:
    """Timings of one model at several N, on one machine.

    Attributes:
        detail: how they were taken.
        spread: what `low` and `high` are.
    """

    origin: Origin
    model: str
    detail: str
    spread: str
    timings: tuple[Timing, ...]
