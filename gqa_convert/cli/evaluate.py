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
        str | None,
        typer.Option(
            "--data",
            "-d",
            metavar="TEXT",
            help="Text file, folder, pattern or Hub dataset to score.",
            show_default=False,
        ),
    ] = None,
    reference: Annotated[
        str | None,
        typer.Option(
            "--reference",
            metavar="MODEL",
            help="Also compare distributions with this one's, and losses with its.",
            show_default=False,
        ),
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            "--tokens",
            metavar="T",
            help="Of the text (or pairs), at most. Default: all; 1,048,576 of a Hub dataset.",
            show_default=False,
        ),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(
            "--context", metavar="C", help="Tokens per window. Default: the model's, up to 2048.", show_default=False
        ),
    ] = None,
    stride: Annotated[
        int | None,
        typer.Option(
            "--stride",
            metavar="S",
            help="Tokens between windows. Default: the context; half is slower, and fairer.",
            show_default=False,
        ),
    ] = None,
    batch: Annotated[int, typer.Option("--batch", metavar="B", help="Windows at a time.")] = 4,
    dtype: Annotated[
        str,
        typer.Option(
            "--dtype", help="auto (float32 on a CPU, else the checkpoint's own), float32, bfloat16 or float16."
        ),
    ] = "auto",
    device: Annotated[
        str | None,
        typer.Option("--device", help="cpu, cuda or cuda:1. Default: a GPU if there is one.", show_default=False),
    ] = None,
    text_field: Annotated[
        str, typer.Option("--text-field", metavar="NAME", help="Of JSON lines, Parquet and datasets.")
    ] = "text",
    source_field: Annotated[
        str | None,
        typer.Option("--source-field", metavar="NAME", help="For encoder-decoders: what is read.", show_default=False),
    ] = None,
    target_field: Annotated[
        str | None,
        typer.Option(
            "--target-field", metavar="NAME", help="For encoder-decoders: what is to be written.", show_default=False
        ),
    ] = None,
    source_language: Annotated[
        str | None,
        typer.Option(
            "--source-language",
            metavar="CODE",
            help="Of pairs, where the tokenizer marks languages.",
            show_default=False,
        ),
    ] = None,
    target_language: Annotated[
        str | None,
        typer.Option("--target-language", metavar="CODE", help="Of what is to be written.", show_default=False),
    ] = None,
    data_split: Annotated[str, typer.Option("--data-split", metavar="NAME", help="Of a Hub dataset.")] = "train",
    data_name: Annotated[
        str | None,
        typer.Option("--data-name", metavar="NAME", help="A Hub dataset's configuration.", show_default=False),
    ] = None,
    data_revision: Annotated[
        str | None, typer.Option("--data-revision", help="Of a Hub dataset.", show_default=False)
    ] = None,
    tasks: Annotated[
        str | None, typer.Option("--tasks", metavar="NAME,...", help="Also run these of lm-eval.", show_default=False)
    ] = None,
    tasks_folder: Annotated[
        Path | None,
        typer.Option("--tasks-folder", metavar="DIR", help="With YAML files of further tasks.", show_default=False),
    ] = None,
    fewshot: Annotated[
        int | None, typer.Option("--fewshot", metavar="K", help="Examples per question.", show_default=False)
    ] = None,
    task_limit: Annotated[
        int | None, typer.Option("--task-limit", metavar="Q", help="Questions per task, at most.", show_default=False)
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE.json", help="Write the results here too.", show_default=False),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace earlier results in FILE.json.")] = False,
    revision: Revision = None,
    seed: Annotated[int, typer.Option("--seed", help="Of span corruption and of lm-eval.")] = 0,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure the loss of models on the same text: nats per token, perplexity, bits per byte. Exit code 1 if a loss is
    no number.

    Several models are compared with the first, or with --reference: paired differences and their standard errors, and
    for the reference the divergence KL and how often both find the same token likeliest. Encoder-decoders are scored on
    span corruption, or on pairs of texts. lm-eval's tasks need [bold]pip install 'gqa-convert\\[tasks]'[/bold]. See
    docs/evaluating.md.

      gqa-convert evaluate ./Llama-2-7b ./Llama-2-7b-gqa8 --data test.txt

      gqa-convert evaluate ./Llama-2-7b-gqa8 --reference ./Llama-2-7b --data test.jsonl --stride 1024 -o results.json

      gqa-convert evaluate ./bart-gqa4 --data pairs.jsonl --source-field article --target-field summary

      gqa-convert evaluate ./Llama-2-7b-gqa8 --tasks arc_easy,hellaswag --task-limit 500

      torchrun --nproc_per_node 8 -m gqa_convert evaluate ./Llama-2-7b-gqa8 --data test.txt
    """
    from gqa_convert.cli.console.evaluation import show_evaluation
    from gqa_convert.cli.console.progress import stage_progress
    from gqa_convert.cli.console.screen import print_json
    from gqa_convert.measuring.evaluate.run import Settings, failed
    from gqa_convert.measuring.evaluate.run import evaluate as run
    from gqa_convert.measuring.evaluate.tasks import Tasks
    from gqa_convert.text.sources import Source

    if (source_field is None) != (target_field is None):
        raise OptionError("--source-field and --target-field go together: name both, or neither")
    if (source_language is None) != (target_language is None):
        raise OptionError("--source-language and --target-language go together: name both, or neither")
    if source_language is not None and source_field is None:
        raise OptionError(
            "--source-language and --target-language are for pairs: name --source-field and --target-field too"
        )
    if tasks is None and (tasks_folder or fewshot is not None or task_limit is not None):
        raise OptionError("--tasks-folder, --fewshot and --task-limit are for lm-eval: name its tasks with --tasks")
    pairs = None if source_field is None or target_field is None else (source_field, target_field)
    settings = Settings(context, stride, tokens, batch, dtype, device, seed, pairs, (source_language, target_language))
    text = (
        None
        if data is None
        else Source(data, text_field=text_field, split=data_split, name=data_name, revision=data_revision)
    )
    wanted = (
        None if tasks is None else Tasks([name.strip() for name in tasks.split(",")], tasks_folder, fewshot, task_limit)
    )
    with stage_progress(quiet=quiet) as step:
        results = run(
            models,
            text,
            settings,
            reference=reference,
            revision=revision,
            tasks=wanted,
            output=output,
            overwrite=overwrite,
            command=["gqa-convert", *sys.argv[1:]],
            progress=step,
        )
    if not results:  # another process of the launch has them
        return
    if as_json:
        print_json(results)
    elif not quiet:
        show_evaluation(results, output)
    if broken := failed(results):
        sys.stderr.write(f"gqa-convert: NaN or infinite losses: {', '.join(broken)} can't be scored, see scored_nan\n")
        raise typer.Exit(1)
