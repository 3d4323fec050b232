"""`gqa-convert evaluate`."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from gqa_convert.errors import OptionError

from .options import (
    Device,
    Json,
    Quiet,
    argument,
    command_line,
    hidden_option,
    option,
    refuse,
    token_count,
    token_counts,
)


def evaluate(
    models: Annotated[list[str] | None, argument("MODEL...", "Checkpoint folders or Hub ids.")] = None,
    data: Annotated[
        str | None,
        option("--data -d TEXT", "Held-out text to score: a file, a folder, a glob pattern or a Hub dataset."),
    ] = None,
    reference: Annotated[
        str | None,
        option("--reference MODEL", "Model to compare with, by KL divergence too. Default: the first, by loss."),
    ] = None,
    tokens: Annotated[
        int | None,
        option("--tokens T", "Most tokens to score. Default: all; 1M of a Hub dataset.", parser=token_count),
    ] = None,
    window: Annotated[
        int | None,
        option("--window T", "Tokens read at once. Default: the model's positions, at most 2k.", parser=token_count),
    ] = None,
    batch: Annotated[int, option("--batch B", "Windows scored at once.", min=1)] = 4,
    retrieval: Annotated[
        bool,
        option(
            "--retrieval",
            "Ask causal models for facts in long texts; with --data, also score the tokens that need a long context.",
        ),
    ] = False,
    lengths: Annotated[
        Any,
        option(
            "--lengths T,T,...",
            "Tokens of the texts of --retrieval. Default: 512, 1024, 2048 and 4096 within the context.",
            parser=token_counts,
        ),
    ] = None,
    questions: Annotated[
        int | None, option("--questions N", "Questions of each kind at each length of --retrieval. Default: 24.", min=1)
    ] = None,
    device: Device = None,
    html: Annotated[Path | None, option("--html PAGE.html", "Page with tables and the plot; needs matplotlib.")] = None,
    plot: Annotated[
        Path | None, option("--plot FILE.png", "Plot of loss against K/V-cache bytes; needs matplotlib.")
    ] = None,
    earlier: Annotated[
        list[Path] | None,
        option("--with FILE.json", "Earlier results to draw too; repeat it for several. MODEL may be left out then."),
    ] = None,
    output: Annotated[Path | None, option("--output -o FILE.json", "File for the results as JSON.")] = None,
    overwrite: Annotated[bool, option("--overwrite", "Replace earlier results in the file of --output.")] = False,
    as_json: Json = False,
    dtype: Annotated[
        str,
        hidden_option(
            "--dtype TYPE",
            "float32, bfloat16, float16 or auto: float32 on a CPU, else the checkpoint's.",
        ),
    ] = "auto",
    seed: Annotated[int | None, hidden_option("--seed S", "Seed of the texts of --retrieval. Default: 0.")] = None,
    revision: Annotated[
        str | None, hidden_option("--revision REV", "Branch, tag or commit of models on the Hub. Default: main.")
    ] = None,
    text_field: Annotated[
        str,
        hidden_option(
            "--text-field NAME",
            "Field with the text, in JSON lines, Parquet and datasets.",
        ),
    ] = "text",
    source_field: Annotated[
        str | None, hidden_option("--source-field NAME", "Field with the input of an encoder-decoder, to score pairs.")
    ] = None,
    target_field: Annotated[
        str | None, hidden_option("--target-field NAME", "Field with what an encoder-decoder should write.")
    ] = None,
    data_split: Annotated[str, hidden_option("--data-split NAME", "Split of a Hub dataset.")] = "train",
    data_name: Annotated[str | None, hidden_option("--data-name NAME", "Configuration of a Hub dataset.")] = None,
    quiet: Quiet = False,
) -> None:
    """Measure the loss of one or more models on the same text, in nats per token and bits per byte.

    Several models are compared with the first one, or with --reference, by paired differences with standard errors;
    --reference adds the KL divergence and how often both models predict the same token. Encoder-decoders are scored on
    span corruption or on pairs of texts. The exit code is 1 if a loss is not finite.

    Examples:

      gqa-convert evaluate ./Llama-2-7b ./gqa8 --data test.txt --html losses.html
      gqa-convert evaluate ./gqa8 --reference ./Llama-2-7b --data test.txt -o gqa8.json
      gqa-convert evaluate --with gqa8.json --with gqa4.json --plot losses.png
    """
    from gqa_convert.cli.console.evaluation import show_evaluation
    from gqa_convert.cli.console.progress import ProgressScreen
    from gqa_convert.cli.console.screen import print_json
    from gqa_convert.data.sources import as_source
    from gqa_convert.measuring.evaluation.page import check_drawings, draw
    from gqa_convert.measuring.results import check_result_path, write_result

    files = check_drawings(html, plot, earlier or ())
    if not models and earlier and data is None:
        draw(files, html, plot)
        if as_json:
            print_json({"html": html and str(html), "plot": plot and str(plot)})
        return
    if not models:
        raise OptionError("name a MODEL and the text to score with --data TEXT, or only files of results with --with")
    if data is None and not retrieval:
        raise OptionError("--data is missing: name the text to score, or ask for facts with --retrieval")
    if data is None and (html or plot):
        raise OptionError("--html and --plot draw losses: name the text to score with --data")
    if not retrieval:
        refuse({"--lengths": lengths, "--questions": questions, "--seed": seed}, "belongs to --retrieval")
    if output is not None:
        check_result_path(output, overwrite=overwrite)
    from gqa_convert.measuring.evaluation.long_contexts import RetrievalOptions
    from gqa_convert.measuring.evaluation.retrieval import QUESTIONS
    from gqa_convert.measuring.evaluation.run import EvaluationOptions
    from gqa_convert.measuring.evaluation.run import evaluate as run

    asked = RetrievalOptions(lengths, QUESTIONS if questions is None else questions, seed or 0)
    options = EvaluationOptions(
        reference=reference,
        revision=revision,
        window=window,
        tokens=tokens,
        batch=batch,
        dtype=dtype,
        device=device,
        retrieval=asked if retrieval else None,
    )
    stated = {
        "source": data,
        "text_field": text_field,
        "split": data_split,
        "name": data_name,
        "source_field": source_field,
        "target_field": target_field,
    }
    text = None if data is None else as_source(stated)
    with ProgressScreen(quiet=quiet) as screen:
        results = run(models, text, options, command=command_line(), progress=screen.show)
    if output is not None:
        write_result(output, results, overwrite=overwrite)
    draw([*files, results], html, plot)
    if as_json:
        print_json(results.as_json())
    elif not quiet:
        show_evaluation(results)
    broken = [each.model for each in results.entries() if each.scored_nan]
    if broken:
        names = ", ".join(broken)
        sys.stderr.write(f"gqa-convert: NaN or infinite loss of {names}: see scored_nan in the JSON results\n")
        raise typer.Exit(1)
