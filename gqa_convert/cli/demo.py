"""`gqa-convert demo`."""

from pathlib import Path

import typer

from .options import Json, option


def demo(
    out: Path = option("OUT", "New folder for the results.", Path("gqa-demo")),
    as_json: Json = False,
) -> None:
    """Try the whole workflow on a small bundled model, offline, in a few minutes on two cores.

    A quarter of the model's K/V heads are kept, by mean pooling and by fitting on calibration text.
    Both results are verified, their loss and their K/V cache are measured, and the better one is
    uptrained.

      gqa-convert demo
    """
    from gqa_convert.demo import run_demo
    from gqa_convert.runtime.messages import size

    from .console.screen import ProgressScreen, print_json, say, show_table

    with ProgressScreen() as screen:
        summary = run_demo(out, progress=screen.show)
    if as_json:
        print_json(summary)
    else:
        verified = {
            None: "",
            True: "yes",
            False: "no",
        }  # the source and the uptrained model have nothing to prove
        rows = []
        for result in summary["results"]:
            row = {
                "model": result["name"],
                "K/V heads": str(result["kv_heads"]),
                "K/V cache per token": size(result["kv_bytes_per_token"]),
                "loss": f"{result['loss']:.3f}",
                "verified": verified[result["verified"]],
            }
            rows.append(row)
        show_table(
            f"Loss in nats per token over {summary['held_out_tokens']:,} held-out tokens", rows
        )
        say(f"results  {Path(summary['results'][1]['model']).parent}")
        say("next     gqa-convert convert YOUR-MODEL --kv-heads 8 --dry-run")
    if not summary["passed"]:
        raise typer.Exit(1)
