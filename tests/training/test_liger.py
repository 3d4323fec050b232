"""Liger's kernels: where they are refused, and what transformers is asked for. The kernels themselves need a GPU."""

import importlib.util
import sys
from types import ModuleType
from typing import Any

import pytest
import transformers.integrations.liger

from gqa_convert.errors import LaunchError, MissingExtraError
from gqa_convert.training.liger import check_liger, use_liger
from tests.helpers.tiny import make_config, make_model


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LaunchError, match=r"^liger needs a CUDA GPU, and this run is on cpu: set liger to false$"):
        check_liger("cpu")
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "liger_kernel" else find(name))
    with pytest.raises(MissingExtraError, match=r"pip install 'gqa-convert\[liger\]'$"):
        check_liger("cuda")


def test_transformers_applies_the_kernels_without_their_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    patches = ModuleType("liger_kernel.transformers.monkey_patch")
    patches.MODEL_TYPE_TO_APPLY_LIGER_FN = {"llama": None}  # type: ignore[attr-defined]
    for name in ("liger_kernel", "liger_kernel.transformers"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, patches.__name__, patches)
    asked: list[Any] = []
    monkeypatch.setattr(transformers.integrations.liger, "apply_liger_kernel", lambda *given: asked.append(given))
    model = make_model(make_config("llama"))
    assert use_liger(model)
    assert asked == [(model, {"cross_entropy": False, "fused_linear_cross_entropy": False})]
    assert not use_liger(make_model(make_config("gpt2")))
    assert len(asked) == 1
