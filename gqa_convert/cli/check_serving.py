"""`gqa-convert check-serving`."""

from typing import Annotated

import typer

from .options import Converted, Interpreters, Json, Quiet, option


def check_serving(
    out: Converted,
    engine: Annotated[
        list[str] | None,
        option("--engine NAME", "Engine to run: llama.cpp or vllm; repeatable. Default: all that are installed."),
    ] = None,
    python: Interpreters = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Run serving engines on OUT and compare their greedy tokens and logits with transformers', in float32.

    Every engine runs in a separate process, through its own converter if it has one. ok means equal tokens and close
    logits, not supported that the engine rejects the architecture, and skipped that it is not installed. The exit code is
    1 if any engine differs, if none ran, or if an engine named by --engine or --python is missing.

    Examples:

      gqa-convert check-serving ./Llama-2-7b-gqa8
      gqa-convert check-serving ./Llama-2-7b-gqa8 --python vllm=/opt/vllm/bin/python
    """
    from gqa_convert.cli.console.progress import ProgressScreen
    from gqa_convert.cli.console.screen import print_json
    from gqa_convert.cli.console.serving import show_serving
    from gqa_convert.serving.checking import check_serving

    with ProgressScreen(quiet=quiet) as screen:
        report = check_serving(out, engine or (), pythons=dict(python or ()), progress=screen.show)
    if as_json:
        print_json(report.as_json())
    elif not quiet:
        show_serving(report)
    if not report.passed:
        raise typer.Exit(1)
