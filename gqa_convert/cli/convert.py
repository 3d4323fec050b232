"""`gqa-convert convert`."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from .options import (
    Calibration,
    CalibrationTokens,
    Encoder,
    Groups,
    Json,
    Method,
    Native,
    Quiet,
    Revision,
    Seed,
    ShardSize,
    Source,
    byte_count,
)


def convert(
    source: Source,
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="Folder to make; it appears whole or not at all.", show_default=False)
    ],
    groups: Groups,
    method: Method = None,
    calibration: Calibration = None,
    calibration_tokens: CalibrationTokens = None,
    calibration_length: Annotated[
        int | None,
        typer.Option(
            "--calibration-length",
            metavar="L",
            help="Tokens of a block of it. Default: the model's context, at most 2048.",
            show_default=False,
        ),
    ] = None,
    fit_steps: Annotated[
        int | None,
        typer.Option(
            "--fit-steps",
            metavar="S",
            help="Gradient steps per layer of fit, 400 if not said; 0: closed forms only.",
            show_default=False,
        ),
    ] = None,
    kl_steps: Annotated[
        int | None,
        typer.Option(
            "--kl-steps",
            metavar="S",
            show_default=False,
            help="Steps of fit's last stage, all layers together. Default: as --fit-steps where the model fits in memory and has lost much.",
        ),
    ] = None,
    seed: Seed = 0,
    encoder: Encoder = False,
    native: Native = None,
    revision: Revision = None,
    max_shard_size: ShardSize = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an earlier result in OUT, once the new one is complete.")
    ] = False,
    hash_weights: Annotated[
        bool, typer.Option("--hash", help="Record the SHA-256 of SOURCE's and OUT's weight files; reads them whole.")
    ] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Merge the K/V heads of SOURCE into N groups and write the result to OUT.

    With calibration text every layer is fitted on it, one after the other, then all together if the model fits in
    memory, and little is lost; a GPU is used where there is one, and a killed run goes on with the same command.
    Without, heads are merged from the weights alone, one layer in memory.

      gqa-convert convert ./Llama-2-7b ./Llama-2-7b-gqa8 --groups 8 --calibration text.txt
      gqa-convert convert ./Llama-2-7b ./Llama-2-7b-gqa8 --groups 8
      gqa-convert convert org/model ./model-mqa --groups 1 --revision main
      gqa-convert convert ./flan-t5-xl ./flan-t5-xl-gqa8 --groups 8
      gqa-convert convert ./pythia-6.9b ./pythia-6.9b-gqa8 --groups 8 --no-native
      gqa-convert convert ./gqa4 ./gqa16 --groups 16

    T5's decoder is converted, its encoder only with --encoder; the result loads with trust_remote_code=True. Pythia
    becomes a stock phi unless --no-native keeps it a GPT-NeoX. The last one repeats heads exactly, for tensor
    parallelism. --method mean is what the GQA paper does; mean, first and random stream from disk to disk.
    """
    from contextlib import ExitStack

    from gqa_convert.cli.console.plan import show_conversion
    from gqa_convert.cli.console.progress import byte_progress, layer_progress
    from gqa_convert.cli.console.screen import print_json
    from gqa_convert.conversion.run import convert_checkpoint

    with ExitStack() as stack:
        layers = stack.enter_context(layer_progress(quiet=quiet))
        bar: list[Any] = []

        def begin(made: Any) -> None:
            bar.append(stack.enter_context(byte_progress("converting", made.weight_bytes_after, quiet=quiet)))

        result = convert_checkpoint(
            source,
            out,
            groups,
            method=method,
            calibration=calibration,
            calibration_tokens=calibration_tokens,
            calibration_length=calibration_length,
            fit_steps=fit_steps,
            kl_steps=kl_steps,
            seed=seed,
            encoder=encoder,
            native=native,
            revision=revision,
            overwrite=overwrite,
            hash_weights=hash_weights,
            on_layer=layers,
            max_shard_size=byte_count(max_shard_size, "--max-shard-size"),
            command=["gqa-convert", *sys.argv[1:]],
            on_plan=begin,
            progress=lambda nbytes: bar[0](nbytes),
        )
    if as_json:
        print_json(result)
    elif not quiet:
        show_conversion(result)
