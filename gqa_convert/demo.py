"""The demo: the bundled checkpoint with a quarter of its K/V heads, by mean pooling and by fitting, offline."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from gqa_convert.checkpoint.atomic_files import write_whole
from gqa_convert.checkpoint.paths import local_path
from gqa_convert.checkpoint.source import open_checkpoint
from gqa_convert.conversion.options import CalibrationOptions, ConversionOptions
from gqa_convert.conversion.plan import make_plan
from gqa_convert.conversion.run import convert_checkpoint
from gqa_convert.errors import InterruptedRunError, OutputError, SourceNotFoundError, StoppedError
from gqa_convert.verify import verify_checkpoint

CHECKPOINT: Final = Path(__file__).parent / "demo_checkpoint"
"""A Llama-style model with 12 K/V heads, trained by recipes/demo/train.py."""

GROUPS: Final = 3
"""K/V heads per layer of the results."""

_TEXT = "python-stdlib"
"""The sources of this Python's standard library, without the held-out part: on these the checkpoint was trained."""

Progress = Callable[[str, int, int], None]
"""Called with a stage, the amount done and the total."""


def run_demo(
    out: str | Path,
    *,
    calibration_tokens: int = 20_480,
    held_out_tokens: int = 40_000,
    uptraining_tokens: int = 122_880,
    progress: Progress = lambda stage, done, total: None,
) -> dict[str, Any]:
    """Convert the bundled checkpoint by mean pooling and by fitting, prove both results, and uptrain the fitted one.

    Args:
        out: a new folder for the checkpoints `mean` and `fit`, the recipe `uptraining.yaml` and its run `uptraining`; or
            that of a demo that was interrupted, whose results are kept.
        calibration_tokens: how many tokens to fit on; fewer than by default, so that the demo takes only minutes.
        held_out_tokens: on how many tokens the loss of every model is measured.
        uptraining_tokens: how many tokens to uptrain on, with the source as teacher.
        progress: called as the work advances.

    Returns:
        `results` has a row for the source, both results and the uptrained one: `name`, `model` (a folder), `groups` (K/V
        heads per layer), `kv_bytes_per_token`, `loss` in nats per token of held-out text, and whether it was `verified`
        (None where there is nothing to prove).

    Raises:
        OutputError: `out` holds something else.
        InterruptedRunError: the uptraining was stopped.
        SourceNotFoundError: Python lacks the sources of its library.
    """
    out = local_path(out)
    recipe = _recipe(out, uptraining_tokens)
    path = out / "uptraining.yaml"
    is_demo = path.is_file() and path.read_bytes() == recipe
    if out.exists() and not is_demo and (not out.is_dir() or any(out.iterdir())):
        raise OutputError(f"{out} exists already: name a new folder, as in gqa-convert demo FOLDER")
    ids = _held_out_ids(held_out_tokens)
    out.mkdir(parents=True, exist_ok=True)
    write_whole(path, recipe)  # first: it marks the folder as a demo's
    text = CalibrationOptions(_TEXT, tokens=calibration_tokens, kl_steps=0, mix=False)  # 200 steps take two minutes
    conversions = {"mean": ConversionOptions(method="mean"), "fit": ConversionOptions(calibration=text)}
    plan = make_plan(open_checkpoint(CHECKPOINT), GROUPS)
    sizes = plan.kv_cache_bytes()
    results = [_row("source", CHECKPOINT, plan.source_kv_heads, sizes.before, ids)]
    for name, options in conversions.items():
        progress("converting, verifying and measuring", len(results), 3)
        if not (out / name).exists():
            convert_checkpoint(CHECKPOINT, out / name, GROUPS, options)
        verified = verify_checkpoint(out / name, CHECKPOINT).passed
        results.append(_row(name, out / name, GROUPS, sizes.after, ids) | {"verified": verified})
    progress("converting, verifying and measuring", 3, 3)
    model = _uptrain(path, progress)
    results.append(_row("fit, uptrained", model, GROUPS, sizes.after, ids))
    return {
        "calibration_tokens": calibration_tokens,
        "held_out_tokens": len(ids),
        "uptraining_tokens": uptraining_tokens,
        "passed": all(row["verified"] is not False for row in results),
        "results": results,
    }


def _held_out_ids(count: int) -> list[int]:
    """Return the first tokens of the held-out part of the standard library's sources."""
    from gqa_convert.data.stdlib_text import read_texts, source_files
    from gqa_convert.families.loading import load_tokenizer

    tokenizer = load_tokenizer(CHECKPOINT)
    ids: list[int] = []
    for text in read_texts(source_files(held_out=True)):
        if len(ids) < count:
            ids += [*tokenizer.backend_tokenizer.encode(text).ids, tokenizer.eos_token_id]
    if not ids:
        raise SourceNotFoundError(
            "this Python has no sources of its standard library, on which the demo measures losses: use a Python installation that includes them"
        )
    return ids[:count]


def _row(name: str, folder: Path, groups: int, kv_bytes_per_token: int, ids: list[int]) -> dict[str, Any]:
    import torch

    from gqa_convert.families.loading import load_model
    from gqa_convert.losses.text_loss import text_loss

    model, _ = load_model(folder, torch.float32)
    return {
        "name": name,
        "model": str(folder),
        "groups": groups,
        "kv_bytes_per_token": kv_bytes_per_token,
        "loss": text_loss(model, ids, batch=8),
        "verified": None,
    }


def _recipe(out: Path, tokens: int) -> bytes:
    """The recipe that uptrains the fitted checkpoint with the source as teacher."""
    import yaml

    recipe = {
        "model": str(out / "fit"),
        "teacher": str(CHECKPOINT),
        "output": str(out / "uptraining"),
        "data": _TEXT,
        "tokens": tokens,
        "tokens_per_step": 4096,
        "sequence_length": 512,
        "micro_batch_size": 8,
        "learning_rate": 4e-4,
        "precision": "no",
        "save_every": 1000,
    }
    return yaml.safe_dump(recipe, sort_keys=False).encode()


def _uptrain(path: Path, progress: Progress) -> Path:
    """Uptrain by a recipe; return the result."""
    from gqa_convert.training.uptrain import uptrain_checkpoint

    try:
        run = uptrain_checkpoint(path, [], on_step=lambda metrics, steps: progress("uptraining", metrics.step, steps))
    except StoppedError:
        raise InterruptedRunError(
            f"stopped while uptraining: the same command, or gqa-convert uptrain {path}, continues"
        ) from None
    assert run is not None
    return Path(run.model)
