"""What a user asks of a conversion, and the numbers that follow where nothing is stated."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from gqa_convert.families.loading import is_encoder_decoder

from .plan import Plan

STEPS = 100
"""The default of `--fit-steps`."""
BATCH_TOKENS = 2048
"""Tokens of a batch of text."""
_TIMES = 2
"""By default, all layers together take this many times the steps of each layer."""


@dataclass(frozen=True, slots=True)
class CalibrationOptions:
    """The options of calibration, as the user gave them.

    Attributes:
        source: the text: a file, a folder, a pattern, the id of a Hub dataset or a recipe's `data`
            entry, or a list of these; None for no text.
        tokens: how many tokens the layers are fitted on; by default from the model's hidden_size.
        sequence_length: tokens of a block of text; by default the model's context up to 1024.
        seed: of the choice of blocks, and of their order in the gradient stages.
        steps: of each layer's gradient stage, for `fit`; 0 for closed forms only.
        kl_steps: of the stage that trains all layers together, for `fit`; by default twice as many
            as `steps` where the model is small enough.
        device: to run the source on, such as `cpu` or `cuda:1`; by default a GPU if there is one.
        mix: for `fit` of a decoder: let other kinds of text be a quarter of the blocks, see
            `gqa_convert.conversion.calibration.mixture`.
    """

    source: Any = None
    tokens: int | None = None
    sequence_length: int | None = None
    seed: int = 0
    steps: int | None = None
    kl_steps: int | None = None
    device: str | None = None
    mix: bool = True

    @property
    def has_data(self) -> bool:
        """Whether the source is to be run on text or sound."""
        return self.source is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversionOptions:
    """What a conversion does beside the numbers of K/V heads, as the user asked for it.

    Attributes:
        method: `mean`, `first`, `factor` or `fit`; by default `fit` with calibration text. Without
            it, `factor` on text that every machine has, or `mean` where the source cannot read
            text.
        calibration: the text of `fit` and `factor`, and what is done on it.
        native: rewrite a type without a K/V-head count for a stock class that has one (True), add a
            modelling file (False), or the former where possible (None).
        revision: branch, tag or commit on the Hub.
        overwrite: replace an existing result once the new one is complete.
        hash_weights: record the SHA-256 of the weight files of source and result, which means
            reading them whole. Methods that work on whole layers record that of the result in any
            case.
        command: the command line, for the provenance record.
    """

    method: str | None = None
    calibration: CalibrationOptions = field(default_factory=CalibrationOptions)
    native: bool | None = None
    revision: str | None = None
    overwrite: bool = False
    hash_weights: bool = False
    command: list[str] | None = None


def steps_per_layer(options: CalibrationOptions) -> int:
    """The gradient steps of each layer."""
    return STEPS if options.steps is None else options.steps


def steps_together(plan: Plan, options: CalibrationOptions) -> int:
    """The steps of the stage that trains all layers together, where it runs; 0 for methods that do
    not train.
    """
    if not plan.merge_method.trains:
        return 0
    return _TIMES * steps_per_layer(options) if options.kl_steps is None else options.kl_steps


def mixes(plan: Plan, options: CalibrationOptions) -> bool:
    """Whether other kinds of text are mixed into the user's."""
    reads_alone = is_encoder_decoder(plan.checkpoint.config)
    return options.mix and plan.merge_method.trains and not reads_alone


def wanted_tokens(plan: Plan, options: CalibrationOptions) -> int:
    """How many tokens the layers are fitted on: as stated, or by the source's size."""
    from .calibration.streams import calibration_tokens_for

    if options.tokens is not None:
        return options.tokens
    return calibration_tokens_for(plan.checkpoint.config)


def each_of(source: Any) -> list[Any]:
    """Each text, or folder of sound, of one or of a list."""
    is_several = isinstance(source, Sequence) and not isinstance(source, str)
    return list(source) if is_several else [source]
