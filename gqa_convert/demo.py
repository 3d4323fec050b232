"""The whole story on the bundled checkpoint, offline: plan, convert to several N, verify, measure the loss, draw it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gqa_convert.checkpoint.source import open_checkpoint
from gqa_convert.convert import convert_checkpoint
from gqa_convert.errors import OutputError, SourceNotFoundError
from gqa_convert.evaluate import text_loss
from gqa_convert.loading import load_causal_lm, load_tokenizer
from gqa_convert.plan import Plan, make_plan
from gqa_convert.stdlib_text import read_texts, source_files
from gqa_convert.verify import verify_checkpoint

CHECKPOINT = Path(__file__).with_name("demo_checkpoint")
"""A Llama-style model with 12 K/V heads, trained by recipes/demo/train.py."""

GROUPS = (12, 6, 4, 3, 1)
RESULTS = "results.json"
PLOT = "loss_and_cache.svg"
_TOKENS = 40_000

SHOWN = 3
"""The N whose plan is shown."""


def run_demo(
    out: Path,
    *,
    overwrite: bool = False,
    on_plan: Callable[[Plan], None] = lambda plan: None,
    progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
) -> dict[str, Any]:
    """Convert the bundled checkpoint to several N below `out`, verify each, and measure its loss on held-out text.

    Args:
        out: folder for the checkpoints `gqa-N`, `results.json` and the plot.
        overwrite: replace what an earlier demo left there.
        on_plan: called with the plan of one of the conversions.
        progress: called with a stage, what is done of it and its total.

    Returns:
        `{"source", "held_out_tokens", "passed", "results": [{"groups", "out", "kv_bytes_per_token", "loss", ...}], "plot"}`, losses
        in nats per token; the same is written to `results.json`.

    Raises:
        OutputError: `out` exists already and is not empty.
        SourceNotFoundError: the installed package lacks the checkpoint or Python its library's sources.
    """
    if not (CHECKPOINT / "config.json").is_file():
        raise SourceNotFoundError(f"{CHECKPOINT} is missing: install the package again")
    if out.exists() and (not out.is_dir() or (any(out.iterdir()) and not (overwrite and (out / RESULTS).is_file()))):
        raise OutputError(f"{out} exists already: name a new folder, or replace an earlier demo with --overwrite")
    on_plan(make_plan(open_checkpoint(CHECKPOINT), SHOWN))
    ids = _held_out_tokens()
    out.mkdir(parents=True, exist_ok=True)
    results = []
    for number, groups in enumerate(GROUPS):
        progress("converting, verifying, measuring", number, len(GROUPS))
        folder = out / f"gqa-{groups}"
        converted = convert_checkpoint(CHECKPOINT, folder, groups, overwrite=overwrite)
        results.append(
            {
                "groups": groups,
                "out": str(folder),
                "method": converted["method"],
                "kv_bytes_per_token": converted["kv_bytes_per_token"]["after"],
                "parameters": converted["parameters"]["after"],
                "verified": verify_checkpoint(folder, CHECKPOINT).passed,
                "loss": _loss(folder, ids),
            }
        )
    summary = {
        "source": str(CHECKPOINT),
        "held_out_tokens": len(ids),
        "passed": all(result["verified"] for result in results),
        "results": results,
        "results_file": str(out / RESULTS),
        "plot": draw(results, out / PLOT),
    }
    temporary = out / f".{RESULTS}"
    temporary.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    temporary.replace(out / RESULTS)
    return summary


def _held_out_tokens() -> list[int]:
    """The first tokens of the standard library's held-out sources, as the checkpoint's own tokenizer sees them."""
    texts = read_texts(source_files(held_out=True))
    if not texts:
        raise SourceNotFoundError("this Python has no sources of its standard library to measure on: use one that has them")
    tokenizer = load_tokenizer(CHECKPOINT)
    ids: list[int] = []
    for text in texts:
        ids += [*tokenizer.backend_tokenizer.encode(text).ids, tokenizer.eos_token_id]
        if len(ids) >= _TOKENS:
            break
    return ids[:_TOKENS]


def _loss(folder: Path, ids: list[int]) -> float:
    import torch

    model, _ = load_causal_lm(folder, torch.float32)
    return text_loss(model, ids, batch=8)


def draw(results: list[dict[str, Any]], path: Path) -> str | None:
    """Loss and K/V-cache size against N; None without matplotlib."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator
    except ImportError:
        return None
    groups = [result["groups"] for result in results]
    figure = Figure(figsize=(8, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(groups, [result["loss"] for result in results], marker="o", color="tab:blue")
    left.set_ylabel("held-out loss, nats per token")
    left.set_title("lost: quality before uptraining (mean pooling)", fontsize=10)
    right.plot(groups, [result["kv_bytes_per_token"] for result in results], marker="o", color="tab:orange")
    right.set_ylabel("K/V-cache bytes per token")
    right.set_ylim(bottom=0)
    right.set_title("gained: a smaller K/V cache", fontsize=10)
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xlabel("groups N (K/V heads per layer)")
        axes.xaxis.set_major_locator(FixedLocator(groups))
        axes.xaxis.set_major_formatter(FixedFormatter([str(count) for count in groups]))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.grid(alpha=0.3)
    figure.savefig(path)
    return str(path)
