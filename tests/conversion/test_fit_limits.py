"""Fitting at its limits: what makes large layers cheap changes nothing, and full disks and memories are told in one
line.
"""

import errno
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gqa_convert.conversion.fit import layer_fitting, one_layer
from gqa_convert.conversion.fit.layer_store import LayerStore
from gqa_convert.conversion.fit.low_frequency_search import KeyTrials
from gqa_convert.conversion.fit.model_loading import open_model
from gqa_convert.errors import DeviceMemoryError, NoSpaceError
from gqa_convert.merging.absorption_limits import AbsorptionLimits
from gqa_convert.merging.attention_heads import Heads, repeat_heads
from gqa_convert.merging.merge_layer import Moments, merge_layer
from tests.helpers import folding_cases as folded
from tests.helpers.fitting import batches_for, fit, plan_of
from tests.helpers.random_heads import random_heads


@pytest.mark.parametrize(("heads", "ratio", "groups", "rotated"), [(12, 1, 3, 8), (6, 2, 2, 4)])
def test_trials_of_slow_pairs_give_the_scores_of_merged_layers(
    heads: int, ratio: int, groups: int, rotated: int
) -> None:
    """Products of queries and keys, pair by pair, are those of the merge that works on the inputs themselves."""
    generator = np.random.default_rng(0)
    width, inputs = 8, 25
    sizes = {"head_dim": width, "value_dim": width, "inputs": inputs, "outputs": 20}
    source = random_heads(generator, heads, ratio, **sizes)
    rows = generator.standard_normal((500, inputs)) * generator.random(inputs) + 0.3
    rows[:, -1] = 1
    moments = Moments(rows.T @ rows / 500, rows.T @ rows / 500)
    constraints = AbsorptionLimits(np.arange(rotated).reshape(2, -1))
    trials = KeyTrials(source, groups, constraints, moments)
    for slow in range(rotated // 2 + 1):
        merged = merge_layer(source, groups, constraints, moments, slow)
        expected = replace(merged, keys=repeat_heads(merged.keys, heads))
        found = trials.merged(slow)
        for one, other in zip(
            _scores(expected, constraints, rotated), _scores(found, constraints, rotated), strict=True
        ):
            np.testing.assert_allclose(other, one, atol=1e-11 * max(1.0, float(np.abs(one).max(initial=0))))


def _scores(heads: Heads, constraints: AbsorptionLimits, rotated: int) -> tuple[Any, Any]:
    """[K, r, f, e, e] complex, of rows that turn, and [K, r, e, e] of the rest."""
    real, imaginary = constraints.pairs
    queries, keys = (rows[..., real, :] + 1j * rows[..., imaginary, :] for rows in (heads.queries, heads.keys))
    still = np.einsum("krcd,kce->krde", heads.queries[:, :, rotated:], heads.keys[:, rotated:])
    return np.einsum("krfd,kfe->krfde", queries, keys.conj()), still


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return folded.build("llama").save(tmp_path / "source")


def fit_layers_of(source: Path, out: Path) -> None:
    with LayerStore(out, {}, keep=True) as store:
        fit(plan_of(source), store, batches_for(open_model(source)), steps=2)


@pytest.mark.parametrize("left", [0, 3, 8])
def test_a_full_disk_is_told(source: Path, tmp_path: Path, left: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Room is asked for before it is written to: to write through a mapping for which there is none kills a process."""
    rooms = iter(range(left))

    def allocate(handle: int, start: int, nbytes: int) -> None:
        if next(rooms, None) is None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.truncate(handle, start + nbytes)

    monkeypatch.setattr(os, "posix_fallocate", allocate)
    monkeypatch.setattr(layer_fitting, "KEPT_BYTES", 1 << 60)
    with pytest.raises(
        NoSpaceError, match=r"disk or quota of .* is full.*--calibration-tokens.*same command"
    ) as caught:
        fit_layers_of(source, tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("problem", "told", "words"),
    [
        (MemoryError(), DeviceMemoryError, "out of memory.*--calibration-length.*same command"),
        (torch.OutOfMemoryError("CUDA out of memory."), DeviceMemoryError, "out of memory.*--calibration-length"),
        (RuntimeError("shapes do not fit"), RuntimeError, "^shapes do not fit$"),
    ],
)
def test_too_little_memory_is_told_and_other_errors_stay_what_they_are(
    source: Path,
    tmp_path: Path,
    problem: Exception,
    told: type[Exception],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def failing(*_: Any, **__: Any) -> Any:
        raise problem

    monkeypatch.setattr(one_layer, "fit_gradient", failing)
    with pytest.raises(told, match=words) as caught:
        fit_layers_of(source, tmp_path / "out")
    assert "\n" not in str(caught.value)
