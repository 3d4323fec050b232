"""Merging on a GPU is the same code on torch's arrays: it gives what numpy's give."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from gqa_convert.conversion.layers import statistics
from gqa_convert.merging.absorption_limits import AbsorptionLimits
from gqa_convert.merging.attention_heads import Heads
from gqa_convert.merging.factorisation import as_numpy
from gqa_convert.merging.head_grouping import find_head_order, reorder_heads
from gqa_convert.merging.merge_layer import Moments, key_trials, merge_layer
from tests.helpers import folding_cases as folded
from tests.helpers.fitting import fitted
from tests.helpers.random_heads import random_heads

LIMITS = AbsorptionLimits(np.array([[0, 1, 2], [3, 4, 5]]))
SIZES = {"head_dim": 10, "value_dim": 7, "inputs": 23, "outputs": 9}


def moment(rng: np.random.Generator, inputs: int) -> Any:
    rows = rng.standard_normal((31, inputs)) * rng.uniform(0.1, 3, inputs)
    return rows.T @ rows / 31


def products(heads: Heads) -> list[Any]:
    """What a layer computes with: queries with keys, outputs with values; directions inside a
    head are free.
    """
    count = len(heads.queries)
    keys = heads.keys.repeat(count // len(heads.keys), axis=0)
    values = heads.values.repeat(count // len(heads.values), axis=0)
    return [heads.queries.swapaxes(-1, -2) @ keys[:, None], heads.outputs @ values[:, None]]


@pytest.mark.parametrize("measured", [True, False])
@pytest.mark.parametrize("first_low", [None, 1])
def test_torch_merges_what_numpy_merges(*, measured: bool, first_low: int | None) -> None:
    rng = np.random.default_rng(0)
    heads = random_heads(rng, 6, 2, **SIZES)
    other = heads.each(torch.from_numpy)
    moments = others = Moments()
    if measured:
        moments = Moments(moment(rng, 23), moment(rng, 23))
        others = Moments(*map(torch.from_numpy, (moments.queries, moments.keys)))

    order = find_head_order(heads, 3, LIMITS, moments)
    assert (find_head_order(other, 3, LIMITS, others) == order).all()
    ours = merge_layer(reorder_heads(heads, order), 3, LIMITS, moments, first_low)
    found = merge_layer(reorder_heads(other, order), 3, LIMITS, others, first_low)
    assert isinstance(found.keys, torch.Tensor)
    for one, another in zip(products(ours), products(found.each(as_numpy)), strict=True):
        np.testing.assert_allclose(another, one, rtol=1e-9, atol=1e-9)

    tried = key_trials(heads, 3, LIMITS, moments)(1)
    retried = key_trials(other, 3, LIMITS, others)(1)
    for one, another in zip(products(tried), products(retried.each(as_numpy)), strict=True):
        np.testing.assert_allclose(another, one, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["llama", "gpt2", "bloom", "qwen3_next", "t5"])
def test_a_fit_with_its_maths_on_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Fused, transposed, gated and biased projections: as a device would merge them, within
    rounding.
    """
    source = folded.build(name).save(tmp_path / "source")
    fitted(source, tmp_path / "numpy", steps=0)
    monkeypatch.setattr(statistics, "merging_array", lambda tensor: tensor)
    kinds = []
    each = Heads.each

    def noted(heads: Heads, change: Any) -> Heads:
        changed = each(heads, change)
        kinds.append(type(changed.keys))
        return changed

    monkeypatch.setattr(Heads, "each", noted)
    fitted(source, tmp_path / "torch", steps=0)
    assert torch.Tensor in kinds
    ours, found = (load_file(tmp_path / at / "model.safetensors") for at in ("numpy", "torch"))
    assert ours.keys() == found.keys()
    for key, array in ours.items():
        np.testing.assert_allclose(
            np.abs(found[key]), np.abs(array), rtol=1e-3, atol=2e-4, err_msg=key
        )
