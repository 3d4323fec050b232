"""Writes a checkpoint with custom code as a checkpoint of a stock type that computes the same; the folder appears
whole or not at all.
"""

import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from gqa_convert.checkpoint.ownership import RESTATED, WRITTEN, list_written
from gqa_convert.checkpoint.paths import local_path
from gqa_convert.checkpoint.publication import StagedFolder, check_destination, sweep
from gqa_convert.checkpoint.source import open_local
from gqa_convert.conversion.restating.planning import StockPlan, plan_stock
from gqa_convert.conversion.sidecar_files import write_json, write_sidecar_files
from gqa_convert.conversion.writing import Progress, write_weights


def restate_checkpoint(
    source: str | Path,
    out: str | Path,
    *,
    revision: str | None = None,
    overwrite: bool = False,
    on_plan: Callable[[StockPlan], None] = lambda plan: None,
    progress: Progress = lambda nbytes: None,
) -> dict[str, Any]:
    """Write `source` as a checkpoint that transformers' own classes load, with as many K/V heads as before.

    Args:
        source: a local folder or a Hub id, of one of the types in `families.RESTATED`.
        out: the folder to make.
        revision: branch, tag or commit on the Hub.
        overwrite: replace an existing checkpoint folder once the new one is complete.
        on_plan: called before anything is written.
        progress: called with every number of weight bytes written.

    Returns:
        Both model types, the folder, and notes on what differs.

    Raises:
        GQAConvertError: one of its subclasses for every mistake; nothing is left behind then.
    """
    out = local_path(out)
    checkpoint = open_local(source, revision, plan_stock)
    plan = plan_stock(checkpoint)
    check_destination(out, checkpoint.folder, overwrite=overwrite)
    on_plan(plan)
    sweep(Path(os.path.realpath(out)).parent)
    with ExitStack() as stack:
        staged = stack.enter_context(StagedFolder(out))
        write_weights(plan, staged.path, progress)
        write_sidecar_files(plan, staged.path)
        made = {
            "source": checkpoint.source_id,
            "revision": checkpoint.revision,
            "model_type": plan.record.model_type,
            "result_model_type": plan.record.stock,
        }
        write_json(staged.path / RESTATED, made | {WRITTEN: list_written(staged.path)})
        staged.publish(overwrite=overwrite)
    return {**made, "out": str(out), "notes": list(plan.notes)}
