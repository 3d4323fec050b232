"""The summary at the end of a conversion."""

import shlex
from typing import Any

from .plan import CACHES
from .screen import print_note, size, stdout_console, styled

_POOLING = ("mean", "first", "random")
"""Methods after which quality is usually poor without uptraining."""


def show_conversion(result: dict[str, Any]) -> None:
    """Print what was converted, the sizes before and after, and the next command."""
    console = stdout_console()
    layers = f"in {result['attention_layers']} layers"
    if result["method"] == "copy":
        done = f"  {result['groups']} K/V heads {layers}, as in the source: the weights are a copy"
    else:
        done = (
            f"  {result['source_kv_heads']} -> {result['groups']} K/V heads ({result['method']}) {layers}, "
            f"{len(result['changes'])} tensors changed"
        )
    console.print(styled(("done", "green"), done), soft_wrap=True)
    sizes = [(CACHES[key], result[key]) for key in CACHES if key in result] + [("weights", result["weight_bytes"])]
    rows = [(label, f"{size(both['before'])} -> {size(both['after'])}") for label, both in sizes]
    rows.append(("folder", result["out"]))
    if result["modeling_file"]:
        rows.append(
            (
                "load it",
                f"from_pretrained(..., trust_remote_code=True), by {result['modeling_file']} beside the weights",
            )
        )
    rows.append(("next", shlex.join(["gqa-convert", "verify", result["out"], "--source", result["source"]])))
    width = max(len(label) for label, _ in rows)
    for label, text in rows:
        console.print(f"      {label:<{width}}  {text}", soft_wrap=True)
    if result["method"] in _POOLING:
        measure = shlex.join(["gqa-convert", "evaluate", result["source"], result["out"], "--data"])
        print_note(f"quality is usually poor after {result['method']} without uptraining; measure it: {measure} TEXT")
        print_note("convert --calibration TEXT loses far less")
