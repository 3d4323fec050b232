"""Merged layers on disk: what a killed run leaves, and what the next run makes of it."""

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from gqa_convert.conversion.layers import layer_store
from gqa_convert.conversion.layers.layer_store import LayerRecord, LayerStore, layer_key
from gqa_convert.errors import OutputError

RECORD = {"module": "a", "errors": {"a.keys": 0.5, "a.values": 0.25}, "head_order": [1, 0]}
LAYER = {
    "weight": np.arange(6, dtype=np.float32).reshape(2, 3),
    "bias": np.ones(2, ml_dtypes.bfloat16),
}


@contextmanager
def interrupted(folder: Path) -> Iterator[LayerStore]:
    """A store in which an error ends the work, which leaves it where it is."""
    with suppress(OSError), LayerStore(folder / "out", {"made": 1}, keep=True) as store:
        yield store
        raise OSError("gone")


def test_layers_are_kept_until_the_work_succeeds(tmp_path: Path) -> None:
    with interrupted(tmp_path) as store:
        store.write(layer_key(4), LAYER, RECORD)
    with LayerStore(tmp_path / "out", {"made": 1}, keep=True) as store:
        assert store.layer(3) is None
        assert store.layer(4) == LayerRecord(**RECORD)
        found = store.read(layer_key(4))
    assert {name: (array.dtype, array.tolist()) for name, array in found.items()} == {
        name: (array.dtype, array.tolist()) for name, array in LAYER.items()
    }
    assert list(tmp_path.iterdir()) == []


def test_other_work_and_damage(tmp_path: Path) -> None:
    with interrupted(tmp_path) as store:
        for number in (0, 1):
            store.write(layer_key(number), LAYER, RECORD)
    damaged = tmp_path / ".out.gqa-merging" / "layer-00001.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-5])
    with interrupted(tmp_path) as store:
        assert (store.record(layer_key(0)), store.layer(1)) == (RECORD, None)
        assert {path.name for path in store.files(layer_key(0)).values()} == {
            "layer-00000.safetensors"
        }


def test_layers_of_other_work_are_refused_and_stay(tmp_path: Path) -> None:
    with interrupted(tmp_path) as store:
        store.write(layer_key(0), LAYER, RECORD)
        store.check("text", {"digest": "one", "tokens": 5})
    kept = tmp_path / ".out.gqa-merging"
    told = re.escape(f"{kept} keeps 1 merged layers of an interrupted run with another made: ")
    with (
        pytest.raises(OutputError, match=told),
        LayerStore(tmp_path / "out", {"made": 2}, keep=True),
    ):
        pass
    with LayerStore(tmp_path / "out", {"made": 1}, keep=True) as store:
        with pytest.raises(OutputError, match="another digest: repeat"):
            store.check("text", {"digest": "two", "tokens": 5})
        store.check("text", {"digest": "one", "tokens": 5})
        assert store.layer(0) == LayerRecord(**RECORD)
    with interrupted(tmp_path) as store:
        store.write(layer_key(0), LAYER, RECORD)
    (kept / "state.json").unlink()
    with (
        pytest.raises(OutputError, match="another made"),
        LayerStore(tmp_path / "out", {"made": 1}, keep=True),
    ):
        pass


def test_the_first_run_decides_once_it_has_stored_something(tmp_path: Path) -> None:
    with interrupted(tmp_path) as store:
        assert store.settle("decisions", {"no_own_text": ""}) == {"no_own_text": ""}
        assert store.settle("decisions", {"no_own_text": "now"}) == {"no_own_text": ""}
        store.write(layer_key(0), LAYER, RECORD)
    with interrupted(tmp_path) as store:
        assert store.settle("decisions", {"no_own_text": "later"}) == {"no_own_text": ""}
        store.discard(layer_key(0))
    (tmp_path / ".out.gqa-merging").mkdir()
    with LayerStore(tmp_path / "out", {"made": 1}, keep=True) as store:
        assert store.settle("decisions", {"no_own_text": "new"}) == {"no_own_text": "new"}


def test_a_store_that_cannot_be_opened_leaves_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError("full")

    with monkeypatch.context() as patch:
        patch.setattr(layer_store, "write_whole", full)
        with pytest.raises(OSError, match="full"):
            LayerStore(tmp_path / "out", {}, keep=True).__enter__()
    assert list(tmp_path.iterdir()) == []
    with LayerStore(tmp_path / "out", {}, keep=True):
        pass


def test_what_is_written_is_whole_or_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LayerStore(tmp_path / "out", {}, keep=False) as store:
        store.write("together", {}, {"kl_steps": 0})
        assert (store.record("together"), store.read("together")) == ({"kl_steps": 0}, {})
        store.discard("together")
        assert store.record("together") is None

        def failing(*_: Any) -> None:
            raise OSError("the disk failed")

        monkeypatch.setattr(layer_store, "write_whole", failing)
        with pytest.raises(OSError, match="disk"):
            store.write("together", LAYER, RECORD)
        assert store.record("together") is None


def test_one_run_at_a_time(tmp_path: Path) -> None:
    first, second = (LayerStore(tmp_path / "out", {}, keep=False) for _ in range(2))
    with first, pytest.raises(OutputError, match="locked"), second:
        pass
    assert list(tmp_path.iterdir()) == []


def test_the_folder_is_made_again_where_its_holder_removes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the moment that this run finds the folder and the moment that it locks it."""
    take, calls = layer_store.try_lock, []

    def late(path: Path) -> int | None:
        calls.append(path)
        if len(calls) == 1:
            path.parent.rmdir()
        return take(path)

    monkeypatch.setattr(layer_store, "try_lock", late)
    with LayerStore(tmp_path / "out", {}, keep=False) as store:
        store.write("a", LAYER, RECORD)
        assert store.record("a") == RECORD
