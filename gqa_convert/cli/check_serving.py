"""`gqa-convert check-serving`."""

from pathlib import Path
from typing import Annotated

import typer

from gqa_convert.errors import OptionError

from .options import Json, Quiet


def check_serving(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The converted checkpoint.", show_default=False)],
    client: Annotated[
        list[str] | None,
        typer.Option(
            "--client",
            "-c",
            metavar="NAME",
            show_default=False,
            help="transformers-4.57, ctranslate2, onnxruntime, openvino, llama.cpp or vllm; several times for more. Default: all installed.",
        ),
    ] = None,
    python: Annotated[
        list[str] | None,
        typer.Option(
            "--python",
            metavar="NAME=PATH",
            help="The interpreter that has a client, which is then asked too.",
            show_default=False,
        ),
    ] = None,
    install: Annotated[
        bool, typer.Option("--install", help="Install named clients that are absent, each into a cache folder.")
    ] = False,
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="MINUTES", help="How long each engine may take.")
    ] = 60.0,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Run real serving engines on OUT and compare them with transformers: greedy tokens and logits, in float32 on the
    CPU.

    Each engine runs in a process of its own, through its own converter if it has one. [bold]ok[/bold] is the same
    tokens and close logits; an engine that says itself that it does not know the architecture is [bold]not
    supported[/bold], and one that is absent is [bold]skipped[/bold]. Exit code 1 if any was wrong, if none ran, or if
    one named by --client or --python is absent.

      gqa-convert check-serving ./Llama-2-7b-gqa8

      gqa-convert check-serving ./Llama-2-7b-gqa8 --client transformers-4.57 --client ctranslate2 --install

      gqa-convert check-serving ./Llama-2-7b-gqa8 --client vllm --python vllm=/opt/vllm/bin/python
    """
    from gqa_convert.cli.console.progress import stage_progress
    from gqa_convert.cli.console.screen import print_json
    from gqa_convert.cli.console.serving import show_serving
    from gqa_convert.serving.checking import check_serving

    if install and not client:
        raise OptionError("--install alone does not say what: name each client with --client")
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
        print_json(report)
    elif not quiet:
        show_serving(report)
    if not report["passed"]:
        raise typer.Exit(1)


def _pair(text: str) -> tuple[str, str]:
    name, equals, path = text.partition("=")
    if not (name and equals and path):
        raise OptionError(f"--python {text!r} names no interpreter: write it like ctranslate2=/opt/venv/bin/python")
    return name, path
