"""What waits between layers: it does not grow from layer to layer, and on a GPU that it would fill,
it waits in the machine's memory.
"""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from gqa_convert.conversion import resources
from gqa_convert.conversion.layers import layer_fitting, layer_walk
from gqa_convert.conversion.layers.layer_store import LayerStore, SharedStore
from gqa_convert.conversion.layers.model_loading import open_model
from gqa_convert.conversion.layers.one_layer import FitOptions
from gqa_convert.conversion.options import CalibrationOptions
from tests.helpers import folding_cases as folded
from tests.helpers.fitting import batches_for, plan_of

LAYERS = 12


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    case = folded.build("llama", num_hidden_layers=LAYERS)
    return case.save(tmp_path_factory.mktemp("deep") / "source")


def fit(source: Path, out: Path, look: Any, **options: Any) -> dict[str, bytes]:
    """Fit all layers; the stored files."""
    plan, model = plan_of(source), open_model(source)
    settings = FitOptions(method=plan.merge_method, steps=2, seed=0, validation=1, **options)
    with LayerStore(out, {}, keep=False) as store:
        shared = SharedStore(store)
        layer_fitting.fit_layers(plan, shared, model, batches_for(model), settings, look)
        return {path.name: path.read_bytes() for path in store.path.glob("layer-*")}


def test_it_does_not_grow_by_layer(source: Path, tmp_path: Path) -> None:
    held: list[int] = []

    def look(progress: Any) -> None:
        if progress.layer is not None:
            gc.collect()
            tensors = [each for each in gc.get_objects() if isinstance(each, torch.Tensor)]
            held.append(sum({each.data_ptr(): each.nbytes for each in tensors}.values()))

    assert len(fit(source, tmp_path / "out", look)) == LAYERS
    assert len(held) == LAYERS
    assert max(held[2:]) <= 1.001 * held[1]


def test_on_the_host_it_changes_no_number(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Source and student are told of it."""
    kept: list[bool] = []
    put = layer_walk.Stream.__init__

    def noted(stream: Any, *arguments: Any, on_host: bool = False) -> None:
        put(stream, *arguments, on_host=on_host)
        kept.append(on_host)

    monkeypatch.setattr(layer_walk.Stream, "__init__", noted)
    found = [
        fit(source, tmp_path / str(each), lambda _: None, on_host=each) for each in (False, True)
    ]
    assert found[0] == found[1]
    assert kept == [False, False, True, True]


@pytest.mark.parametrize("gigabytes", [1, 100])
def test_the_free_memory_of_a_gpu_decides_it(
    gigabytes: int, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(source)
    kept = resources._KEPT_BYTES * plan.hidden_size
    tokens = int(resources._KEPT_SHARE * 10**9) // kept + 1
    options = CalibrationOptions("text.txt", tokens=tokens, sequence_length=8)
    monkeypatch.setattr(resources, "free_memory", lambda _: gigabytes * 10**9)
    assert not resources.decide(plan, options).on_host, "a CPU's memory is the host's"
    monkeypatch.setattr(resources, "device_of", lambda _: "cuda")
    monkeypatch.setattr(resources, "multiplies_bfloat16", lambda _: False)
    assert resources.decide(plan, options).on_host is (gigabytes == 1)
    assert not resources.decide(plan, options, processes=2).on_host
