"""The config keys of transformers 4 beside those of transformers 5."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from gqa_convert import convert_checkpoint
from gqa_convert.conversion.options import ConversionOptions
from gqa_convert.families.legacy_config_keys import legacy_config_keys
from gqa_convert.families.table import FAMILIES
from gqa_convert.verify import verify_checkpoint
from tests.helpers.own_files import make_source
from tests.helpers.tiny import HEADS, make_config
from tests.helpers.verification import failed


def test_legacy_keys() -> None:
    scaled = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 5e5, "partial_rotary_factor": 0.5}
    scaling = {"rope_type": "yarn", "factor": 4.0}
    expected = {
        "rope_theta": 5e5,
        "partial_rotary_factor": 0.5,
        "rope_scaling": scaling,
        "torch_dtype": "bfloat16",
    }
    config = {"rope_parameters": scaled, "dtype": "bfloat16"}
    assert legacy_config_keys(config) == expected
    assert legacy_config_keys(config | expected) == {}
    assert legacy_config_keys({"rope_parameters": None, "dtype": None}) == {}
    old = {"type": "linear", "factor": 4.0}
    assert legacy_config_keys({"rope_parameters": old}) == {"rope_scaling": old}
    truncated = scaling | {"truncate": False}  # which has no other place
    assert legacy_config_keys({"model_type": "olmo2", "rope_parameters": truncated}) == {
        "rope_scaling": truncated
    }
    kinds = {
        "sliding_attention": {"rope_theta": 1e4},
        "full_attention": {"rope_type": "linear", "factor": 8.0},
    }
    assert (
        legacy_config_keys({"model_type": "olmo3", "rope_parameters": kinds}) == {}
    )  # one base can't say both


SCALING: dict[str, dict[str, Any]] = {
    "plain": {},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
}


@pytest.mark.parametrize("kind", SCALING)
def test_legacy_keys_change_nothing_for_transformers_5(kind: str, tmp_path: Path) -> None:
    """Of every type: the config with them is the one without them."""
    seen = 0
    for model_type in (
        name for name, family in FAMILIES.items() if family.native and name in CONFIG_MAPPING
    ):
        rotary = make_config(model_type).to_dict().get("rope_parameters")
        if not isinstance(rotary, dict) or any(
            isinstance(value, dict) for value in rotary.values()
        ):
            continue
        if SCALING[kind] and model_type in (
            "phi3",
            "phi4_multimodal",
            "phimoe",
        ):  # which know longrope alone
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


def rope(theta: float, **more: Any) -> dict[str, Any]:
    return {
        "rope_parameters": {"rope_type": "default", "rope_theta": theta} | more,
        "max_position_embeddings": 512,
    }


def longrope(width: int, **more: Any) -> dict[str, Any]:
    """Positions beyond 16 turn by other factors."""
    factors = {
        "short_factor": [1.0 + number for number in range(width // 2)],
        "long_factor": [3.0] * (width // 2),
    }
    return {"rope_parameters": {"rope_type": "longrope", "rope_theta": 500.0} | factors | more}


LINEAR = rope(500.0, rope_type="linear", factor=4.0)
KINDS = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
    "full_attention": LINEAR["rope_parameters"],
}

NEOX = rope(500.0, rope_type="linear", factor=4.0, partial_rotary_factor=0.5)
LONG = longrope(16, original_max_position_embeddings=16)
SPECIAL: dict[str, tuple[dict[str, Any], str]] = {
    "gemma3n_text": ({"rope_parameters": KINDS}, "rope_theta rope_local_base_freq rope_scaling"),
    "gpt_neox": (NEOX, "rotary_emb_base rotary_pct rope_scaling"),
    "llama": (LONG, "rope_theta rope_scaling original_max_position_embeddings"),
    "phi3": (
        longrope(8) | {"original_max_position_embeddings": 16},
        "rope_theta partial_rotary_factor rope_scaling",
    ),
    "qwen3_moe": (rope(500.0), "rope_theta num_experts"),
}
"""Model types with words of their own: config values, and the legacy keys that config.json must
state.
"""


@pytest.mark.slow
@pytest.mark.parametrize("model_type", SPECIAL)
def test_types_with_keys_of_their_own(model_type: str, tmp_path: Path) -> None:
    """A config has exactly these keys besides its own, `verify` requires each, and transformers 5
    reads the same positions.
    """
    values, words = SPECIAL[model_type]
    keys = set(words.split())
    family = FAMILIES[model_type]
    source, out = tmp_path / "source", tmp_path / "out"
    make_source(model_type, source, **values)
    convert_checkpoint(source, out, 3 if family.native else HEADS, ConversionOptions(method="mean"))
    stated = AutoConfig.from_pretrained(source).rope_parameters
    assert AutoConfig.from_pretrained(out).rope_parameters.items() >= stated.items()
    config, original = (
        json.loads((folder / "config.json").read_text()) for folder in (out, source)
    )
    added = set(config) - set(original) - {"multi_query_attention", "multi_query_group_num"}
    assert added == keys | {"torch_dtype"}
    assert verify_checkpoint(out, str(source), logits=False).passed
    del config[min(keys)]
    (out / "config.json").write_text(json.dumps(config))
    assert set(failed(verify_checkpoint(out, str(source), logits=False))) == {"config"}
