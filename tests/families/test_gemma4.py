"""Gemma 4: heads of two widths, and layers that share keys and values."""

import json
from pathlib import Path

import pytest
import torch

from gqa_convert.checkpoint.source import open_checkpoint
from gqa_convert.conversion.options import CalibrationOptions, ConversionOptions
from gqa_convert.conversion.plan import make_plan
from gqa_convert.conversion.run import convert_checkpoint
from gqa_convert.errors import GroupsError, UnsupportedFamilyError
from gqa_convert.families.loading import cache_name
from gqa_convert.verify.run import verify_checkpoint
from tests.helpers.checkpoints import refused
from tests.helpers.fitting import calibrate_on
from tests.helpers.native import TOKENS, load
from tests.helpers.tiny import make_checkpoint
from tests.helpers.verification import failed

BATCHES = [
    {"input_ids": torch.randint(1, 64, (4, 16), generator=torch.Generator().manual_seed(n))}
    for n in range(4)
]
METHODS = {
    "mean": ConversionOptions(method="mean"),
    "factor": ConversionOptions(method="factor"),
    "fit": ConversionOptions(
        method="fit", calibration=CalibrationOptions("text", steps=2, kl_steps=2)
    ),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shared", [2, 0])
def test_the_stock_class_loads_a_result_that_verify_proves(
    shared: int, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calibrate_on(BATCHES, monkeypatch)
    source = make_checkpoint("gemma4_text", tmp_path / "source", num_kv_shared_layers=shared)
    out = tmp_path / "out"
    convert_checkpoint(source, out, 3, METHODS[method])
    assert failed(verify_checkpoint(out, source)) == {}
    assert [path for path in out.iterdir() if path.suffix == ".py"] == []
    model = load(out)
    cached = model.generate(
        TOKENS[1:], max_new_tokens=2, do_sample=False, return_dict_in_generate=True, pad_token_id=0
    )
    keys = [
        layer.keys
        for layer in getattr(cached, cache_name(model)).layers
        if getattr(layer, "keys", None) is not None
    ]
    assert [(key.shape[1], key.shape[3]) for key in keys] == [(3, 16), (3, 32)] * (
        (6 - shared) // 2
    )


def test_head_widths_that_the_config_states_the_old_way(tmp_path: Path) -> None:
    """As the configs of the Hub do, with `global_head_dim` and without a list of layers."""
    source = make_checkpoint("gemma4_text", tmp_path / "source", num_kv_shared_layers=0)
    config = json.loads((source / "config.json").read_text())
    del config["per_layer_config"]
    (source / "config.json").write_text(json.dumps(config | {"global_head_dim": 32}))
    convert_checkpoint(source, tmp_path / "out", 3, METHODS["mean"])
    assert verify_checkpoint(tmp_path / "out", source).passed


def test_what_the_class_cannot_load_is_refused(tmp_path: Path) -> None:
    source = make_checkpoint("gemma4_text", tmp_path / "source", num_kv_shared_layers=0)
    with refused(GroupsError, "have one number of K/V heads"):
        make_plan(open_checkpoint(source), [3, 3, 4, 3, 3, 3])
    equal = make_checkpoint(
        "gemma4_text", tmp_path / "equal", num_kv_shared_layers=0, attention_k_eq_v=True
    )
    with pytest.raises(UnsupportedFamilyError, match="attention_k_eq_v"):
        make_plan(open_checkpoint(equal), 3)
