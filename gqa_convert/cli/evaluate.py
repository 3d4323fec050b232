"""`gqa-convert evaluate`."""

import sys
from pathlib import Path
from typing import Any

import typer

from gqa_convert.errors import OptionError

from .options import Device, Json, command_line, count, counts, option, refuse


def evaluate(
    models: list[str] = option("MODEL...", "Checkpoint folders or Hub ids.", ...),
    data: str | None = option(
        "--data -d TEXT",
        "Held-out text to score: a file, a folder, a glob pattern or a Hub dataset.",
    ),
    reference: str | None = option(
        "--reference MODEL",
        "Model to compare with, by KL divergence too. Default: the first, by loss.",
    ),
    tokens: Any = option(
        "--tokens T", "Most tokens to score. Default: all; 1M of a Hub dataset.", parser=count
    ),
    window: Any = option(
        "--window T",
        "Tokens read at once. Default: the model's positions, at most 2k.",
        parser=count,
    ),
    batch: int = option("--batch B", "Windows scored at once.", 4, min=1),
    retrieval: bool = option("--retrieval", "Ask causal models for facts in long texts.", False),
    lengths: Any = option(
        "--lengths T,T,...",
        "Tokens of the texts of --retrieval. Default: 512, 1024, 2048 and 4096 within the context.",
        parser=counts,
    ),
    questions: int | None = option(
        "--questions N", "Questions of each kind at each length of --retrieval. Default: 24.", min=1
    ),
    device: Device = None,
    output: Path | None = option("--output -o FILE.json", "New file for the results as JSON."),
    as_json: Json = False,
    dtype: str = option(
        "--dtype TYPE",
        "float32, bfloat16, float16 or auto: float32 on a CPU, else the checkpoint's.",
        "auto",
    ),
    revision: str | None = option(
        "--revision REV", "Branch, tag or commit of models on the Hub. Default: main."
    ),
    text_field: str = option(
        "--text-field NAME", "Field with the text, in JSON lines, Parquet and datasets.", "text"
    ),
    source_field: str | None = option(
        "--source-field NAME", "Field with the input of an encoder-decoder, to score pairs."
    ),
    target_field: str | None = option(
        "--target-field NAME", "Field with what an encoder-decoder should write."
    ),
    data_split: str = option("--data-split NAME", "Split of a Hub dataset.", "train"),
    data_name: str | None = option("--data-name NAME", "Configuration of a Hub dataset."),
) -> None:
    """Measure the loss of one or more models on the same text, in nats per token and bits per byte.

    Several models are compared with the first one, or with --reference, by paired differences with
    standard errors; --reference adds the KL divergence. Encoder-decoders are scored on span
    corruption or on pairs of texts. The exit code is 1 if a loss is not finite.

    Examples:

      gqa-convert evaluate ./Llama-2-7b ./gqa8 --data test.txt
      gqa-convert evaluate ./gqa8 --reference ./Llama-2-7b --data test.txt -o gqa8.json
    """
    from gqa_convert.data.sources import as_source
    from gqa_convert.measuring.results import AskedQuestions, check_result_path, write_result
    from gqa_convert.measuring.tables import evaluation_tables, notes, short_names

    from .console.screen import ProgressScreen, print_json, print_note, show_table

    if data is None and not retrieval:
        raise OptionError(
            "--data is missing: name the text to score, or ask for facts with --retrieval"
        )
    if not retrieval:
        refuse({"--lengths": lengths, "--questions": questions}, "belongs to --retrieval")
    if output is not None:
        check_result_path(output)
    from gqa_convert.measuring.evaluation import run
    from gqa_convert.measuring.evaluation.retrieval import QUESTIONS

    asked = None
    if retrieval:
        asked = AskedQuestions(lengths=lengths or [], questions=questions or QUESTIONS)
    options = run.EvaluationOptions(
        reference, revision, window, tokens, batch, dtype, device, asked
    )
    text = None
    if data is not None:
        stated = {
            "source": data,
            "split": data_split,
            "name": data_name,
            "text_field": text_field,
            "source_field": source_field,
            "target_field": target_field,
        }
        text = as_source(stated)
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
            show_table(*table)
        for note in notes(entries, names):
            print_note(note)
    failed = ", ".join(each.model for each in entries if each.scored_nan)
    if failed:
        sys.stderr.write(
            f"gqa-convert: NaN or infinite loss of {failed}: see scored_nan in the JSON results\n"
        )
        raise typer.Exit(1)
