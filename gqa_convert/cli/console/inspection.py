"""What merging would cost, layer by layer."""

from typing import Any

from .screen import stdout_console, styled


def show_inspection(result: dict[str, Any]) -> None:
    """What each layer loses at each N, darker where it is more; losses and a recommendation where text was given."""
    from rich import box
    from rich.table import Table
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
    measured = "on calibration text" if result["calibration"] else "of the weights alone"
    console.print(f"Relative error of keys (K) and values (V) merged into N heads, {measured}", soft_wrap=True)
    columns = [f"{part}{count}" for part in "KV" for count in groups]
    table = Table("layer", *columns, "cheapest pairs of heads", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for layer in layers:
        cells = [shaded(error[part]) for part in ("keys", "values") for error in layer["errors"]]
        pairs = (f"{'+'.join(map(str, pair['heads']))} {pair['error']:.2f}" for pair in layer["cheapest_pairs"])
        table.add_row(layer["label"], *cells, "  ".join(pairs))
    console.print(table)
    for part in ("key", "value"):
        if reason := next((layer[f"{part}_barrier"] for layer in layers if layer[f"{part}_barrier"]), None):
            console.print(
                styled(("note:", "yellow"), f" {part}s are averaged where nothing can be absorbed, since {reason}"),
                soft_wrap=True,
            )
    _show_prediction(result)
    if result["plot"]:
        console.print(f"plot     {result['plot']}", soft_wrap=True)


def _show_prediction(result: dict[str, Any]) -> None:
    """Losses by N, and what to run next."""
    from rich.table import Table

    console = stdout_console()
    if result["calibration"] is None:
        console.print(
            "no loss is predicted and no N recommended from weights alone: name text with --calibration", soft_wrap=True
        )
        return
    loss, advice = result["loss"], result["recommendation"]
    if result["calibration"]["warning"]:
        console.print(styled(("note:", "yellow"), f" {result['calibration']['warning']}"), soft_wrap=True)
    console.print(f"Predicted loss in nats per token over {loss['tokens']:,} held-out tokens", soft_wrap=True)
    table = Table("N", "loss", "increase")
    for each in (
        {"groups": f"{result['kv_heads']} (source)", "loss": loss["source"], "increase": None},
        *loss["by_groups"],
    ):
        numbers = (
            "" if each[key] is None else format(each[key], form)
            for key, form in (("loss", ".4f"), ("increase", "+.4f"))
        )
        table.add_row(str(each["groups"]), *numbers)
    console.print(table)
    console.print(
        "an upper bound: this is the closed form alone, without the closed loop and its gradient stage; convert --calibration loses less",
        soft_wrap=True,
    )
    mark = ("no N fits", "yellow") if advice["groups"] is None else ("recommended", "green")
    console.print(styled(mark, f"  {advice['reason']}"), soft_wrap=True)
    if advice["command"]:
        console.print(f"next     {advice['command']}", soft_wrap=True)
