"""`gqa-convert benchmark`."""

from typing import Annotated, Any

from gqa_convert.errors import OptionError

from .options import (
    Candidates,
    Device,
    Interpreter,
    Json,
    Positive,
    Revision,
    TokenCount,
    TokenCounts,
    command_line,
    counts,
    refuse,
)


def benchmark(
    models: list[str],
    candidates: Candidates = None,
    engine: str | None = None,
    python: Interpreter = None,
    batch: Annotated[Any, {"parser": counts}] = "1",
    context: TokenCounts = None,
    new_tokens: TokenCount = 128,
    device: Device = None,
    as_json: Json = False,
    dtype: str | None = None,
    repetitions: Positive = None,
    revision: Revision = None,
) -> None:
    """Measure decode time, prefill time and K/V cache of a model with different numbers of K/V heads.

    MODEL runs in transformers with its own weights at its own number of K/V heads. For every other number, a version with
    the shapes of a converted model runs with random keys and values, on which time does not depend. The versions take
    turns, so that a machine whose speed drifts favours none of them. With --engine, the engine itself is timed on each
    MODEL, of which the first is the source.

    Examples:

      gqa-convert benchmark ./Llama-2-7b --candidates 1,8,32 --batch 1,8 --context 4k
      gqa-convert benchmark ./Llama-2-7b ./gqa8 --engine vllm --context 4k --batch 8

    Args:
        MODEL: Checkpoint folder or Hub id; several with --engine.
        --engine NAME: Time the models in this engine, llama.cpp or vllm. Default: transformers.
        --batch -b B,B,...: Sequences decoded at once.
        --context T,T,...: Tokens in the K/V cache, such as 4k. Default: 512, or half the model's positions.
        --new-tokens T (hidden): Tokens that an engine decodes.
        --dtype TYPE (hidden): float32, bfloat16 or float16. Default: that of MODEL.
        --repetitions R (hidden): Timed turns of each model. Default: 8; 3 in an engine.
    """
    from gqa_convert.cli.console.progress import ProgressScreen
    from gqa_convert.cli.console.screen import print_json
    from gqa_convert.cli.console.tables import show_table
    from gqa_convert.measuring.latency.run import BenchmarkOptions, benchmark_model
    from gqa_convert.measuring.tables import benchmark_table
    from gqa_convert.serving.timing import time_engine

    repetitions = repetitions or (3 if engine else 8)
    options = BenchmarkOptions(candidates, batch, context, new_tokens, repetitions, dtype, device, revision)
    with ProgressScreen() as screen:
        if engine is not None:
            refused = {"--candidates": candidates, "--device": device, "--revision": revision}
            refuse(refused, "does not go with --engine, which times whole checkpoints as the engine runs them")
            result = time_engine(engine, models, options, python, command_line(), screen.show)
        else:
            refuse({"--python": python}, "belongs to --engine")
            if len(models) > 1:
                raise OptionError(
                    f"{len(models)} models: without --engine, one MODEL is timed with several numbers of K/V heads (--candidates)"
                )
            result = benchmark_model(models[0], options, command_line(), screen.show)
    if as_json:
        print_json(result.as_json())
    else:
        table = benchmark_table(result)
        show_table(table.rows, table.title)
