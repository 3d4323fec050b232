"""`gqa-convert check-serving`."""

from typing import TYPE_CHECKING

import typer

from .options import Converted, Interpreters, Json, Quiet

if TYPE_CHECKING:
    from gqa_convert.serving.checking import ServingReport


def check_serving(
    out: Converted,
    engine: list[str] | None = None,
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

    Args:
        --engine NAME: Engine to run: llama.cpp or vllm; repeatable. Default: all that are installed.
    """
    from gqa_convert.cli.console.progress import ProgressScreen
    from gqa_convert.cli.console.screen import print_json
    from gqa_convert.serving.checking import check_serving

    with ProgressScreen(quiet=quiet) as screen:
        report = check_serving(out, engine or (), pythons=dict(python or ()), progress=screen.show)
    if as_json:
        print_json(report.as_json())
    elif not quiet:
        _show(report)
    if not report.passed:
        raise typer.Exit(1)


def _show(report: "ServingReport") -> None:
    """Print a line for each engine, then the verdict."""
    from .console.screen import stdout_console

    console = stdout_console()
    for entry in report.clients:
        mark = entry["status"].replace("failed", "FAIL")
        name = f"{entry['client']} {entry['version'] or ''}"
        console.print(f"{mark:<13}  {name:<18} {entry['detail']}")
    states = [entry["status"] for entry in report.clients]
    verdict = "nothing was checked: no engine ran"
    if report.passed:
        verdict = "every engine that ran agrees with transformers"
    elif "failed" in states:
        verdict = "an engine differs from transformers: do not serve OUT with an engine marked FAIL"
    elif "ok" in states:
        verdict = "incomplete: an engine named by --engine or --python is not installed"
    console.print(verdict)
