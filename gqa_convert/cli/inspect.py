"""`gqa-convert inspect`."""

from .options import Calibration, CalibrationTokens, Candidates, Device, Json, Revision, Source


def inspect(
    source: Source,
    calibration: Calibration = None,
    calibration_tokens: CalibrationTokens = None,
    candidates: Candidates = None,
    device: Device = None,
    revision: Revision = None,
    as_json: Json = False,
) -> None:
    """Show what merging K/V heads would cost for every N. Nothing is converted.

    SOURCE runs with merged heads on held-out text of --calibration. The loss that the closed form,
    method factor, adds is an upper bound of what convert --calibration adds.

    Examples:

      gqa-convert inspect ./Llama-2-7b --calibration text.txt
      gqa-convert inspect ./Llama-2-7b --calibration text.txt --candidates 4,8,16
    """
    from gqa_convert.measuring.sensitivity.inspection import inspect_checkpoint, sink_warnings
    from gqa_convert.measuring.tables import figure

    from .console.screen import ProgressScreen, print_json, print_note, say, show_table

    with ProgressScreen() as screen:
        result = inspect_checkpoint(
            source,
            calibration=calibration,
            calibration_tokens=calibration_tokens,
            candidates=candidates,
            device=device,
            revision=revision,
            progress=screen.show,
        )
    if as_json:
        print_json(result.as_json())
        return
    say(
        f"{result.source}: {result.model_type}, {result.source_kv_heads} K/V heads in "
        f"{result.layers} attention layers"
    )
    if result.calibration["warning"]:
        print_note(result.calibration["warning"])
    losses = result.loss
    say(f"measured on {result.calibration['text']}")
    title = (
        f"Loss in nats per token above the source's {figure(losses, 'source')}, on "
        f"{losses.tokens:,} held-out tokens of it: closed form, an upper bound of what fit "
        "loses"
    )
    rows = [
        {"N": str(each.kv_heads), "loss added": figure(each, "increase", "+z.4f")}
        for each in losses.by_kv_heads
    ]
    show_table(title, rows)
    for warning in sink_warnings(losses.by_kv_heads):
        print_note(warning)
