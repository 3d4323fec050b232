"""`gqa-convert check-serving`."""

from typing import Annotated

import typer

from gqa_convert.errors import OptionError

from .options import Converted, Json, Quiet


def check_serving(
    out: Converted,
    client: Annotated[
        list[str] | None,
        typer.Option(
            "--client",
            "-c",
            metavar="NAME",
            show_default=False,
            help="Engine to run: llama.cpp or vllm; repeatable. Default: all that are installed.",
        ),
    ] = None,
    python: Annotated[
        list[str] | None,
        typer.Option(
            "--python",
            metavar="NAME=PATH",
            help="Python interpreter of the environment that has this engine; repeatable. The engine is then run as well.",
            show_default=False,
        ),
    ] = None,
    install: Annotated[
        bool,
        typer.Option(
            "--install", help="Install the engines named by --client that are missing, each into a cache folder."
        ),
    ] = False,
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="MINUTES", help="Time limit for each engine, in minutes.")
    ] = 60.0,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Run serving engines on OUT and compare their greedy tokens and logits with transformers', in float32 on the CPU.

    Every engine runs in a separate process, through its own converter if it has one. ok means equal tokens
    and close logits. not supported means that the engine rejects the architecture, and skipped
    that it is not installed. The exit code is 1 if any engine differs, if none ran, or if an engine named by --client
    or --python is missing.

    Examples:

      gqa-convert check-serving ./Llama-2-7b-gqa8
      gqa-convert check-serving ./Llama-2-7b-gqa8 --client llama.cpp --install
      gqa-convert check-serving ./Llama-2-7b-gqa8 --client vllm --python vllm=/opt/vllm/bin/python
    """
    from gqa_convert.cli.console.progress import stage_progress
    from gqa_convert.cli.console.screen import print_json
    from gqa_convert.cli.console.serving import show_serving
    from gqa_convert.serving.checking import check_serving

    if install and not client:
        raise OptionError("--install does not say which engines to install: name each one with --client")
    with stage_progress(quiet=quiet) as step:
        report = check_serving(
            out,
            client or (),
            pythons=dict(map(_pair, python or ())),
            install_absent=install,
            minutes=timeout,
            progress=step,
        )
    if as_json:
        print_json(report.as_json())
    elif not quiet:
        show_serving(report)
    if not report.passed:
        raise typer.Exit(1)


def _pair(text: str) -> tuple[str, str]:
    name, equals, path = text.partition("=")
    if not (name and equals and path):
        raise OptionError(f"--python {text!r} is not NAME=PATH: write it like vllm=/opt/venv/bin/python")
    return name, path
