"""Runs the whole workflow on the bundled checkpoint, offline: plan, convert, verify, measure, uptrain and draw."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from gqa_convert.checkpoint.atomic_files import write_json
from gqa_convert.checkpoint.paths import local_path
from gqa_convert.checkpoint.source import open_checkpoint
from gqa_convert.conversion.plan import Plan, make_plan
from gqa_convert.conversion.run import convert_checkpoint
from gqa_convert.demo.files import (
    CHECKPOINT,
    GROUPS,
    PLOT,
    RESULTS,
    SHOWN,
    check_folder,
    fitted_checkpoint,
    mean_checkpoint,
)
from gqa_convert.demo.picture import draw
from gqa_convert.demo.uptraining import uptrain
from gqa_convert.errors import SourceNotFoundError
from gqa_convert.families.loading import load_causal_lm, load_tokenizer
from gqa_convert.measuring.results.schemas import DemoConversion, DemoFile
from gqa_convert.text.scoring.text_loss import text_loss
from gqa_convert.text.stdlib_text import read_texts, source_files
from gqa_convert.verify import verify_checkpoint

_TOKENS = 40_000
"""The number of held-out tokens on which the loss is measured."""

UPTRAINING_TOKENS = 200_000
"""Tokens of the uptraining: 1 % of those that the checkpoint was trained on."""

CALIBRATION_TOKENS, FIT_STEPS = 20_480, 100
"""Less than the defaults of `convert`, so that the demo takes only minutes."""


def run_demo(
    out: str | Path,
    *,
    overwrite: bool = False,
    uptraining_tokens: int = UPTRAINING_TOKENS,
    calibration_tokens: int = CALIBRATION_TOKENS,
    fit_steps: int = FIT_STEPS,
    on_plan: Callable[[Plan], None] = lambda plan: None,
    progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
) -> DemoFile:
    """Convert the bundled checkpoint to several numbers of K/V heads, by mean pooling and by fitting on calibration text.

    Every result is verified, and its loss is measured on held-out text. One of them is uptrained.

    Args:
        out: the folder for the checkpoints `gqa-N` (mean pooling) and `gqa-N-fit`, `results.json` and the plot.
        overwrite: replace the results of an earlier demo.
        uptraining_tokens: how many tokens to uptrain on, with the source as teacher; 0 to skip the uptraining.
        calibration_tokens: how many tokens to fit on; the source was trained on the same text.
        fit_steps: gradient steps for each layer.
        on_plan: called with the plan of one of the conversions.
        progress: called with a stage, the amount done and the total.

    Returns:
        The results, which are also written to `results.json`.

    Raises:
        OutputError: `out` is not empty, or (with `overwrite`) the demo would replace files that no demo wrote.
        InterruptedRunError: the uptraining was stopped.
        SourceNotFoundError: the package lacks the checkpoint, or Python lacks the sources of its library.
    """
    out = local_path(out)
    if not (CHECKPOINT / "config.json").is_file():
        raise SourceNotFoundError(f"{CHECKPOINT} is missing: install the package again")
    check_folder(out, overwrite=overwrite)
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
        result = _convert(mean_checkpoint(out, groups), groups, ids, overwrite, {"method": "mean"})
        if groups != GROUPS[0]:
            fit = _convert(fitted_checkpoint(out, groups), groups, ids, overwrite, calibration)
            result = result.model_copy(update={"fit": fit})
        results.append(result)
    summary = DemoFile(
        source=str(CHECKPOINT),
        held_out_tokens=len(ids),
        calibration_tokens=calibration_tokens,
        passed=all(each.verified for result in results for each in (result, result.fit or result)),
        results=tuple(results),
        results_file=str(out / RESULTS),
        plot=draw(results, None, out / PLOT),
        uptraining=None,
    )
    write_json(out / RESULTS, summary.as_json())
    if uptraining_tokens:
        uptraining = uptrain(out, uptraining_tokens, progress)
        plot = draw(results, uptraining, out / PLOT)
        summary = summary.model_copy(update={"uptraining": uptraining, "plot": plot})
        write_json(out / RESULTS, summary.as_json())
    return summary


def _convert(folder: Path, groups: int, ids: list[int], overwrite: bool, options: dict[str, Any]) -> DemoConversion:
    """Convert, verify and measure one checkpoint."""
    converted = convert_checkpoint(CHECKPOINT, folder, groups, overwrite=overwrite, hash_weights=True, **options)
    return DemoConversion(
        groups=groups,
        out=str(folder),
        method=converted.plan.effective_method,
        kv_bytes_per_token=converted.plan.cache_bytes_per_token(after=True),
        parameters=converted.plan.parameters_after,
        verified=verify_checkpoint(folder, CHECKPOINT).passed,
        loss=_loss(folder, ids),
    )


def _held_out_tokens() -> list[int]:
    """The first tokens of the held-out part of the standard library's sources."""
    texts = read_texts(source_files(held_out=True))
    if not texts:
        raise SourceNotFoundError(
            "this Python has no sources of its standard library, on which the demo measures losses: use a Python installation that includes them"
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
