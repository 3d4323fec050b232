"""The options of calibration: their defaults, their checks, and the text that they name."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gqa_convert.checkpoint.devices import chosen_device
from gqa_convert.conversion.plan import Plan
from gqa_convert.errors import OptionError
from gqa_convert.families.context_length import reachable_context, stated_positions
from gqa_convert.families.loading import check_language_model
from gqa_convert.families.wrappers import decoder_config
from gqa_convert.merging.methods import CHOICES, DEFAULT, METHODS, Need, names


@dataclass(frozen=True, slots=True)
class CalibrationOptions:
    """The options of calibration, as the user gave them."""

    source: Any = None
    """A file, a folder, a pattern, the id of a Hub dataset or a recipe's `data` entry, or a list of these; None for no
    calibration.
    """
    tokens: int | None = None
    """How much text; by default from the model's hidden_size."""
    sequence_length: int | None = None
    """Tokens of a block; by default the model's context up to 1024."""
    seed: int = 0
    """Of the choice of blocks, and of their order in the gradient stages."""
    steps: int | None = None
    """Of each layer's gradient stage, for `fit`; 0 for closed forms only."""
    kl_steps: int | None = None
    """Of the stage that trains all layers together, for `fit`; by default twice as many as `steps` where the model is
    small enough.
    """
    kl_rank: int | None = None
    """Of that stage's changes of query and output projections; 0 trains these as they are, which is the default where
    memory allows.
    """
    context: int | None = None
    """The position up to which blocks are stretched; by default what `families.context_length.reachable_context` says."""
    device: str | None = None
    """To run the source on, such as `cpu` or `cuda:1`; by default a GPU if there is one."""


def check_calibration(method: str, calibration: CalibrationOptions) -> None:
    """Refuse options that contradict each other.

    Raises:
        OptionError: `fit` without text, text for a method that reads none, a count or a device without text, or a device that
            is not there.
    """
    needs = METHODS[method]
    training_options = (
        ("--fit-steps", calibration.steps),
        ("--kl-steps", calibration.kl_steps),
        ("--kl-rank", calibration.kl_rank),
    )
    if calibration.source is None:
        if needs.calibration is Need.REQUIRED:
            raise OptionError(
                f"--method {method} needs calibration text: name a text file or dataset with --calibration, or choose --method {DEFAULT.name}"
            )
        for option, value in training_options:
            if value is not None:
                raise OptionError(
                    f"{option} {value} needs calibration text: name a text file or dataset with --calibration"
                )
        if calibration.tokens is not None:
            raise OptionError(
                f"--calibration-tokens {calibration.tokens} without text: name a text file or dataset with --calibration"
            )
        if calibration.context is not None:
            raise OptionError(
                f"--calibration-context {calibration.context} without text: name a text file or dataset with --calibration"
            )
        if calibration.device is not None:
            raise OptionError(
                f"--device {calibration.device} needs calibration text, on which the source runs: name a text file or dataset with --calibration"
            )
    elif needs.calibration is Need.NEVER:
        measuring = names(tuple(each for each in CHOICES if each.calibration is not Need.NEVER))
        raise OptionError(
            f"--calibration is of no use to --method {method}: leave it out, or choose one of {measuring}"
        )
    for option, value in training_options:
        if value is not None and (not needs.trains or value < 0):
            training = names(tuple(each for each in CHOICES if each.trains))
            raise OptionError(f"{option} {value} with --method {method}: only {training} takes it, 0 or more")
    if calibration.kl_rank is not None and not steps_together(calibration):
        raise OptionError(
            f"--kl-rank {calibration.kl_rank} is for the last stage, which takes no steps here: leave it out, or name a number with --kl-steps"
        )
    if calibration.device is not None:
        chosen_device(calibration.device)


def check_predicts(
    plan: Plan, calibration: CalibrationOptions, advice: str = "choose --method factor without --calibration"
) -> None:
    """Refuse text for a source that was saved without its language-model head, or that text runs only in part.

    Raises:
        NoLanguageModelError: it has no head.
        OptionError: it has cross-attention that only images run.
    """
    if calibration.source is not None:
        if plan.family.reads_images_alone:
            raise OptionError(
                f"--calibration runs the source on text, and the cross-attention of a {plan.family.model_type} runs on images alone: "
                "choose --method factor without --calibration"
            )
        check_language_model(
            plan.checkpoint.source_id, plan.checkpoint.config, f"calibration compares its predictions; {advice}"
        )


def steps_per_layer(options: CalibrationOptions) -> int:
    """The gradient steps of each layer."""
    return STEPS if options.steps is None else options.steps


def steps_together(options: CalibrationOptions) -> int:
    """The steps of the stage that trains all layers together, where it runs."""
    return _TIMES * steps_per_layer(options) if options.kl_steps is None else options.kl_steps


def calibrate(
    plan: Plan,
    options: CalibrationOptions,
    progress: Callable[[str, int, int], None] = lambda label, done, total: None,
) -> Any:
    """The batches of calibration text for a plan's source, a `Calibration`.

    Args:
        plan: of the conversion.
        options: as the user gave them; `self` as a text is generated by the source.
        progress: called with a label, the tokens that are generated and their number.

    Raises:
        OptionError: the model's encoder reads no text, or transformers has no class for the model.
        DataError: the text or the tokenizer can't be read.
    """
    from gqa_convert.text.calibration import calibration_batches, calibration_tokens_for

    if not plan.family.native and plan.family.modeling is None:
        raise OptionError(
            f"calibration runs the source, and transformers has no class of type {plan.family.model_type}: "
            "choose --method factor without --calibration"
        )
    folder = plan.checkpoint.folder
    assert folder is not None
    tokens = calibration_tokens_for(plan.checkpoint.config) if options.tokens is None else options.tokens
    trains = METHODS[plan.method].trains
    held_out = max(BATCH_TOKENS, tokens // HELD_OUT) if trains else 0
    return calibration_batches(
        Path(folder),
        _with_own_text(Path(folder), options, tokens + held_out, progress),
        tokens,
        seed=options.seed,
        sequence_length=options.sequence_length,
        batch_tokens=BATCH_TOKENS,
        held_out_tokens=held_out,
        fresh_tokens=BATCH_TOKENS * steps_together(options) if trains else 0,
        context=_context(plan, options),
    )


def _with_own_text(
    folder: Path, options: CalibrationOptions, tokens: int, progress: Callable[[str, int, int], None]
) -> Any:
    """The texts of the options, in which the source has written what `self` stands for."""
    from gqa_convert.text.own_text import is_self, own_text
    from gqa_convert.text.token_files import default_cache

    source = options.source
    texts = list(source) if isinstance(source, Sequence) and not isinstance(source, str) else [source]
    if not any(map(is_self, texts)):
        return source
    # encoding the text again can take fewer tokens than its sampling gave, and the last text of a block is cut
    own = own_text(
        folder,
        default_cache(),
        tokens=tokens + tokens // _SPARE,
        seed=options.seed,
        device=chosen_device(options.device),
        progress=progress,
    )
    return [own if is_self(text) else text for text in texts]


def _context(plan: Plan, options: CalibrationOptions) -> int | None:
    """The position up to which blocks of text are stretched; None for models whose positions can't skip."""
    config, stated = decoder_config(plan.checkpoint.config), options.context
    layer = plan.layers[0]
    from gqa_convert.merging.absorption_limits import rotary_pairs  # imports numpy

    rotary = len(rotary_pairs(plan.family, config, layer.key_head_dim)[0]) > 0
    most = reachable_context(config) if rotary and layer.attention_kind == "decoder" else None
    if stated is None:
        return most
    if stated < 2:
        raise OptionError(f"--calibration-context is {stated}, expected at least 2")
    if most is None:
        raise OptionError(
            f"--calibration-context {stated} needs rotary positions over a context that config.json states, and this {plan.family.model_type} has none: leave it out"
        )
    positions = stated_positions(config)
    if positions is not None and stated > positions:
        raise OptionError(f"--calibration-context is {stated}, and the model has positions for {positions}: lower it")
    return stated


_SPARE = 8
"""One in so many tokens of the model's own text is spare."""
STEPS = 100
"""The default of `--fit-steps`."""
_TIMES = 2
"""By default, all layers together take this many times the steps of each layer."""
BATCH_TOKENS = 2048
LOW_FREQUENCY_TOKENS = 8192
"""How many tokens, at most, decide which rotary pairs of a layer count as low-frequency."""
KEPT_BYTES = 4 * 6
"""What waits between layers per token and unit of hidden_size: the residual stream and attention's input, of source and
student, and two targets, in float32.
"""
HELD_OUT = 8
"""Times as many tokens are fitted on as the last stage of `fit` is judged by."""
