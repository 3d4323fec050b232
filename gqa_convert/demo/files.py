"""The files of a demo, and a check of which of them a new demo may replace."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

from gqa_convert.checkpoint.publication import check_destination
from gqa_convert.errors import OutputError
from gqa_convert.measuring.pictures import is_our_picture
from gqa_convert.training.run_folder import RunFolder

CHECKPOINT = Path(__file__).parents[1] / "demo_checkpoint"
"""A Llama-style model with 12 K/V heads, trained by recipes/demo/train.py."""

GROUPS = (12, 6, 3, 1)
"""The numbers of K/V heads that the demo converts to."""

SHOWN = 3
"""The number of K/V heads whose plan is shown and whose checkpoint is uptrained."""

RESULTS, PLOT, RECIPE, UPTRAINING = "results.json", "loss_and_cache.svg", "uptraining.yaml", "uptraining"
"""The names of the files and folders that the demo writes beside the checkpoints."""

_RECIPE_SIGNATURE = "# Written by gqa-convert demo; SHA-256 of what follows: "


def mean_checkpoint(out: Path, groups: int) -> Path:
    """The folder of the checkpoint made by mean pooling."""
    return out / f"gqa-{groups}"


def fitted_checkpoint(out: Path, groups: int) -> Path:
    """The folder of the checkpoint made by fitting."""
    return out / f"gqa-{groups}-fit"


def check_folder(out: Path, *, overwrite: bool) -> None:
    """Refuse a folder in which the demo would replace files that no demo wrote.

    Raises:
        OutputError: the demo would replace such a file, or the folder is not empty and `overwrite` is off.
    """
    if not out.exists():
        return
    if not out.is_dir():
        raise OutputError(f"{out} is a file: name a folder")
    if any(out.iterdir()) and not (
        overwrite and any(path.exists() for path in (out / RESULTS, mean_checkpoint(out, GROUPS[0])))
    ):
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
        for folder in (mean_checkpoint(out, groups), fitted_checkpoint(out, groups)):
            check_destination(folder, None, overwrite=overwrite)


def _is_summary(path: Path) -> bool:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and {"held_out_tokens", "results_file", "uptraining"} <= found.keys()


def signed_recipe(text: str) -> str:
    """A recipe with a signature, which a later demo recognises unless the recipe has been changed."""
    return f"{_RECIPE_SIGNATURE}{hashlib.sha256(text.encode()).hexdigest()}\n{text}"


def _is_our_recipe(path: Path) -> bool:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return False
    return text == signed_recipe(text.partition("\n")[2])
