"""The demo: the bundled checkpoint with a quarter of its K/V heads, by mean pooling and by fitting,
offline.
"""

from pathlib import Path

from gqa_convert.checkpoint.source import open_checkpoint
from gqa_convert.conversion.options import CalibrationOptions, ConversionOptions
from gqa_convert.conversion.run import convert_checkpoint
from gqa_convert.data.sources import HELD_OUT, as_source
from gqa_convert.errors import InterruptedRunError, OutputError, StoppedError
from gqa_convert.measuring import Progress, no_progress
from gqa_convert.measuring.evaluation.run import EvaluationOptions, evaluate
from gqa_convert.runtime.json_objects import JsonObject
from gqa_convert.runtime.paths import local_path
from gqa_convert.verify import verify_checkpoint

CHECKPOINT = Path(__file__).parent / "demo_checkpoint"
"""A Llama-style model with 12 K/V heads, trained by recipes/demo/train.py."""

GROUPS = 3
"""K/V heads per layer of the results."""

_TEXT = "python-stdlib"
"""The sources of this Python's standard library, without the held-out part: on these the checkpoint
was trained.
"""


def run_demo(
    out: str | Path,
    *,
    calibration_tokens: int = 20_480,
    held_out_tokens: int = 24_000,
    uptraining_tokens: int = 49_152,
    progress: Progress = no_progress,
) -> JsonObject:
    """Convert the bundled checkpoint by mean pooling and by fitting, prove both results, and
    uptrain the fitted one.

    Args:
        out: a new folder for the checkpoints `mean` and `fit`, the recipe `uptraining.yaml` and its
            run `uptraining`.
        calibration_tokens: how many tokens to fit on; fewer than by default, so that the demo takes
            only minutes.
        held_out_tokens: on how many tokens the loss of every model is measured.
        uptraining_tokens: how many tokens to uptrain on, with the source as teacher.
        progress: called as the work advances.

    Returns:
        `results` has a row for the source, both results and the uptrained one: `name`, `model` (a
        folder), `kv_heads` (K/V heads per layer), `kv_bytes_per_token`, `loss` in nats per token of
        held-out text, and whether it was `verified` (None where there is nothing to prove).

    Raises:
        OutputError: `out` exists.
        InterruptedRunError: the uptraining was stopped.
        DataError: Python lacks the sources of its library.
    """
    out = local_path(out)
    if out.exists():
        raise OutputError(f"{out} exists already: name a new folder, as in gqa-convert demo FOLDER")
    out.mkdir(parents=True)
    text = CalibrationOptions(
        _TEXT, tokens=calibration_tokens, kl_steps=0, mix=False
    )  # 200 steps take two minutes
    conversions = {
        "mean": ConversionOptions(method="mean"),
        "fit": ConversionOptions(calibration=text),
    }
    models = {"source": CHECKPOINT}
    verified: JsonObject = {}
    for name, options in conversions.items():
        progress("converting and verifying", len(verified), 2)
        models[name] = out / name
        convert_checkpoint(CHECKPOINT, models[name], GROUPS, options)
        verified[name] = verify_checkpoint(models[name], CHECKPOINT).passed
    progress("converting and verifying", 2, 2)
    models["fit, uptrained"] = _uptrain(out, uptraining_tokens, progress)
    held_out = EvaluationOptions(tokens=held_out_tokens, batch=8)
    scores = evaluate(
        list(map(str, models.values())), as_source(HELD_OUT), held_out, progress=progress
    ).results
    results = []
    for (name, folder), found in zip(models.items(), scores, strict=True):
        row = {
            "name": name,
            "model": str(folder),
            "kv_heads": open_checkpoint(folder).config["num_key_value_heads"],
            "kv_bytes_per_token": found.kv_bytes_per_token,
            "loss": found.loss,
            "verified": verified.get(name),
        }
        results.append(row)
    return {
        "calibration_tokens": calibration_tokens,
        "held_out_tokens": scores[0].tokens,
        "uptraining_tokens": uptraining_tokens,
        "passed": all(verified.values()),
        "results": results,
    }


def _uptrain(out: Path, tokens: int, progress: Progress) -> Path:
    """Uptrain the fitted checkpoint with the source as teacher; return the result."""
    import yaml

    from gqa_convert.training.uptrain import uptrain_checkpoint

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
    path = out / "uptraining.yaml"
    path.write_text(yaml.safe_dump(recipe, sort_keys=False), encoding="utf-8")
    try:
        run = uptrain_checkpoint(
            path, [], on_step=lambda metrics, steps: progress("uptraining", metrics.step, steps)
        )
    except StoppedError:
        raise InterruptedRunError(
            f"stopped while uptraining: gqa-convert uptrain {path} continues"
        ) from None
    assert run is not None
    return Path(run.model)
