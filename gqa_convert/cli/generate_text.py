"""`gqa-convert generate-text`."""

from pathlib import Path
from typing import Annotated

import typer

from .options import Json, Quiet, Revision


def generate_text(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Checkpoint folder or Hub id.", show_default=False)],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="File to write: .jsonl or .parquet.", show_default=False)],
    tokens: Annotated[
        str, typer.Option("--tokens", metavar="T", help="Tokens to generate at least, such as 500k.")
    ] = "100k",
    prompts: Annotated[
        str | None,
        typer.Option(
            "--prompts",
            metavar="FILE",
            help="One prompt per line, or JSON lines or Parquet with prompt or messages. Default: each text begins like a document.",
            show_default=False,
        ),
    ] = None,
    temperature: Annotated[
        float, typer.Option("--temperature", metavar="X", help="Temperature; 0 takes the most likely token.")
    ] = 1.0,
    top_p: Annotated[
        float, typer.Option("--top-p", metavar="P", help="Sample among the likeliest tokens of this probability.")
    ] = 1.0,
    length: Annotated[int, typer.Option("--length", metavar="L", help="Most tokens of one text.")] = 512,
    batch: Annotated[int, typer.Option("--batch", "-b", metavar="B", help="Texts generated at once.")] = 16,
    seed: Annotated[int, typer.Option("--seed", metavar="S", help="Seed of the sampling.")] = 0,
    device: Annotated[
        str | None,
        typer.Option(
            "--device", metavar="NAME", help="cpu, cuda or cuda:1. Default: a GPU if there is one.", show_default=False
        ),
    ] = None,
    revision: Revision = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUT once the new file is complete.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Generate text with MODEL, to calibrate and to distil on where its training text is not at hand.

    Without --prompts, texts begin with the token that begins documents. A prompt goes through the chat template if
    there is one, and OUT has conversations. The same command continues after it was stopped or killed, which loses one
    batch at most. A recipe's data and --calibration read OUT.

    Examples:

      gqa-convert generate-text ./Llama-2-7b own-text.jsonl --tokens 2M
      gqa-convert generate-text ./chat-model answers.parquet --prompts questions.txt --temperature 0.7
      gqa-convert convert ./Llama-2-7b ./Llama-2-7b-gqa8 --groups 8 --calibration own-text.jsonl
    """
    from gqa_convert.cli.console.generation import show_generated
    from gqa_convert.cli.console.progress import stage_progress
    from gqa_convert.cli.console.screen import print_json
    from gqa_convert.text.generating import GenerationOptions
    from gqa_convert.text.generating import generate_text as run

    from .options import token_count

    options = GenerationOptions(
        tokens=token_count(tokens, "--tokens") or 0,
        length=length,
        batch=batch,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        prompts=prompts,
        device=device,
    )
    with stage_progress(quiet=quiet) as progress:
        made = run(model, out, options, revision=revision, overwrite=overwrite, progress=progress)
    if as_json:
        print_json(made.as_json())
    elif not quiet:
        show_generated(made)
