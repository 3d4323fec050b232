"""`gqa-convert evaluate`."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from gqa_convert.errors import OptionError

from .options import Device, Json, command_line, count, counts, option, refuse


def evaluate(
    models: Annotated[
        list[str],
        option(
            "MODEL...",
            "Checkpoint folders or Hub ids.",
        ),
    ],
    data: Annotated[
        str | None,
        option(
            "--data -d TEXT",
            "Held-out text to score: a file, a folder, a glob pattern or a Hub dataset.",
        ),
    ] = None,
    reference: Annotated[
        str | None,
        option(
            "--reference MODEL",
            "Model to compare with, by KL divergence too. Default: the first, by loss.",
        ),
    ] = None,
    tokens: Annotated[
        Any,
        option(
            "--tokens T",
            "Most tokens to score. Default: all; 1M of a Hub dataset.",
            parser=count,
        ),
    ] = None,
    window: Annotated[
        Any,
        option(
            "--window T",
            "Tokens read at once. Default: the model's positions, at most 2k.",
            parser=count,
        ),
    ] = None,
    batch: Annotated[int, option("--batch B", "Windows scored at once.", min=1)] = 4,
    retrieval: Annotated[
        bool,
        option(
            "--retrieval",
            "Ask causal models for facts in long texts.",
        ),
    ] = False,
    lengths: Annotated[
        Any,
        option(
            "--lengths T,T,...",
            "Tokens of the texts of --retrieval. Default: 512, 1024, 2048 and 4096 within the context.",
            parser=counts,
        ),
    ] = None,
    questions: Annotated[
        int | None,
        option(
            "--questions N",
            "Questions of each kind at each length of --retrieval. Default: 24.",
            min=1,
        ),
    ] = None,
    device: Device = None,
    output: Annotated[
        Path | None,
        option(
            "--output -o FILE.json",
            "New file for the results as JSON.",
        ),
    ] = None,
    as_json: Json = False,
    dtype: Annotated[
        str,
        option(
            "--dtype TYPE",
            "float32, bfloat16, float16 or auto: float32 on a CPU, else the checkpoint's.",
            hidden=True,
        ),
    ] = "auto",
    seed: Annotated[
        int | None,
        option(
            "--seed S",
            "Seed of the texts of --retrieval. Default: 0.",
            hidden=True,
        ),
    ] = None,
    revision: Annotated[
        str | None,
        option(
            "--revision REV",
            "Branch, tag or commit of models on the Hub. Default: main.",
            hidden=True,
        ),
    ] = None,
    text_field: Annotated[
        str,
        option(
            "--text-field NAME",
            "Field with the text, in JSON lines, Parquet and datasets.",
            hidden=True,
        ),
    ] = "text",
    source_field: Annotated[
        str | None,
        option(
            "--source-field NAME",
            "Field with the input of an encoder-decoder, to score pairs.",
            hidden=True,
        ),
    ] = None,
    target_field: Annotated[
        str | None,
        option(
            "--target-field NAME",
            "Field with what an encoder-decoder should write.",
            hidden=True,
        ),
    ] = None,
    data_split: Annotated[
        str,
        option(
            "--data-split NAME",
            "Split of a Hub dataset.",
            hidden=True,
        ),
    ] = "train",
    data_name: Annotated[
        str | None,
        option(
            "--data-name NAME",
            "Configuration of a Hub dataset.",
            hidden=True,
        ),
    ] = None,
) -> None:
    """Measure the loss of one or more models on the same text, in nats per token and bits per byte.

    Several models are compared with the first one, or with --reference, by paired differences with standard errors;
    --reference adds the KL divergence. Encoder-decoders are scored on
    span corruption or on pairs of texts. The exit code is 1 if a loss is not finite.

    Examples:

      gqa-convert evaluate ./Llama-2-7b ./gqa8 --data test.txt
      gqa-convert evaluate ./gqa8 --reference ./Llama-2-7b --data test.txt -o gqa8.json
    """
    from gqa_convert.cli.console.progress import ProgressScreen
    from gqa_convert.cli.console.screen import print_json, print_note
    from gqa_convert.cli.console.tables import show_table
    from gqa_convert.data.sources import as_source
    from gqa_convert.measuring.results import AskedQuestions, check_result_path, write_result
    from gqa_convert.measuring.tables import evaluation_tables, notes, short_names

    if data is None and not retrieval:
        raise OptionError("--data is missing: name the text to score, or ask for facts with --retrieval")
    if not retrieval:
        refuse({"--lengths": lengths, "--questions": questions, "--seed": seed}, "belongs to --retrieval")
    if output is not None:
        check_result_path(output)
    from gqa_convert.measuring.evaluation import run
    from gqa_convert.measuring.evaluation.retrieval import QUESTIONS

    asked = None
    if retrieval:
        asked = AskedQuestions(lengths=lengths or [], questions=questions or QUESTIONS, seed=seed or 0)
    options = run.EvaluationOptions(reference, revision, window, tokens, batch, dtype, device, asked)
    text = None
    if data is not None:
        fields = {"text_field": text_field, "source_field": source_field, "target_field": target_field}
        text = as_source({"source": data, "split": data_split, "name": data_name, **fields})
    with ProgressScreen() as screen:
        results = run.evaluate(models, text, options, command=command_line(), progress=screen.show)
    if output is not None:
        write_result(output, results)
    entries = results.entries()
    if as_json:
        print_json(results.as_json())
    else:
        names = short_names(entries)
        for table in evaluation_tables(results, entries, names):
            show_table(table.rows, table.title)
        for note in notes(entries, names):
            print_note(note)
    failed = ", ".join(each.model for each in entries if each.scored_nan)
    if failed:
        sys.stderr.write(f"gqa-convert: NaN or infinite loss of {failed}: see scored_nan in the JSON results\n")
        raise typer.Exit(1)
