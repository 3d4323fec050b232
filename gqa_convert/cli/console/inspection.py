"""The printed result of an inspection."""

from typing import Any

from .screen import print_note, stdout_console, styled
from .tables import Column, show_table


def show_inspection(result: dict[str, Any]) -> None:
    """Print each layer's errors by N, darker where they are larger; then losses and a recommendation if there is text."""
    from rich.text import Text

    console = stdout_console()
    layers, groups = result["layers"], result["groups"]
    highest = max(error[part] for layer in layers for error in layer["errors"] for part in ("keys", "values")) or 1.0

    def shaded(number: float) -> Text:
        light = 1 - 0.75 * number / highest
        return Text(f"{number:.2f}", style=f"black on rgb({round(255 * light)},{round(255 * (0.4 + 0.6 * light))},255)")

    console.print(
        styled(
            (result["source"], "bold"),
            f": {result['model_type']}, {result['kv_heads']} K/V heads in {len(layers)} attention layers",
        ),
        soft_wrap=True,
    )
    measured = "on calibration text" if result["calibration"] else "from the weights alone"
    console.print(f"Relative error of keys (K) and values (V) merged into N heads, {measured}", soft_wrap=True)
    columns = [f"{part}{count}" for part in "KV" for count in groups]
    rows = []
    for layer in layers:
        cells = [shaded(error[part]) for part in ("keys", "values") for error in layer["errors"]]
        pairs = (f"{'+'.join(map(str, pair['heads']))} {pair['error']:.2f}" for pair in layer["cheapest_pairs"])
        rows.append([layer["label"], *cells, "  ".join(pairs)])
    show_table(["layer", *columns, Column("cheapest pairs of heads", folds_to=12)], rows)
    for part in ("key", "value"):
        if reason := next((layer[f"{part}_barrier"] for layer in layers if layer[f"{part}_barrier"]), None):
            print_note(f"{part}s are averaged where nothing can be folded, since {reason}")
    _show_prediction(result)
    if result["plot"]:
        console.print(f"plot     {result['plot']}", soft_wrap=True)


def _show_prediction(result: dict[str, Any]) -> None:
    """Print the predicted loss for each N, and the next command."""
    console = stdout_console()
    if result["calibration"] is None:
        console.print("Weights alone predict no loss and recommend no N: name text with --calibration.", soft_wrap=True)
        return
    loss, advice = result["loss"], result["recommendation"]
    if result["calibration"]["warning"]:
        print_note(result["calibration"]["warning"])
    console.print(f"Predicted loss in nats per token over {loss['tokens']:,} held-out tokens", soft_wrap=True)
    rows = []
    for each in (
        {"groups": f"{result['kv_heads']} (source)", "loss": loss["source"], "increase": None},
        *loss["by_groups"],
    ):
        numbers = (
            "" if each[key] is None else format(each[key], form)
            for key, form in (("loss", ".4f"), ("increase", "+.4f"))
        )
        rows.append([str(each["groups"]), *numbers])
    show_table(["N", Column("loss", "right"), Column("increase", "right")], rows)
    console.print(
        "These losses are upper bounds of the closed form alone: convert --calibration, with its gradient stages, loses less.",
        soft_wrap=True,
    )
    mark = ("no N fits", "yellow") if advice["groups"] is None else ("recommended", "green")
    console.print(styled(mark, f"  {advice['reason']}"), soft_wrap=True)
    if advice["command"]:
        console.print(f"next     {advice['command']}", soft_wrap=True)
