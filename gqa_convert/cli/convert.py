"""`gqa-convert convert`."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import typer

from gqa_convert.errors import OptionError
from gqa_convert.merging.methods import METHOD_HELP

from .commands import on_first
from .options import (
    Budget,
    Calibration,
    CalibrationTokens,
    Device,
    Json,
    Revision,
    Source,
    command_line,
    count,
    counts,
    option,
)


def group_counts(text: str) -> int | list[int]:
    """Parse one number for all layers, a list with one for each layer, or @ and a file with a list.

    Raises:
        typer.BadParameter: the file cannot be read, or what is given is not a number or a list of
        numbers.
    """
    if not text.startswith("@"):
        listed = counts(text)
        return listed if len(listed) > 1 else listed[0]
    try:
        content = Path(text[1:]).read_text("utf-8").strip("[] \n")
    except (OSError, UnicodeDecodeError) as problem:
        raise typer.BadParameter(f"{text} cannot be read ({problem}): name a text file") from None
    return counts(re.sub(r"\s*[,\s]\s*", ",", content))


@on_first
def convert(
    source: Source,
    out: Path | None = option("OUT", "New folder for the result; it appears whole or not at all."),
    kv_heads: Any = option(
        "--kv-heads --groups -n N|N,N,...|@FILE",
        "K/V heads per layer in the result; 1 is multi-query attention. Layers of most "
        "decoders may differ: a list with one number per attention layer, or @ and a "
        "file with it.",
        parser=group_counts,
    ),
    kv_budget: Budget = None,
    method: str | None = option("--method -m NAME", METHOD_HELP),
    calibration: Calibration = None,
    calibration_tokens: CalibrationTokens = None,
    calibration_length: Any = option(
        "--calibration-length T",
        "Tokens per block of calibration text. Default: the model's context, at most 1,024.",
        parser=count,
    ),
    fit_steps: int | None = option(
        "--fit-steps S",
        "Gradient steps per layer of fit; 0 uses the closed forms only. Default: 100.",
    ),
    kl_steps: int | None = option(
        "--kl-steps S",
        "Steps of fit's last stage, which trains all layers together. Default: twice "
        "--fit-steps if the model fits in memory and lost 0.02 nats per token or more, "
        "else 0.",
    ),
    mix: bool = option(
        "--mix/--no-mix",
        "Let a quarter of a decoder's calibration text for fit be of other kinds: text "
        "that SOURCE writes itself, Python sources and made-up records.",
        True,
    ),
    device: Device = None,
    seed: int = option(
        "--seed S", "Seed for the sample of calibration text and the order of batches.", 0
    ),
    native: bool | None = option(
        "--native/--no-native",
        "For types without a K/V-head count: translate to a stock class that has one, "
        "or add a modelling file. Default: translate if possible.",
    ),
    revision: Revision = None,
    overwrite: bool = option(
        "--overwrite", "Replace an earlier result in OUT once the new one is complete.", False
    ),
    hash_weights: bool = option(
        "--hash",
        "Record the SHA-256 of the weight files of SOURCE and OUT, which reads them completely.",
        False,
    ),
    dry_run: bool = option(
        "--dry-run",
        "Write nothing: show what would change, what it would save, what it would need, "
        "and what would load the result.",
        False,
    ),
    as_json: Json = False,
) -> None:
    """Merge the K/V heads of SOURCE into N per layer, and write the result to OUT.

    With --calibration, method fit adapts the merged heads to the text, layer by layer and then all
    layers together if the model fits in memory; a quarter of a decoder's text is of other kinds,
    unless --no-mix is given. It loses least by far and needs no GPU, but uses one if there is one;
    a killed run resumes with the same command. Without --calibration, method factor measures on a
    few thousand tokens of this Python's own sources, which is quicker and loses more. Method mean
    (the GQA paper's) copies from disk to disk and usually needs uptraining afterwards.

    With --kv-budget, each layer's cost is measured on the text, and the layers that lose least are
    merged most. Of an encoder-decoder, the decoder is converted: the encoder has no cache.

      gqa-convert convert ./Llama-2-7b ./gqa8 --kv-heads 8 --calibration text.txt
      gqa-convert convert org/model ./half --kv-budget 50% --calibration text.txt
      gqa-convert convert ./Llama-2-7b --kv-heads 8 --dry-run
    """
    if out is None and not dry_run:
        raise OptionError("OUT is missing: name a folder for the result, or add --dry-run")
    if (kv_heads is None) == (kv_budget is None):
        raise OptionError(
            "give either --kv-heads, the number of K/V heads per layer, or --kv-budget, the cache "
            "to keep, which chooses them"
        )
    from gqa_convert.checkpoint.source import open_checkpoint
    from gqa_convert.conversion.estimate import estimate_needs
    from gqa_convert.conversion.options import CalibrationOptions, ConversionOptions
    from gqa_convert.conversion.planning import plan_conversion

    from .console.plan import caches_at_context, show_plan
    from .console.screen import ProgressScreen, print_json

    options = ConversionOptions(
        method=method,
        calibration=CalibrationOptions(
            source=calibration,
            tokens=calibration_tokens,
            sequence_length=calibration_length,
            seed=seed,
            steps=fit_steps,
            kl_steps=kl_steps,
            mix=mix,
            device=device,
        ),
        native=native,
        revision=revision,
        overwrite=overwrite,
        hash_weights=hash_weights,
        command=command_line(),
    )
    choice = None
    if kv_budget is not None:
        from gqa_convert.measuring.sensitivity.choosing import choose_num_kv_heads

        with ProgressScreen() as screen:
            choice = choose_num_kv_heads(
                source, kv_budget, options, out=None if dry_run else out, progress=screen.show
            )
            if choice.warning:
                screen.say(f"note: {choice.warning}")
            screen.say(
                f"note: --kv-budget {choice.stated} allows {choice.limit_kv_bytes_per_token:,} of "
                f"the {choice.source_kv_bytes_per_token:,} bytes of K/V per token; chosen is "
                f"{choice.reason}"
            )
        kv_heads = choice.kv_heads
    if out is None or dry_run:
        checkpoint = open_checkpoint(source, revision=revision)  # of a Hub id, headers alone
        plan, text = plan_conversion(checkpoint, kv_heads, options)
        needs = estimate_needs(plan, text)
        caches = caches_at_context(plan)
        printed = plan.summary() | caches | {"estimate": needs.as_json()}
        show = partial(show_plan, plan, needs, caches)
    else:
        from gqa_convert.conversion.run import convert_checkpoint

        from .console.conversion import ConversionScreen, show_conversion

        def prove_result(folder: Path) -> None:
            from gqa_convert.verify.run import prove  # imports torch, which no listed type needs

            prove(source, revision, folder)

        with ConversionScreen() as stages:
            result = convert_checkpoint(
                source,
                out,
                kv_heads,
                options,
                prove=prove_result,
                on_plan=stages.plan,
                on_layer=stages.layer,
                progress=stages.written,
            )
        printed = result.as_json()
        show = partial(show_conversion, result)
    if choice is not None:
        printed["budget"] = choice.as_json()
    if as_json:
        print_json(printed)
    else:
        show()
