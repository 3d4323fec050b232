"""Fitting a checkpoint that has no tokenizer, on random tokens."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import gqa_convert.families.modeling
from gqa_convert.checkpoint.source import open_checkpoint
from gqa_convert.conversion.fit.layer_walk import fit_layers
from gqa_convert.conversion.fit.lockstep import open_model
from gqa_convert.conversion.fit.merged_layers import MergedLayers
from gqa_convert.conversion.fit.records import StageProgress
from gqa_convert.conversion.fit.whole_model import train_together
from gqa_convert.conversion.plan import make_plan
from gqa_convert.conversion.writing import write_weights
from gqa_convert.families.table import FAMILIES
from tests.helpers.tiny import VOCAB

EXACT = 1e-4
"""Distance of logits in float32 after ridge regression on a few hundred tokens."""


def batches_for(
    model: Any, *, rows: int = 2, length: int = 40, count: int = 4, seed: int = 0
) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)

    def text(tokens: int) -> Tensor:
        return torch.randint(3, VOCAB, (rows, tokens), generator=generator)

    if model.config.is_encoder_decoder:
        return [{"input_ids": text(length), "decoder_input_ids": text(length - 7)} for _ in range(count)]
    return [{"input_ids": text(length)} for _ in range(count)]


def fitted(
    source: Path,
    out: Path,
    groups: int = 3,
    *,
    method: str = "fit",
    steps: int = 8,
    batches: Sequence[dict[str, Tensor]] | None = None,
    kl_steps: int = 0,
    kl_rank: int = 0,
    kl_batches: Sequence[dict[str, Tensor]] | None = None,
    **options: Any,
) -> list[Any]:
    """Fit a checkpoint that has no tokenizer; returns each layer's record, and the records of the stage that trains
    all of them together.
    """
    options = (
        {}
        if FAMILIES[json.loads((source / "config.json").read_text())["model_type"]].modeling is None
        else {"native": False}
    ) | options
    plan = make_plan(open_checkpoint(source), groups, method=method, **options)
    model = open_model(source)
    batches = batches or batches_for(model)
    records: list[Any] = []

    def note(_: int, __: int, record: Any) -> None:
        if not isinstance(record, StageProgress):
            records.append(record)

    out.mkdir()
    with MergedLayers(out, {}, keep=False) as store:
        fit_layers(plan, store, model, batches, note, steps=steps)
        if kl_steps:
            seen = kl_batches or batches
            train_together(plan, store, model, seen, seen[:1], note, steps=kl_steps, seed=0, rank=kl_rank)
        write_weights(plan, out, store.tensors(len(plan.merged_layers)), lambda _: None)
    (out / "config.json").write_text(json.dumps(plan.config))
    if plan.modeling:
        (out / f"{plan.modeling.file}.py").write_bytes(
            (Path(gqa_convert.families.modeling.__file__).parent / f"{plan.modeling.file}.py").read_bytes()
        )
    return records
