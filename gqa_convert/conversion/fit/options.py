"""The options of calibration: their defaults and their checks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gqa_convert.checkpoint.devices import chosen_device
from gqa_convert.conversion.plan import Plan
from gqa_convert.errors import OptionError
from gqa_convert.families.loading import check_language_model, hears, is_encoder_decoder
from gqa_convert.merging.methods import CHOICES, DEFAULT, METHODS, names

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
        source: the text: a file, a folder, a pattern, the id of a Hub dataset or a recipe's `data` entry, or a list of
            these; None for no text.
        tokens: how many tokens the layers are fitted on; by default from the model's hidden_size.
        sequence_length: tokens of a block of text; by default the model's context up to 1024.
        seed: of the choice of blocks, and of their order in the gradient stages.
        steps: of each layer's gradient stage, for `fit`; 0 for closed forms only.
        kl_steps: of the stage that trains all layers together, for `fit`; by default twice as many as `steps` where the
            model is small enough.
        device: to run the source on, such as `cpu` or `cuda:1`; by default a GPU if there is one.
        mix: for `fit` of a decoder: let other kinds of text be a quarter of the blocks, see `mixed_text`.
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


def steps_per_layer(options: CalibrationOptions) -> int:
    """The gradient steps of each layer."""
    return STEPS if options.steps is None else options.steps


def steps_together(plan: Plan, options: CalibrationOptions) -> int:
    """The steps of the stage that trains all layers together, where it runs; 0 for methods that do not train."""
    if not plan.merge_method.trains:
        return 0
    return _TIMES * steps_per_layer(options) if options.kl_steps is None else options.kl_steps


def mixes(plan: Plan, options: CalibrationOptions) -> bool:
    """Whether other kinds of text are mixed into the user's."""
    return (
        options.mix and plan.merge_method.trains and not is_encoder_decoder(plan.checkpoint.config)
    )


def wanted_tokens(plan: Plan, options: CalibrationOptions) -> int:
    """How many tokens the layers are fitted on: as stated, or by the source's size."""
    from gqa_convert.conversion.calibration.text import calibration_tokens_for

    if options.tokens is not None:
        return options.tokens
    if hears(plan.checkpoint.config):
        from gqa_convert.data.speech import speech_tokens_for

        return speech_tokens_for(plan.checkpoint.config)
    return calibration_tokens_for(plan.checkpoint.config)


def each_of(source: Any) -> list[Any]:
    """Each text, or folder of sound, of one or of a list."""
    return (
        list(source) if isinstance(source, Sequence) and not isinstance(source, str) else [source]
    )


def check_calibration(method: str, options: CalibrationOptions) -> None:
    """Refuse options that contradict each other.

    Raises:
        OptionError: `fit` without text, text for a method that reads none, an option of calibration without text, or a
            device that is not there.
    """
    wanted = METHODS[method]
    training = {"--fit-steps": options.steps, "--kl-steps": options.kl_steps}
    if not options.has_data:
        if wanted.text == "required":
            raise OptionError(
                f"--method {method} needs calibration text: name a text file or dataset with --calibration, or choose --method {DEFAULT.name}"
            )
        unread = training | {
            "--calibration-tokens": options.tokens,
            "--calibration-length": options.sequence_length,
            "--device": options.device,
        }
        problem = "needs calibration text: name a text file or dataset with --calibration"
        if wanted.text == "never":
            problem = f"is of no use to --method {method}: leave it out"
        for option, value in unread.items():
            if value is not None:
                raise OptionError(f"{option} {value} {problem}")
    elif wanted.text == "never":
        measuring = names(each for each in CHOICES if each.text != "never")
        raise OptionError(
            f"--calibration is of no use to --method {method}: leave it out, or choose one of {measuring}"
        )
    for option, value in training.items():
        if value is not None and not wanted.trains:
            able = names(each for each in CHOICES if each.trains)
            raise OptionError(f"{option} {value} with --method {method}: only {able} takes it")
        if value is not None and value < 0:
            raise OptionError(f"{option} is {value}, expected 0 or more")
    if not options.mix and not wanted.trains:
        raise OptionError(
            f"--no-mix with --method {method}: nothing is mixed into its text, leave the option out"
        )
    if options.tokens is not None and options.tokens < 1:
        raise OptionError(f"--calibration-tokens is {options.tokens}, expected a number above 0")
    if options.device is not None:
        chosen_device(options.device)


def check_predicts(
    plan: Plan,
    options: CalibrationOptions,
    advice: str = "choose --method factor without --calibration",
) -> None:
    """Refuse calibration of a source that transformers cannot run as a language model, or that text runs only in part, and
    local text that is not there.

    Raises:
        DataError: there is no such file or folder.
        NoLanguageModelError: it was saved without its language-model head.
        OptionError: transformers has no class for it, or it has cross-attention that only images run.
    """
    if not options.has_data:
        return
    if not hears(plan.checkpoint.config):
        from gqa_convert.data.sources import as_source, is_on_hub, is_self, open_source

        for text in each_of(options.source):
            if not is_self(text) and not is_on_hub(as_source(text)):
                open_source(as_source(text))
    if plan.family.reads_images_alone:
        raise OptionError(
            f"--calibration runs the source on text, and the cross-attention of a {plan.family.model_type} runs on images alone: "
            "choose --method factor without --calibration"
        )
    check_language_model(
        plan.checkpoint.source_id,
        plan.checkpoint.config,
        f"calibration compares its predictions; {advice}",
    )
    if not plan.family.native and plan.family.modeling is None:
        raise OptionError(
            f"calibration runs the source, and transformers has no class of type {plan.family.model_type}: {advice}"
        )
