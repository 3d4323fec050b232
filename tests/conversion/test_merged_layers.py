"""The store of merged layers: kept between runs, thrown away when it is of other work, never half-written."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from gqa_convert.checkpoint.provenance import Divergence
from gqa_convert.conversion.fit.merged_layers import MergedLayers
from gqa_convert.conversion.fit.records import CalibratedRecord, TrainingRecord, WeightsRecord
from gqa_convert.errors import OutputError


def interrupted(folder: Path, work: Callable[[MergedLayers], None]) -> None:
    """Work that an error ends, which leaves the store where it is."""
    store = MergedLayers(folder / "out", {"made": 1}, keep=True)
    with pytest.raises(OSError, match="gone"), store:
        _work_and_fail(store, work)


def _work_and_fail(store: MergedLayers, work: Callable[[MergedLayers], None]) -> None:
    work(store)
    raise OSError("gone")


RECORD = WeightsRecord(module="a", keys=0.0, values=0.0)


class TestStore:
    def test_kept_if_asked(self, tmp_path: Path) -> None:
        layer = {"weight": np.arange(6, dtype=np.float32).reshape(2, 3), "bias": np.ones(2, np.float16)}
        record = WeightsRecord(module="a", keys=0.5, values=0.25, head_order=(1, 0))
        interrupted(tmp_path, lambda store: store.write(4, layer, record))
        with MergedLayers(tmp_path / "out", {"made": 1}, keep=True) as store:
            assert store.record(3) is None
            assert store.record(4) == record
            found = store.read(4)
            assert found.keys() == layer.keys()
            assert all(
                np.array_equal(found[name], array) and found[name].dtype == array.dtype for name, array in layer.items()
            )
            del found
        assert list(tmp_path.iterdir()) == []

    def test_other_work_and_damage(self, tmp_path: Path) -> None:
        def look(store: MergedLayers) -> None:
            assert store.record(0) == RECORD
            assert store.record(1) is None
            assert {path for path, _ in store.tensors(2).values()} == {store.path / "layer-00000.safetensors"}

        for number in (0, 1):
            interrupted(
                tmp_path, lambda store, number=number: store.write(number, {"weight": np.ones(3, np.float32)}, RECORD)
            )
        damaged = tmp_path / ".out.gqa-merging" / "layer-00001.safetensors"
        damaged.write_bytes(damaged.read_bytes()[:-5])
        interrupted(tmp_path, look)
        with MergedLayers(tmp_path / "out", {"made": 2}, keep=True) as store:
            assert store.record(0) is None

    def test_records_are_read_as_they_were_written(self, tmp_path: Path) -> None:
        record = CalibratedRecord(module="a", output=0.25, gap_left=0.5, first_low_frequency_pair=None)
        with MergedLayers(tmp_path / "out", {}, keep=False) as store:
            store.write(0, {"weight": np.ones(3, np.float32)}, record)
            assert store.record(0) == record
            training = TrainingRecord(
                kl_steps=3, kl=Divergence(0.5, 0.25), requested_steps=None, kl_rank=0, requested_rank=None
            )
            store.finish({0: {"weight": np.zeros(3, np.float32)}}, training)
            assert store.finished() == training
            assert store.record(0) == record
            assert not store.read(0)["weight"].any()

    def test_one_run_at_a_time(self, tmp_path: Path) -> None:
        with (
            MergedLayers(tmp_path / "out", {}, keep=False),
            pytest.raises(OutputError, match="locked"),
            MergedLayers(tmp_path / "out", {}, keep=False),
        ):
            pass
        assert list(tmp_path.iterdir()) == []
