"""Fitting a checkpoint that has no tokenizer, on random tokens."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import log_softmax

from gqa_convert.checkpoint.provenance import CalibrationRecord, Divergence
from gqa_convert.checkpoint.source import open_checkpoint
from gqa_convert.conversion import fitting
from gqa_convert.conversion.calibration.streams import Calibration, digest_of
from gqa_convert.conversion.fitting import FitWork, fit_checkpoint
from gqa_convert.conversion.layers.layer_store import LayerRecord, LayerStore, layer_key
from gqa_convert.conversion.layers.model_loading import open_model
from gqa_convert.conversion.options import CalibrationOptions
from gqa_convert.conversion.plan import Plan, make_plan
from gqa_convert.conversion.progress import FitProgress
from gqa_convert.conversion.resources import decide
from gqa_convert.conversion.writing import write_index, write_weights
from gqa_convert.families.table import FAMILIES
from tests.helpers.tiny import VOCAB

EXACT = 1e-4
"""Distance of logits in float32 after ridge regression on a few hundred tokens."""

Batches = Sequence[dict[str, Tensor]]


def batches_for(model: Any, *, count: int = 4) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)

    def text(tokens: int) -> Tensor:
        return torch.randint(3, VOCAB, (2, tokens), generator=generator)

    if model.config.is_encoder_decoder:
        return [{"input_ids": text(40), "decoder_input_ids": text(33)} for _ in range(count)]
    return [{"input_ids": text(40)} for _ in range(count)]


def plan_of(source: Path, groups: int = 3, *, method: str = "fit", **options: Any) -> Plan:
    """The plan of a checkpoint that keeps its own type."""
    if (
        FAMILIES[json.loads((source / "config.json").read_text())["model_type"]].modeling
        is not None
    ):
        options = {"native": False} | options
    return make_plan(open_checkpoint(source), groups, method=method, **options)


def fit(
    plan: Plan,
    store: LayerStore,
    batches: Batches,
    held_out: Batches = (),
    fresh: Batches = (),
    *,
    steps: int = 8,
    **options: Any,
) -> tuple[list[LayerRecord], int, Divergence | None]:
    """Fit a plan's layers on the CPU: the record of each; the steps of the last stage, none unless
    it is asked to take some; and the divergence before and after it, None without held-out batches.
    """
    calibration = Calibration(list(batches), 0, "", "", held_out=list(held_out), fresh=list(fresh))
    asked = CalibrationOptions(
        steps=steps, device="cpu", tokens=8, sequence_length=8, **{"kl_steps": 0} | options
    )
    decisions = decide(plan, asked)
    steps_together = decisions.last_stage_steps(plan, asked) if held_out else 0
    record = CalibrationRecord(text="", tokens=0, sequence_length=0, seed=0, steps=steps, digest="")
    records = []

    def note(progress: FitProgress) -> None:
        if progress.layer is not None:
            records.append(progress.layer)

    work = FitWork(
        plan=plan,
        options=asked,
        calibration=calibration,
        record=record,
        steps=steps_together,
        decisions=decisions,
    )
    found = fit_checkpoint(work, store, note)
    return records, found.kl_steps, found.kl


def divergence(source: Any, result: Any, batches: list[dict[str, Tensor]]) -> float:
    """KL(source || result) in nats per position, by the definition."""
    total, count = 0.0, 0
    with torch.no_grad():
        for batch in batches:
            p, q = (
                log_softmax(model(**batch, use_cache=False).logits.double(), -1)
                for model in (source, result)
            )
            each = (p.exp() * (p - q)).sum(-1)
            total, count = total + float(each.sum()), count + each.numel()
    return total / count


def calibrate_on(batches: Batches, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every calibration yield these batches, the last of which is held out."""
    *learned, held_out = batches
    tokens = sum(batch["input_ids"].numel() for batch in learned)
    made = Calibration(learned, tokens, digest_of([], learned), "batches", held_out=[held_out])
    monkeypatch.setattr(fitting, "prepare_calibration", lambda *_: made)


def files_of(store: LayerStore, plan: Plan) -> dict[str, Path]:
    """The file of each of a fitted plan's tensors."""
    found = {}
    for key in (*(layer_key(number) for number in range(len(plan.merged_layers))), "together"):
        found |= store.files(key) if store.record(key) is not None else {}
    return found


def fitted(
    source: Path,
    out: Path,
    groups: int = 3,
    *,
    batches: Batches | None = None,
    fresh: Batches = (),
    steps: int = 8,
    kl_steps: int = 0,
    **options: Any,
) -> tuple[list[LayerRecord], int, Divergence]:
    """Convert a checkpoint that has no tokenizer, as `fit` does; the first batch is held out
    too.
    """
    plan = plan_of(source, groups, **options)
    batches = batches or batches_for(open_model(source))
    held_out = (fresh or batches)[:1]
    out.mkdir()
    with LayerStore(out, {}, keep=False) as store:
        found = fit(plan, store, batches, held_out, fresh, steps=steps, kl_steps=kl_steps)
        write_weights(plan, out, files_of(store, plan), lambda _: None)
    write_index(out, {file.file: file.names for file in plan.files}, {})
    (out / "config.json").write_text(json.dumps(plan.config))
    if plan.modeling:
        for file in plan.modeling.files:
            shutil.copyfile(file, out / file.name)
    return found
