"""Fitting at its limits: what makes large layers cheap changes nothing, and full disks and memories are told in one
line.
"""

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from gqa_convert.conversion.fit import layer_store, one_layer
from gqa_convert.conversion.fit.layer_store import LayerStore
from gqa_convert.conversion.fit.model_loading import open_model
from gqa_convert.errors import DeviceMemoryError, NoSpaceError
from tests.helpers import folding_cases as folded
from tests.helpers.fitting import batches_for, fit, plan_of


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return folded.build("llama").save(tmp_path / "source")


def fit_layers_of(source: Path, out: Path) -> None:
    with LayerStore(out, {}, keep=True) as store:
        fit(plan_of(source), store, batches_for(open_model(source)), steps=2)


def test_a_full_disk_is_told(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(layer_store, "write_whole", full)
    monkeypatch.setattr(LayerStore, "__enter__", lambda store: store.path.mkdir() or store)
    with pytest.raises(NoSpaceError, match=r"disk or quota of .* is full.*make room.*same command") as caught:
        fit_layers_of(source, tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("problem", "told", "words"),
    [
        (MemoryError(), DeviceMemoryError, "out of memory.*--calibration-tokens.*same command"),
        (torch.OutOfMemoryError("CUDA out of memory."), DeviceMemoryError, "out of memory.*--calibration-tokens"),
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

    monkeypatch.setattr(one_layer, "RelativeAdam", failing)
    with pytest.raises(told, match=words) as caught:
        fit_layers_of(source, tmp_path / "out")
    assert "\n" not in str(caught.value)
