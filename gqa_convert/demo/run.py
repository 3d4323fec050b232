"""The whole story on the bundled checkpoint, offline: plan, convert to several N by mean pooling and by calibrated
fitting, verify, measure the loss, uptrain one, draw it."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gqa_convert.checkpoint.atomic_files import write_json
from gqa_convert.checkpoint.paths import local_path
from gqa_convert.checkpoint.publication import check_destination
from gqa_convert.checkpoint.source import open_checkpoint
from gqa_convert.conversion.plan import Plan, make_plan
from gqa_convert.conversion.run import convert_checkpoint
from gqa_convert.errors import InterruptedRunError, OutputError, SourceNotFoundError, StoppedError
from gqa_convert.families.loading import load_causal_lm, load_tokenizer
from gqa_convert.measuring.pictures import is_our_picture, save_picture
from gqa_convert.text.scoring.text_loss import text_loss
from gqa_convert.text.stdlib_text import read_texts, source_files
from gqa_convert.training.run_folder import RunFolder
from gqa_convert.verify import verify_checkpoint

CHECKPOINT = Path(__file__).parents[1] / "demo_checkpoint"
"""A Llama-style model with 12 K/V heads, trained by recipes/demo/train.py."""

GROUPS = (12, 6, 3, 1)
_TOKENS = 40_000

SHOWN = 3
"""The N whose plan is shown, and that is uptrained."""

RESULTS, PLOT, RECIPE, UPTRAINING = "results.json", "loss_and_cache.svg", "uptraining.yaml", "uptraining"
"""What lies in the demo's folder beside the checkpoints `gqa-N` and `gqa-N-fit`."""

_RECIPE_SIGNATURE = "# Written by gqa-convert demo; SHA-256 of what follows: "

UPTRAINING_TOKENS = 200_000
"""Tokens of the uptraining: one in a hundred of those that the checkpoint was trained on."""

CALIBRATION_TOKENS, FIT_STEPS = 20_480, 100
"""Less than `convert` takes by itself, so that the demo ends soon."""

_PRETRAINING_TOKENS = 20_004_864


def run_demo(
    out: str | Path,
    *,
    overwrite: bool = False,
    uptraining_tokens: int = UPTRAINING_TOKENS,
    calibration_tokens: int = CALIBRATION_TOKENS,
    fit_steps: int = FIT_STEPS,
    on_plan: Callable[[Plan], None] = lambda plan: None,
    progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
) -> dict[str, Any]:
    """Convert the bundled checkpoint to several N below `out`, by the mean and by fitting on calibration text, verify
    each, measure its loss on held-out text, and uptrain one of them.

    Args:
        out: folder for the checkpoints `gqa-N` (mean) and `gqa-N-fit`, `results.json` and the plot.
        overwrite: replace what an earlier demo left there.
        uptraining_tokens: how many tokens to uptrain on, with the source as teacher; 0 for none.
        calibration_tokens: of text that the source was trained on, to fit on.
        fit_steps: of each layer's gradient stage.
        on_plan: called with the plan of one of the conversions.
        progress: called with a stage, what is done of it and its total.

    Returns:
        `{"source", "held_out_tokens", "calibration_tokens", "passed", "results": [{"groups", "out",
        "kv_bytes_per_token", "loss", ..., "fit": {"out", "loss", ...}}], "plot", "uptraining"}`, losses in nats per
        token; the same is written to `results.json`.

    Raises:
        OutputError: `out` exists already and is not empty, or (with `overwrite`) the demo would replace what no demo
            wrote.
        InterruptedRunError: the uptraining was stopped.
        SourceNotFoundError: the installed package lacks the checkpoint or Python its library's sources.
    """
    out = local_path(out)
    if not (CHECKPOINT / "config.json").is_file():
        raise SourceNotFoundError(f"{CHECKPOINT} is missing: install the package again")
    check_place(out, overwrite=overwrite)
    on_plan(make_plan(open_checkpoint(CHECKPOINT), SHOWN, method="fit"))
    ids = _held_out_tokens()
    out.mkdir(parents=True, exist_ok=True)
    calibration: dict[str, Any] = {
        "method": "fit",
        "calibration": "python-stdlib",
        "calibration_tokens": calibration_tokens,
        "fit_steps": fit_steps,
        "kl_steps": 0,
    }
    results = []
    for number, groups in enumerate(GROUPS):
        progress("converting, verifying, measuring", number, len(GROUPS))
        result = _converted(out / f"gqa-{groups}", groups, ids, overwrite, {"method": "mean"})
        if groups != GROUPS[0]:
            result["fit"] = _converted(out / f"gqa-{groups}-fit", groups, ids, overwrite, calibration)
        results.append(result)
    summary: dict[str, Any] = {
        "source": str(CHECKPOINT),
        "held_out_tokens": len(ids),
        "calibration_tokens": calibration_tokens,
        "passed": all(each["verified"] for result in results for each in (result, result.get("fit", result))),
        "results": results,
        "results_file": str(out / RESULTS),
        "plot": draw(results, None, out / PLOT),
        "uptraining": None,
    }
    write_json(out / RESULTS, summary)
    if uptraining_tokens:
        summary["uptraining"] = _uptrain(out, uptraining_tokens, progress)
        summary["plot"] = draw(results, summary["uptraining"], out / PLOT)
        write_json(out / RESULTS, summary)
    return summary


def check_place(out: Path, *, overwrite: bool) -> None:
    """Refuse a folder in which the demo would replace what no demo wrote.

    Raises:
        OutputError: it would, or the folder holds something and may not be written to.
    """
    if not out.exists():
        return
    if not out.is_dir():
        raise OutputError(f"{out} is a file: name a folder")
    if any(out.iterdir()) and not (overwrite and any((out / name).exists() for name in (RESULTS, f"gqa-{GROUPS[0]}"))):
        raise OutputError(
            f"{out} exists already: name a new folder, or replace the results of an earlier demo with --overwrite"
        )
    owned: dict[str, Callable[[Path], bool]] = {
        RESULTS: _is_summary,
        PLOT: is_our_picture,
        RECIPE: _is_our_recipe,
        UPTRAINING: lambda path: not RunFolder(path).foreign(),
    }
    for name, is_ours in owned.items():
        path = out / name
        if path.is_symlink() or (path.exists() and not is_ours(path)):
            raise OutputError(
                f"{path} was not written by gqa-convert demo, or was changed since: move it away, or name a new folder"
            )
    for groups in GROUPS:
        for name in (f"gqa-{groups}", f"gqa-{groups}-fit"):
            check_destination(out / name, None, overwrite=overwrite)


def _is_summary(path: Path) -> bool:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and {"held_out_tokens", "results_file", "uptraining"} <= found.keys()


def _signed_recipe(text: str) -> str:
    """A recipe that is known again unless somebody has changed it."""
    return f"{_RECIPE_SIGNATURE}{hashlib.sha256(text.encode()).hexdigest()}\n{text}"


def _is_our_recipe(path: Path) -> bool:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return False
    return text == _signed_recipe(text.partition("\n")[2])


def _converted(folder: Path, groups: int, ids: list[int], overwrite: bool, options: dict[str, Any]) -> dict[str, Any]:
    """One conversion, verified and measured."""
    converted = convert_checkpoint(CHECKPOINT, folder, groups, overwrite=overwrite, **options)
    return {
        "groups": groups,
        "out": str(folder),
        "method": converted["method"],
        "kv_bytes_per_token": converted["kv_bytes_per_token"]["after"],
        "parameters": converted["parameters"]["after"],
        "verified": verify_checkpoint(folder, CHECKPOINT).passed,
        "loss": _loss(folder, ids),
    }


def _uptrain(out: Path, tokens: int, progress: Callable[[str, int, int], None]) -> dict[str, Any]:
    """Distil the source into one of the converted checkpoints; the recipe is left beside the result, to be run again or
    changed.
    """
    import yaml

    from gqa_convert.training.metrics import read_metrics
    from gqa_convert.training.uptrain import uptrain_checkpoint

    run = out / UPTRAINING
    if run.is_dir():
        shutil.rmtree(run)
    recipe = {
        "model": str(out / f"gqa-{SHOWN}-fit"),
        "teacher": str(CHECKPOINT),
        "output": str(run),
        "data": "python-stdlib",
        "evaluation_data": "python-stdlib:held-out",
        "evaluation_tokens": 16384,
        "evaluate_every": 10,
        "alpha": tokens / _PRETRAINING_TOKENS,
        "pretraining_tokens": _PRETRAINING_TOKENS,
        "tokens_per_step": 4096,
        "sequence_length": 512,
        "micro_batch_size": 8,
        "learning_rate": 4e-4,
        "precision": "no",
        "save_every": 1000,
    }
    path = out / RECIPE
    path.write_text(_signed_recipe(yaml.safe_dump(recipe, sort_keys=False)), encoding="utf-8")
    try:
        result = uptrain_checkpoint(
            path, [], on_step=lambda report: progress("uptraining", report.line.step, report.steps)
        )
    except StoppedError:
        raise InterruptedRunError(
            f"stopped while uptraining: gqa-convert uptrain {path} goes on, demo --overwrite starts anew"
        ) from None
    lines = read_metrics(run / "metrics.jsonl")
    points = [
        {"tokens": line["tokens"], "loss": line["evaluation_loss"]} for line in lines if "evaluation_loss" in line
    ]
    curve = [{"tokens": 0, "loss": result["evaluation"]["start"]}, *points]
    kept = ("model", "tokens", "alpha", "evaluation")
    return {"groups": SHOWN, "recipe": str(path), "curve": curve} | {key: result[key] for key in kept}


def _held_out_tokens() -> list[int]:
    """The first tokens of the standard library's held-out sources, as the checkpoint's own tokenizer sees them."""
    texts = read_texts(source_files(held_out=True))
    if not texts:
        raise SourceNotFoundError(
            "this Python has no sources of its standard library to measure on: use one that has them"
        )
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


def draw(results: list[dict[str, Any]], uptraining: dict[str, Any] | None, path: Path) -> str | None:
    """Loss and K/V-cache size against N, and what uptraining brought back; None without matplotlib."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator
    except ImportError:
        return None
    groups = [result["groups"] for result in results]
    figure = Figure(figsize=(12 if uptraining else 8, 3.4), layout="constrained")
    left, middle, *right = figure.subplots(1, 3 if uptraining else 2)
    left.plot(groups, [result["loss"] for result in results], marker="o", color="tab:red", label="mean pooling")
    left.plot(
        groups,
        [result.get("fit", result)["loss"] for result in results],
        marker="o",
        color="tab:blue",
        label="fit, by calibration text",
    )
    left.set_ylabel("held-out loss, nats per token")
    left.set_title("lost: quality before uptraining", fontsize=10)
    left.legend()
    middle.plot(groups, [result["kv_bytes_per_token"] for result in results], marker="o", color="tab:orange")
    middle.set_ylabel("K/V-cache bytes per token")
    middle.set_ylim(bottom=0)
    middle.set_title("gained: a smaller K/V cache", fontsize=10)
    for axes in (left, middle):
        axes.set_xscale("log", base=2)
        axes.set_xlabel("groups N (K/V heads per layer)")
        axes.xaxis.set_major_locator(FixedLocator(groups))
        axes.xaxis.set_major_formatter(FixedFormatter([str(count) for count in groups]))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.grid(alpha=0.3)
    for axes in right:
        assert uptraining
        curve = uptraining["curve"]
        axes.plot(
            [point["tokens"] for point in curve], [point["loss"] for point in curve], marker="o", color="tab:green"
        )
        axes.axhline(uptraining["evaluation"]["source"], color="gray", linestyle="--", label="source")
        axes.set_title(f"recovered: uptraining of N = {uptraining['groups']}", fontsize=10)
        axes.set_xlabel("tokens of uptraining")
        axes.set_ylabel("held-out loss, nats per token")
        axes.grid(alpha=0.3)
        axes.legend()
    save_picture(figure, path)
    return str(path)
