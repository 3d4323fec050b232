"""The printed result of an inspection."""

from gqa_convert.measuring.results.schemas import InspectionFile, LossAfterFit, QuickFit

from .screen import number, print_note, stdout_console, styled
from .tables import Column, show_table


def show_inspection(result: InspectionFile) -> None:
    """Print each layer's errors by N, darker where they are larger; then losses and a recommendation if there is text."""
    from rich.text import Text

    console = stdout_console()
    layers = result.layers
    highest = (
        max(part or 0.0 for layer in layers for error in layer.errors for part in (error.keys, error.values)) or 1.0
    )

    def shaded(number: float) -> Text:
        light = 1 - 0.75 * number / highest
        return Text(f"{number:.2f}", style=f"black on rgb({round(255 * light)},{round(255 * (0.4 + 0.6 * light))},255)")

    console.print(
        styled(
            (result.source or "", "bold"),
            f": {result.model_type}, {result.kv_heads} K/V heads in {len(layers)} attention layers",
        ),
        soft_wrap=True,
    )
    measured = "on calibration text" if result.calibration else "from the weights alone"
    console.print(f"Relative error of keys (K) and values (V) merged into N heads, {measured}", soft_wrap=True)
    columns = [f"{part}{count}" for part in "KV" for count in result.groups]
    rows: list[list[str | Text]] = []
    for layer in layers:
        errors = [*(error.keys for error in layer.errors), *(error.values for error in layer.errors)]
        pairs = (f"{'+'.join(map(str, pair.heads))} {pair.error:.2f}" for pair in layer.cheapest_pairs)
        rows.append([layer.label or "", *(shaded(error or 0.0) for error in errors), "  ".join(pairs)])
    show_table(["layer", *columns, "cheapest pairs of heads"], rows)
    constraints = {
        "keys": [layer.key_barrier for layer in layers],
        "values": [layer.value_barrier for layer in layers],
    }
    for part, reasons in constraints.items():
        if reason := next(filter(None, reasons), None):
            print_note(f"{part} are averaged where nothing can be folded, since {reason}")
    _show_prediction(result)
    if result.plot:
        console.print(f"plot     {result.plot}", soft_wrap=True)


def _after_fit(predicted: LossAfterFit | None) -> str:
    """A prediction and its interval."""
    if predicted is None:
        return ""
    low, high = number(predicted.low, ".3f"), number(predicted.high, ".3f")
    return f"{number(predicted.increase, '+.3f')} ({low} to {high})"


def _origin(quick: QuickFit, layers: int) -> str:
    """A sentence on what predictions are made from."""
    last = "with" if quick.last_stage else "without"
    return (
        f"what convert --calibration loses, {last} the stage that trains all layers together, is predicted from {quick.steps} gradient steps on "
        f"{len(quick.modules or ())} of {layers} layers for N = {', '.join(map(str, quick.groups))}; the interval in brackets covers the conversions that "
        "this was compared with, of small models"
    )


def _show_prediction(result: InspectionFile) -> None:
    """Print the predicted loss for each N, and the next command."""
    console = stdout_console()
    text, loss, advice = result.calibration, result.loss, result.recommendation
    if text is None or loss is None or advice is None:
        console.print("Weights alone predict no loss and recommend no N: name text with --calibration.", soft_wrap=True)
        return
    if text.warning:
        print_note(text.warning)
    console.print(
        f"Loss in nats per token above the source's {number(loss.source, '.4f')}, on {loss.tokens:,} held-out tokens",
        soft_wrap=True,
    )
    rows = [[str(each.groups), _after_fit(each.after_fit), number(each.increase, "+.4f")] for each in loss.by_groups]
    show_table(["N", Column("predicted loss after fit", "right"), Column("closed form alone", "right")], rows)
    if loss.quick_fit is not None:
        print_note(_origin(loss.quick_fit, len(result.layers)))
    mark = ("no N fits", "yellow") if advice.groups is None else ("recommended", "green")
    console.print(styled(mark, f"  {advice.reason}"), soft_wrap=True)
    if advice.command:
        console.print(f"next     {advice.command}", soft_wrap=True)
    if advice.by_layer:
        console.print(f"by layer {advice.by_layer}", soft_wrap=True)
