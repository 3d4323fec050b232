"""`gqa-convert benchmark`."""

from typing import Any

from .options import Candidates, Device, Json, Revision, command_line, counts, option


def benchmark(
    model: str = option("MODEL", "Checkpoint folder or Hub id.", ...),
    candidates: Candidates = None,
    batch: Any = option("--batch -b B,B,...", "Sequences decoded at once.", "1", parser=counts),
    context: Any = option(
        "--context T,T,...",
        "Tokens in the K/V cache, such as 4k. Default: 512, or half the model's positions.",
        parser=counts,
    ),
    device: Device = None,
    as_json: Json = False,
    dtype: str | None = option(
        "--dtype TYPE", "float32, bfloat16 or float16. Default: that of MODEL."
    ),
    repetitions: int = option("--repetitions R", "Timed turns of each version.", 8, min=1),
    revision: Revision = None,
) -> None:
    """Measure decode time and K/V cache of a model with different numbers of K/V heads.

    MODEL runs in transformers with its own weights at its own number of K/V heads. For every other
    number, a version with the shapes of a converted model runs with random keys and values, on
    which time does not depend. The versions take turns, so that a machine whose speed drifts
    favours none of them.

      gqa-convert benchmark ./Llama-2-7b --candidates 1,8,32 --batch 1,8 --context 4k
    """
    from gqa_convert.measuring.latency import benchmark_model
    from gqa_convert.measuring.tables import benchmark_table

    from .console.screen import ProgressScreen, print_json, show_table

    with ProgressScreen() as screen:
        result = benchmark_model(
            model,
            candidates=candidates,
            batch=batch,
            context=context,
            repetitions=repetitions,
            dtype=dtype,
            device=device,
            revision=revision,
            command=command_line(),
            progress=screen.show,
        )
    if as_json:
        print_json(result.as_json())
    else:
        show_table(*benchmark_table(result))
