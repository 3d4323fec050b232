"""The settings of a benchmark: the versions, repetitions and inputs."""

from dataclasses import dataclass
from typing import Final

from gqa_convert.errors import OptionError

ATTENTIONS: Final = ("gqa", "sdpa", "eager")
DTYPES: Final = ("float32", "bfloat16", "float16")
CONTEXT: Final = 512
"""The default number of cached tokens."""
LEAD: Final = 1
"""Decode steps before the timed ones of a turn: the version before has left its own weights in the processor's
caches.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkOptions:
    """How a model is timed. Named as the command line names them.

    Raises:
        OptionError: a value is out of range.
    """

    groups: tuple[int, ...] | None = None
    """K/V heads per layer to time; by default the model's own and its divisors, seven of them if there are more."""
    batch: tuple[int, ...] = (1,)
    """Sequences decoded at once."""
    context: tuple[int, ...] | None = None
    """Tokens in the cache when the timed steps begin; by default 512, or half the model's positions."""
    encoder_tokens: int | None = None
    """Tokens of an encoder-decoder's input; by default 512, or what its encoder is made for."""
    new_tokens: int = 128
    """Tokens decoded per sample, for the time per sample."""
    steps: int = 8
    """Decode steps timed in each turn of a version."""
    repetitions: int = 8
    """Timed turns of each version."""
    warm_up: int = 1
    """Turns of each version before the timed ones."""
    attention: str | None = None
    """transformers' name of the attention function; by default `gqa`, this package's, where the model takes it."""
    dtype: str | None = None
    """By default the checkpoint's dtype."""
    device: str | None = None
    """`cpu`, `cuda` or `cuda:1`; by default a GPU where there is one."""
    prefill: bool = True
    """Time the prefill, and fill the cache by it; without it the cache is filled with random keys and values."""
    memory: int | None = None
    """Budget in bytes for weights and K/V cache; with it, the largest batch and the longest context are reported."""

    def __post_init__(self) -> None:
        for name, values in (("--groups", self.groups), ("--batch", self.batch), ("--context", self.context)):
            if values is None:
                continue
            if not values or min(values) < 1:
                raise OptionError(
                    f"{name} {','.join(map(str, values))} holds a number below 1: name counts such as 1,8"
                )
        least = {
            "--encoder-tokens": (self.encoder_tokens, 1),
            "--new-tokens": (self.new_tokens, 1),
            "--steps": (self.steps, 1),
            "--repetitions": (self.repetitions, 1),
            "--warm-up": (self.warm_up, 0),
            "--memory": (self.memory, 1),
        }
        for name, (value, bound) in least.items():
            if value is not None and value < bound:
                raise OptionError(f"{name} {value} is too small: give {bound} or more")
        for name, choice, known in (("--attention", self.attention, ATTENTIONS), ("--dtype", self.dtype, DTYPES)):
            if choice is not None and choice not in known:
                raise OptionError(f"{name} {choice!r} is unknown: choose one of {', '.join(known)}")
