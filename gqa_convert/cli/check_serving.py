"""`gqa-convert check-serving`."""

import typer

from .options import Converted, Json, option


def check_serving(
    out: Converted,
    engine: list[str] = option(
        "--engine NAME",
        "Engine to run: ctranslate2, llama.cpp or vllm; repeatable. Default: all installed.",
        [],
    ),
    python: str | None = option(
        "--python PATH",
        "Python interpreter of the environment that has the engine. Default: this one.",
    ),
    as_json: Json = False,
) -> None:
    """Run serving engines on OUT and compare their greedy tokens and logits with transformers'.

    Every engine runs in float32 and in a separate process, through its own converter if it has one.
    ok means equal tokens and close logits, not supported that the engine rejects the architecture,
    and skipped that it is not installed. The exit code is 1 if any engine differs, if none ran, or
    if an engine named by --engine is missing.

    Examples:

      gqa-convert check-serving ./Llama-2-7b-gqa8
      gqa-convert check-serving ./Llama-2-7b-gqa8 --engine vllm --python /opt/vllm/bin/python
    """
    from gqa_convert.serving.checking import check_serving

    from .console.screen import print_json, say

    report = check_serving(out, engine, python=python)
    if as_json:
        print_json(report.as_json())
    else:
        for entry in report.clients:
            named = f"{entry['client']} {entry['version'] or ''}"
            say(f"{entry['status']:<13}  {named}  {entry['detail']}")
        say("every engine that ran agrees with transformers" if report.passed else "not proved")
    if not report.passed:
        raise typer.Exit(1)
