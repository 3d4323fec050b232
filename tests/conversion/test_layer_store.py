"""Merged layers on disk: what a killed run leaves, and what the next run makes of it."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from gqa_convert.checkpoint.provenance import Divergence
from gqa_convert.conversion.fit import layer_store
from gqa_convert.conversion.fit.layer_store import LayerRecord, LayerStore, TrainingRecord
from gqa_convert.errors import OutputError

RECORD = LayerRecord(module="a", errors={"a.keys": 0.5, "a.values": 0.25}, head_order=[1, 0])
LAYER = {"weight": np.arange(6, dtype=np.float32).reshape(2, 3), "bias": np.ones(2, ml_dtypes.bfloat16)}
TRAINED = {"weight": -LAYER["weight"], "bias": 2 * LAYER["bias"]}
TRAINING = TrainingRecord(request={"kl_steps": 3}, kl_steps=3, kl=Divergence(0.5, 0.25, ((1, 0.4),)))


def interrupted(folder: Path, work: Callable[[LayerStore], None]) -> None:
    """Work that an error ends, which leaves the store where it is."""

    def work_and_fail(store: LayerStore) -> None:
        work(store)
        raise OSError("gone")

    store = LayerStore(folder / "out", {"made": 1}, keep=True)
    with pytest.raises(OSError, match="gone"), store:
        work_and_fail(store)


def same(found: Any, expected: Any) -> bool:
    return {name: (array.dtype, array.tolist()) for name, array in found.items()} == {
        name: (array.dtype, array.tolist()) for name, array in expected.items()
    }


def test_layers_are_kept_until_the_work_succeeds(tmp_path: Path) -> None:
    interrupted(tmp_path, lambda store: store.write(4, LAYER, RECORD))
    with LayerStore(tmp_path / "out", {"made": 1}, keep=True) as store:
        assert store.record(3) is None
        assert store.record(4) == RECORD
        assert same(store.read(4), LAYER)
    assert list(tmp_path.iterdir()) == []


def test_other_work_and_damage(tmp_path: Path) -> None:
    for number in (0, 1):
        interrupted(tmp_path, lambda store, number=number: store.write(number, LAYER, RECORD))
    damaged = tmp_path / ".out.gqa-merging" / "layer-00001.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-5])

    def look(store: LayerStore) -> None:
        assert (store.record(0), store.record(1)) == (RECORD, None)
        assert {path.name for path, _ in store.locate(2).values()} == {"layer-00000.safetensors"}

    interrupted(tmp_path, look)
    with LayerStore(tmp_path / "out", {"made": 2}, keep=True) as store:
        assert store.record(0) is None


def test_trained_layers_replace_all_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    errors = {"a.output": 0.125, "b.output": 0.5}
    with LayerStore(tmp_path / "out", {}, keep=False) as store:
        for number in range(2):
            store.write(number, LAYER, RECORD)
        put = layer_store.write_whole

        def failing(path: Path, content: bytes) -> None:
            if path.name == "trained-00001.safetensors":
                raise OSError("the disk failed")
            put(path, content)

        monkeypatch.setattr(layer_store, "write_whole", failing)
        with pytest.raises(OSError, match="disk"):
            store.finish(TRAINING, [TRAINED, TRAINED], errors)
        assert store.finished() is None
        assert same(store.read(0), LAYER)
        monkeypatch.setattr(layer_store, "write_whole", put)
        store.finish(TRAINING, [TRAINED, TRAINED], errors)
        assert store.finished() == replace(TRAINING, kl=Divergence(0.5, 0.25, [[1, 0.4]]))  # type: ignore[arg-type]
        assert store.record(0) == replace(RECORD, errors={"a.output": 0.125}), "those before the training are gone"
        assert same(store.read(1), TRAINED)
        store.reopen()
        assert store.finished() is None
        assert same(store.read(1), LAYER)
        store.finish(replace(TRAINING, kl=Divergence(0.5, 0.5)))  # it did not help
        assert same(store.read(1), LAYER)


def test_one_run_at_a_time(tmp_path: Path) -> None:
    with (
        LayerStore(tmp_path / "out", {}, keep=False),
        pytest.raises(OutputError, match="locked"),
        LayerStore(tmp_path / "out", {}, keep=False),
    ):
        pass
    assert list(tmp_path.iterdir()) == []


def test_the_folder_is_made_again_where_its_holder_removes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the moment that this run finds the folder and the moment that it locks it."""
    take, calls = layer_store.try_lock, []

    def late(path: Path) -> int | None:
        calls.append(path)
        if len(calls) == 1:
            path.parent.rmdir()
        return take(path)

    monkeypatch.setattr(layer_store, "try_lock", late)
    with LayerStore(tmp_path / "out", {}, keep=False) as store:
        store.write(0, LAYER, RECORD)
        assert store.record(0) == RECORD
