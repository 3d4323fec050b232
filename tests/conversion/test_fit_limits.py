"""Fitting at its limits: what makes large layers cheap changes nothing, and full disks and memories
are told in one line.
"""

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from gqa_convert.conversion.layers import layer_store, one_layer
from gqa_convert.conversion.layers.layer_store import LayerStore
from gqa_convert.conversion.layers.model_loading import open_model
from gqa_convert.conversion.options import CalibrationOptions, ConversionOptions
from gqa_convert.conversion.run import convert_checkpoint
from gqa_convert.errors import DeviceMemoryError, NoSpaceError
from tests.helpers import folding_cases as folded
from tests.helpers.fitting import batches_for, calibrate_on

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
NO_MEMORY = (DeviceMemoryError, "out of memory.*--calibration-tokens.*same command")


@pytest.mark.parametrize(
    ("module", "name", "problem", "told"),
    [
        (
            layer_store,
            "write_whole",
            FULL,
            (NoSpaceError, "disk or quota of .* is full.*make room.*same command"),
        ),
        (one_layer, "RelativeAdam", MemoryError(), NO_MEMORY),
        (one_layer, "RelativeAdam", torch.OutOfMemoryError("CUDA"), NO_MEMORY),
        (
            one_layer,
            "RelativeAdam",
            RuntimeError("shapes do not fit"),
            (RuntimeError, "^shapes do not fit$"),
        ),
    ],
)
def test_full_disks_and_memories_are_told_and_other_errors_stay_what_they_are(
    tmp_path: Path,
    module: Any,
    name: str,
    problem: Exception,
    told: tuple[type[Exception], str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def failing(*_: Any, **__: Any) -> Any:
        raise problem

    source = folded.build("llama").save(tmp_path / "source")
    calibrate_on(batches_for(open_model(source)), monkeypatch)
    monkeypatch.setattr(module, name, failing)
    monkeypatch.setattr(LayerStore, "__enter__", lambda store: store.path.mkdir() or store)
    options = CalibrationOptions(
        "python-stdlib", tokens=8, sequence_length=8, steps=2, device="cpu"
    )
    with pytest.raises(told[0], match=told[1]) as caught:
        convert_checkpoint(source, tmp_path / "out", 3, ConversionOptions(calibration=options))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()
