"""`gqa-convert benchmark`."""

import sys
from typing import Annotated

import typer

from .options import Json, Plot, Quiet, Revision, SeveralGroups, byte_count, counts


def benchmark(
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="Checkpoint folder or Hub id. Not with --config.", show_default=False),
    ] = None,
    config: Annotated[
        str | None,
        typer.Option(
            "--config",
            metavar="FILE",
            help="A config.json or its folder, to time with random weights instead of MODEL.",
            show_default=False,
        ),
    ] = None,
    groups: SeveralGroups = None,
    batch: Annotated[str, typer.Option("--batch", "-b", metavar="B,B,...", help="Sequences decoded at once.")] = "1",
    context: Annotated[
        str | None,
        typer.Option(
            "--context",
            metavar="T,T,...",
            help="Tokens in the K/V cache. Default: 512, or fewer if the model has fewer positions.",
            show_default=False,
        ),
    ] = None,
    encoder_tokens: Annotated[
        int | None,
        typer.Option(
            "--encoder-tokens",
            metavar="T",
            help="Tokens of an encoder-decoder's input. Default: 512.",
            show_default=False,
        ),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            "--memory",
            metavar="SIZE",
            help="Also compute the largest batch and context that fit in this memory, for example 24GB.",
            show_default=False,
        ),
    ] = None,
    attention: Annotated[
        str | None,
        typer.Option(
            "--attention",
            metavar="NAME",
            help="Attention implementation: gqa (this package's), sdpa or eager. Default: gqa if the model supports it.",
            show_default=False,
        ),
    ] = None,
    prefill: Annotated[
        bool,
        typer.Option("--prefill/--no-prefill", help="Fill the K/V cache by a timed prefill, or with random numbers."),
    ] = True,
    new_tokens: Annotated[
        int, typer.Option("--new-tokens", metavar="T", help="Tokens decoded per sample, for the time per sample.")
    ] = 128,
    steps: Annotated[int, typer.Option("--steps", metavar="S", help="Decode steps per turn.")] = 8,
    repetitions: Annotated[
        int,
        typer.Option(
            "--repetitions", metavar="R", help="Timed turns per N; a multiple of the number of Ns balances their order."
        ),
    ] = 8,
    warm_up: Annotated[
        int, typer.Option("--warm-up", metavar="W", help="Untimed turns per N before the timed ones.")
    ] = 1,
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype", metavar="TYPE", help="float32, bfloat16 or float16. Default: that of MODEL.", show_default=False
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            "--device", metavar="NAME", help="cpu or cuda. Default: a GPU if there is one.", show_default=False
        ),
    ] = None,
    plot: Plot = None,
    revision: Revision = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure decode time, prefill time and K/V cache of a model with different numbers of K/V heads.

    MODEL runs with its own weights at its own number of K/V heads N. For every other N, a version with the shapes of a
    converted model runs with random keys and values, on which time does not depend. The versions take turns, so that a
    machine whose speed drifts favours none of them. Times are in milliseconds.

    Examples:

      gqa-convert benchmark ./Llama-2-7b -n 1,8,32 --batch 1,8 --context 4096
      gqa-convert benchmark ./Llama-2-7b --memory 24GB --plot speed.png
      gqa-convert benchmark --config config.json --json
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
        dtype=dtype,
        device=device,
        prefill=prefill,
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
        print_json(result.as_json())
    elif not quiet:
        show_benchmark(result)
