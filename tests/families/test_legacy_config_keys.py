"""The config keys of transformers 4 beside those of transformers 5."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from gqa_convert.families.legacy_config_keys import legacy_config_keys
from gqa_convert.families.table import FAMILIES
from tests.helpers.tiny import make_config


def test_legacy_keys() -> None:
    scaled = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 5e5, "partial_rotary_factor": 0.5}
    assert legacy_config_keys({"rope_parameters": scaled, "dtype": "bfloat16"}) == {
        "rope_theta": 5e5,
        "partial_rotary_factor": 0.5,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
        "torch_dtype": "bfloat16",
    }
    stated = {
        "rope_theta": 1.0,
        "rope_scaling": {"type": "linear"},
        "partial_rotary_factor": 1.0,
        "torch_dtype": "float16",
    }
    assert legacy_config_keys({"rope_parameters": scaled, "dtype": "bfloat16"} | stated) == {}
    kinds = {
        "sliding_attention": {"rope_theta": 1e4},
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    }
    assert legacy_config_keys({"model_type": "gemma3_text", "rope_parameters": kinds}) == {
        "rope_local_base_freq": 1e4,
        "rope_theta": 1e6,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }
    assert legacy_config_keys({"model_type": "olmo3", "rope_parameters": kinds}) == {}  # one base can't say both
    one_base = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0},
    }
    assert legacy_config_keys({"model_type": "lfm3", "rope_parameters": one_base}) == {}
    truncated = {"rope_type": "yarn", "factor": 4.0, "truncate": False}
    assert legacy_config_keys({"model_type": "olmo2", "rope_parameters": truncated}) == {
        "rope_scaling": truncated
    }  # it has no other place
    assert legacy_config_keys({"rope_parameters": {"type": "linear", "factor": 4.0}}) == {
        "rope_scaling": {"type": "linear", "factor": 4.0}
    }
    assert legacy_config_keys({"rope_parameters": None, "dtype": None}) == {}


SCALING: dict[str, dict[str, Any]] = {
    "plain": {},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
}


@pytest.mark.parametrize("kind", SCALING)
def test_legacy_keys_change_nothing_for_transformers_5(kind: str, tmp_path: Path) -> None:
    """Of every type: the config with them is the one without them."""
    seen = 0
    for model_type in (name for name, family in FAMILIES.items() if family.native and name in CONFIG_MAPPING):
        rotary = make_config(model_type).to_dict().get("rope_parameters")
        if not isinstance(rotary, dict) or any(isinstance(value, dict) for value in rotary.values()):
            continue
        if SCALING[kind] and model_type in ("phi3", "phi4_multimodal", "phimoe"):  # which know longrope alone
            continue
        part = {"partial_rotary_factor": 0.25} if "partial_rotary_factor" in rotary else {}
        positions = {"rope_type": "default", "rope_theta": 300.0} | part | SCALING[kind]
        make_config(model_type, rope_parameters=positions).save_pretrained(tmp_path)
        path = tmp_path / "config.json"
        saved = json.loads(path.read_text())
        keys = legacy_config_keys(saved)
        plain = AutoConfig.from_pretrained(tmp_path).to_dict()
        path.write_text(json.dumps(saved | keys))
        told = AutoConfig.from_pretrained(tmp_path).to_dict()
        told["rope_parameters"].pop("type", None)  # says the same as `rope_type`
        assert {key: plain.get(key) for key in saved.keys() - keys.keys()} == {
            key: told.get(key) for key in saved.keys() - keys.keys()
        }, model_type
        seen += 1
    assert seen > 50
