"""Prepares the batches that the source runs on: opens what the user named, and draws from it."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from gqa_convert.conversion.options import (
    BATCH_TOKENS,
    CalibrationOptions,
    each_of,
    mixes,
    wanted_tokens,
)
from gqa_convert.conversion.plan import Plan
from gqa_convert.conversion.progress import LISTENING, OWN_TEXT
from gqa_convert.conversion.resources import Decisions, decide
from gqa_convert.errors import DataError, OptionError
from gqa_convert.families.composite import decoder_config
from gqa_convert.families.context_length import reachable_context
from gqa_convert.families.loading import hears
from gqa_convert.runtime.machine import chosen_device
from gqa_convert.runtime.paths import local_path

from .streams import Calibration, Request

_HELD_OUT = 8
"""Times as many tokens are fitted on as the result is measured on."""

Progress = Callable[[str, int, int], None]
"""Called with a label of `progress`, the tokens that are there and their number."""


def prepare_calibration(
    plan: Plan,
    options: CalibrationOptions,
    progress: Progress = lambda label, done, total: None,
    decisions: Decisions | None = None,
) -> Calibration:
    """The batches that a plan's source is to run on.

    Args:
        plan: of the conversion.
        options: as the user gave them: a file, a folder, a pattern, the id of a Hub dataset or
            `python-stdlib`, of text or, rendered by the chat template, of conversations in rows
            with `messages`; or, as in a recipe's `data`, a mapping with further keys such as
            `text_field` and `split`, whose weight is ignored; or `self` for what the source writes;
            or a list of these. For a model that hears, a folder of sound.
        progress: called while that text is generated, or sound is heard.
        decisions: of the run that began the conversion; None to decide now.

    Raises:
        OptionError: a number is out of range, or the model's encoder reads no text.
        DataError: the text, the tokenizer or a sound can't be read.
    """
    from gqa_convert.data.sources import is_self

    from .own_text import OwnWriter
    from .pairs import draw_pairs, find_pairs
    from .text import draw_text
    from .texts import open_text

    decisions = decisions or decide(plan, options)
    request = _request(plan, options, decisions)
    if hears(plan.checkpoint.config):
        return _hear(request, plan, options, partial(progress, LISTENING))

    # What does not exist is refused before anything is read.
    given = each_of(options.source)
    if not given:
        raise DataError(
            "the list of calibration texts is empty: "
            "name a file, a folder, a pattern or a dataset on the Hub"
        )
    sources = [None if is_self(each) else open_text(each) for each in given]

    # An encoder-decoder takes pairs where the sources hold some.
    device = chosen_device(options.device)
    writer = OwnWriter(plan.checkpoint, device, options.seed, partial(progress, OWN_TEXT))
    pairs = find_pairs(request, sources, writer)
    if pairs:
        return draw_pairs(request, pairs)
    writes = not decisions.no_own_text
    return draw_text(request, sources, writer, mixes=mixes(plan, options), mixes_own=writes)


def _request(plan: Plan, options: CalibrationOptions, decisions: Decisions) -> Request:
    """How many tokens a plan takes, and how far positions may skip in its decoder."""
    from gqa_convert.families.rotary import rotary_pairs

    config = plan.checkpoint.config
    tokens = wanted_tokens(plan, options)
    held_out = tokens // _HELD_OUT
    fresh = BATCH_TOKENS * decisions.last_stage_steps(plan, options)
    if hears(config):
        fresh = tokens if fresh else 0
    elif plan.merge_method.trains:
        held_out = max(BATCH_TOKENS, held_out)

    decoder = decoder_config(config)
    layer = plan.layers[0]
    turning, _ = rotary_pairs(plan.family, decoder, layer.key_head_dim)
    can_skip = len(turning) and layer.attention_kind == "decoder"
    context = reachable_context(decoder) if can_skip else None
    folder = plan.checkpoint.local_folder
    length = options.sequence_length
    return Request(folder, tokens, held_out, fresh, options.seed, length, context)


def _hear(
    request: Request, plan: Plan, options: CalibrationOptions, progress: Callable[[int, int], None]
) -> Calibration:
    """Batches of a folder of sound, which the source's encoder hears once.

    Raises:
        OptionError: an option that is for text alone.
        DataError: no folder of sound, or a file that can't be read.
    """
    from gqa_convert.conversion.layers.model_loading import open_model
    from gqa_convert.data.speech import SpeechModel, list_audio_files

    from .speech import draw_speech

    name = plan.checkpoint.source_id
    sources = each_of(options.source)
    if options.sequence_length is not None:
        raise OptionError(f"--calibration-length is for text, and {name} hears: leave it out")
    if len(sources) != 1 or not isinstance(sources[0], str | Path):
        raise OptionError(f"{name} hears: --calibration names one folder of audio files")
    files = list_audio_files(local_path(sources[0]))
    model = open_model(request.folder, device=chosen_device(options.device))
    speech = SpeechModel(model, request.folder)
    return draw_speech(request, str(sources[0]), files, speech, progress)
