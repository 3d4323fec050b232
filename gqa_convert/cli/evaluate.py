"""`gqa-convert evaluate`."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from gqa_convert.errors import OptionError

from .options import Json, Quiet, Revision


def evaluate(
    models: Annotated[
        list[str], typer.Argument(metavar="MODEL...", help="Checkpoint folders or Hub ids.", show_default=False)
    ],
    data: Annotated[
        str,
        typer.Option(
            "--data",
            "-d",
            metavar="TEXT",
            help="Held-out text to score: a file, a folder, a glob pattern or a Hub dataset.",
            show_default=False,
        ),
    ],
    reference: Annotated[
        str | None,
        typer.Option(
            "--reference",
            metavar="MODEL",
            help="Model to compare with, in loss and in predicted distributions. Default: the first MODEL, in loss only.",
            show_default=False,
        ),
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            "--tokens",
            metavar="T",
            help="Largest number of tokens to score. Default: all of a file, 1,048,576 of a Hub dataset.",
            show_default=False,
        ),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(
            "--context",
            metavar="C",
            help="Tokens per window. Default: the model's context, at most 2,048.",
            show_default=False,
        ),
    ] = None,
    stride: Annotated[
        int | None,
        typer.Option(
            "--stride",
            metavar="S",
            help="Tokens between the starts of windows. Default: the context. Half of it gives every token more context, at twice the time.",
            show_default=False,
        ),
    ] = None,
    batch: Annotated[int, typer.Option("--batch", metavar="B", help="Windows scored at once.")] = 4,
    dtype: Annotated[
        str,
        typer.Option(
            "--dtype",
            metavar="TYPE",
            help="auto (float32 on a CPU, the checkpoint's on a GPU), float32, bfloat16 or float16.",
        ),
    ] = "auto",
    device: Annotated[
        str | None,
        typer.Option(
            "--device", metavar="NAME", help="cpu, cuda or cuda:1. Default: a GPU if there is one.", show_default=False
        ),
    ] = None,
    text_field: Annotated[
        str,
        typer.Option(
            "--text-field", metavar="NAME", help="Field with the text, in JSON lines, Parquet files and datasets."
        ),
    ] = "text",
    source_field: Annotated[
        str | None,
        typer.Option(
            "--source-field",
            metavar="NAME",
            help="Field with the input of an encoder-decoder, to score pairs.",
            show_default=False,
        ),
    ] = None,
    target_field: Annotated[
        str | None,
        typer.Option(
            "--target-field",
            metavar="NAME",
            help="Field with the output that an encoder-decoder should write.",
            show_default=False,
        ),
    ] = None,
    data_split: Annotated[str, typer.Option("--data-split", metavar="NAME", help="Split of a Hub dataset.")] = "train",
    data_name: Annotated[
        str | None,
        typer.Option("--data-name", metavar="NAME", help="Configuration of a Hub dataset.", show_default=False),
    ] = None,
    data_revision: Annotated[
        str | None,
        typer.Option(
            "--data-revision", metavar="REV", help="Branch, tag or commit of a Hub dataset.", show_default=False
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE.json", help="File for the results as JSON.", show_default=False),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace earlier results in the file of --output.")
    ] = False,
    revision: Revision = None,
    seed: Annotated[int, typer.Option("--seed", metavar="S", help="Seed for span corruption.")] = 0,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure the loss of one or more models on the same text, in nats per token and bits per byte.

    Several models are compared with the first one, or with --reference,
    by paired differences with standard errors; --reference adds the KL divergence and how often both models predict the
    same token. Encoder-decoders are scored on span corruption or on pairs of texts. The exit code
    is 1 if a loss is not finite.

    Examples:

      gqa-convert evaluate ./Llama-2-7b ./Llama-2-7b-gqa8 --data test.txt
      gqa-convert evaluate ./Llama-2-7b-gqa8 --reference ./Llama-2-7b --data test.jsonl --stride 1024 -o results.json
      gqa-convert evaluate ./bart-gqa4 --data pairs.jsonl --source-field article --target-field summary
      torchrun --nproc_per_node 8 -m gqa_convert evaluate ./Llama-2-7b-gqa8 --data test.txt
    """
    from gqa_convert.cli.console.evaluation import show_evaluation
    from gqa_convert.cli.console.progress import stage_progress
    from gqa_convert.cli.console.screen import print_json
    from gqa_convert.measuring.evaluate.run import Settings, failed
    from gqa_convert.measuring.evaluate.run import evaluate as run
    from gqa_convert.text.sources import Source

    if (source_field is None) != (target_field is None):
        raise OptionError("--source-field and --target-field need each other: give both or neither")
    pairs = None if source_field is None or target_field is None else (source_field, target_field)
    settings = Settings(context, stride, tokens, batch, dtype, device, seed, pairs)
    text = Source(data, text_field=text_field, split=data_split, name=data_name, revision=data_revision)
    with stage_progress(quiet=quiet) as step:
        results = run(
            models,
            text,
            settings,
            reference=reference,
            revision=revision,
            output=output,
            overwrite=overwrite,
            command=["gqa-convert", *sys.argv[1:]],
            progress=step,
        )
    if results is None:  # only the main process has the results
        return
    if as_json:
        print_json(results.as_json())
    elif not quiet:
        show_evaluation(results, output)
    if broken := failed(results):
        sys.stderr.write(
            f"gqa-convert: NaN or infinite loss of {', '.join(broken)}: see scored_nan in the JSON results\n"
        )
        raise typer.Exit(1)
