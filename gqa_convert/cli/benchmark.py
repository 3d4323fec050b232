"""`gqa-convert benchmark`."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from .options import Json, Quiet, Revision, byte_count, counts


def benchmark(
    model: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="Checkpoint folder or Hub id.", show_default=False)
    ] = None,
    config: Annotated[
        str | None,
        typer.Option(
            "--config",
            metavar="FILE",
            help="Instead of MODEL: a config.json or its folder; random weights.",
            show_default=False,
        ),
    ] = None,
    groups: Annotated[
        str | None,
        typer.Option(
            "--groups",
            "-n",
            metavar="N,N,...",
            help="K/V heads to time; by default MODEL's own and its divisors.",
            show_default=False,
        ),
    ] = None,
    batch: Annotated[str, typer.Option("--batch", "-b", metavar="B,B,...", help="Sequences at once.")] = "1",
    context: Annotated[
        str | None,
        typer.Option(
            "--context", metavar="T,T,...", help="Tokens in the cache. Default: 512, or what fits.", show_default=False
        ),
    ] = None,
    encoder_tokens: Annotated[
        int | None,
        typer.Option(
            "--encoder-tokens", metavar="T", help="Input of an encoder-decoder. Default: 512.", show_default=False
        ),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            "--memory", metavar="SIZE", help="Also tell what batch and context fit, e.g. 24GB.", show_default=False
        ),
    ] = None,
    layers: Annotated[
        int | None,
        typer.Option(
            "--layers", metavar="L", help="Time L layers, random weights; estimate the whole.", show_default=False
        ),
    ] = None,
    attention: Annotated[
        str | None,
        typer.Option(
            "--attention",
            metavar="NAME",
            help="gqa (this package's; the default where possible), sdpa or eager.",
            show_default=False,
        ),
    ] = None,
    prefill: Annotated[
        bool, typer.Option("--prefill/--no-prefill", help="Without it, the cache is filled with random numbers.")
    ] = True,
    breakdown: Annotated[
        bool, typer.Option("--breakdown", help="Time attention by itself too, beside what memory allows.")
    ] = False,
    new_tokens: Annotated[
        int, typer.Option("--new-tokens", metavar="T", help="That a sample decodes, for the time per sample.")
    ] = 128,
    steps: Annotated[int, typer.Option("--steps", metavar="S", help="Decode steps timed in a turn.")] = 8,
    repetitions: Annotated[
        int, typer.Option("--repetitions", metavar="R", help="Turns of each N; a multiple of their number is fairest.")
    ] = 8,
    warm_up: Annotated[int, typer.Option("--warm-up", metavar="W", help="Turns of each N before those.")] = 1,
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype", metavar="TYPE", help="float32, bfloat16 or float16. Default: MODEL's own.", show_default=False
        ),
    ] = None,
    device: Annotated[
        str | None, typer.Option("--device", help="cpu or cuda. Default: a GPU if there is one.", show_default=False)
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FILE.png", help="Draw time against N; needs matplotlib.", show_default=False),
    ] = None,
    revision: Revision = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Time decoding and prefill, and measure the K/V cache, of a model and of itself with other numbers of K/V heads.

    MODEL runs with its weights at its own N; its versions at other N have the shapes that [bold]convert[/bold] would
    give them and random keys and values, which time does not depend on. The versions take turns, so that a drifting
    machine favours none.

      gqa-convert benchmark ./Llama-2-7b -n 1,8,32 --batch 1,8 --context 4096

      gqa-convert benchmark ./Llama-2-7b --memory 24GB --plot speed.png

      gqa-convert benchmark --config config.json --layers 2 --breakdown --json
    """
    from gqa_convert.cli.console.benchmark import show_benchmark
    from gqa_convert.cli.console.progress import stage_progress
    from gqa_convert.cli.console.screen import print_json
    from gqa_convert.measuring.benchmark.options import BenchmarkOptions
    from gqa_convert.measuring.benchmark.run import benchmark_model

    chosen, contexts = counts(groups, "--groups"), counts(context, "--context")
    options = BenchmarkOptions(
        groups=None if chosen is None else tuple(chosen),
        batch=tuple(dict.fromkeys(counts(batch, "--batch") or ())),
        context=None if contexts is None else tuple(contexts),
        encoder_tokens=encoder_tokens,
        new_tokens=new_tokens,
        steps=steps,
        repetitions=repetitions,
        warm_up=warm_up,
        attention=attention,
        layers=layers,
        dtype=dtype,
        device=device,
        prefill=prefill,
        breakdown=breakdown,
        memory=byte_count(memory, "--memory"),
    )
    with stage_progress(quiet=quiet) as step:
        result = benchmark_model(
            model,
            config=config,
            revision=revision,
            options=options,
            plot=plot,
            command=["gqa-convert", *sys.argv[1:]],
            progress=step,
        )
    if as_json:
        print_json(result)
    elif not quiet:
        show_benchmark(result)
