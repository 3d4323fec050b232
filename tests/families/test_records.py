"""The records of families: what a forgotten field leads to, and facts against transformers' own classes."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from gqa_convert.families.family import FamilyRecordError, RotaryShare, make_family
from gqa_convert.families.geometry import config_value
from gqa_convert.families.records.building import WHOLE_HEAD, share_of_head
from gqa_convert.families.table import FAMILIES
from gqa_convert.merging.absorption_limits import rotary_pairs
from tests.helpers import folding_cases as cases
from tests.helpers import own_files
from tests.helpers.tiny import HEADS, make_config

ROOT = Path(__file__).parents[2]
NATIVE = sorted(model_type for model_type, family in FAMILIES.items() if family.native)
GATES = re.compile(r"(gate_proj|gate_up_proj|input_linear|\bw3|\bv1|wi_1)")
"""Parts of parameter names that an MLP with three matrices has."""


@pytest.mark.parametrize("field", ["rotary", "rotary_dimensions", "key_norm", "mlp"])
def test_a_forgotten_fact_is_named(field: str) -> None:
    fields = {"model_type": "new_type", **WHOLE_HEAD, "key_norm": "none", "mlp": "gated"}
    assert make_family(**fields).model_type == "new_type"
    del fields[field]
    with pytest.raises(FamilyRecordError) as caught:
        make_family(**fields)
    message = str(caught.value)
    assert message.startswith(f"the record of model type new_type lacks {field}: ")
    paths = re.findall(r"[\w/.-]+/[\w.-]*", message)
    assert paths == ["gqa_convert/families/records/", "docs/adding-a-family.md"]
    assert all((ROOT / path).exists() for path in paths)


def test_a_record_that_contradicts_itself() -> None:
    fields = {"model_type": "new_type", **WHOLE_HEAD, "key_norm": "none", "mlp": "gated"}
    with pytest.raises(FamilyRecordError, match="only one of rotary and rotary_dimensions"):
        make_family(**fields | {"rotary": "none"})
    with pytest.raises(FamilyRecordError, match="unknown field rotray"):
        make_family(**fields, rotray="half")


HELPER = "tests/helpers/folding_cases.py"
STOCK = sorted({family.stock_type for family in FAMILIES.values() if family.native or family.modeling})


@pytest.mark.parametrize("model_type", STOCK)
def test_the_tests_know_the_family(model_type: str) -> None:
    """Norms, gates and layouts stand a second time in the tests, and a type must not be missing there."""
    family = FAMILIES[model_type]
    if family.modeling is not None:
        assert model_type in own_files.SIZES, f"add a tiny {model_type} to SIZES in tests/helpers/own_files.py"
        file = ROOT / "gqa_convert" / "families" / "modeling" / f"{family.modeling.file}.py"
        assert file.is_file(), f"the record of {model_type} names {file.name}: write it in {file.parent}"
    normed = family.key_norm != "none" or family.gainless_key_norm is not None
    listed = model_type in cases.NORMED or model_type in cases.NORMED_IF
    assert normed == listed, (
        f"the record of {model_type} has key_norm = {family.key_norm!r}, and NORMED and NORMED_IF in {HELPER} say "
        f"that keys are {'' if listed else 'not '}normalised: correct one of them"
    )
    constrained = model_type in cases.GATED | cases.VALUES_NORMED | cases.OUTPUT_NORMED
    assert (family.value_constraint is not None) == constrained, (
        f"the record of {model_type} has value_constraint = {family.value_constraint!r}, which GATED, VALUES_NORMED "
        f"and OUTPUT_NORMED in {HELPER} contradict: correct one of them"
    )
    layout = family.fused_layout if family.fused else None
    assert layout == cases.FUSED.get(model_type), (
        f"the record of {model_type} has fused_layout = {layout!r}, FUSED in {HELPER} has "
        f"{cases.FUSED.get(model_type)!r}: correct one of them"
    )


@pytest.fixture(scope="module")
def outlines() -> dict[str, nn.Module]:
    """Models without numbers, made once."""
    return {}


def outline(model_type: str, made: dict[str, nn.Module], **overrides: Any) -> nn.Module:
    key = f"{model_type} {overrides}"
    if key not in made:
        with torch.device("meta"):
            made[key] = AutoModelForCausalLM.from_config(make_config(model_type, **overrides))
    return made[key]


@pytest.mark.parametrize("model_type", NATIVE)
def test_the_mlp_is_what_the_class_builds(model_type: str, outlines: dict[str, nn.Module]) -> None:
    names = [name for name, _ in outline(model_type, outlines).named_parameters()]
    kept = [name for name in names if not re.search(r"self_attn|mamba|vision|audio|router", name)]
    found = "gated" if any(GATES.search(name) for name in kept) else "plain"
    assert FAMILIES[model_type].mlp == found, (
        f"transformers' class of {model_type} has a {found} MLP: correct mlp in its record in "
        "gqa_convert/families/records/"
    )


@pytest.mark.parametrize("model_type", NATIVE)
def test_a_norm_of_keys_is_not_overlooked(model_type: str, outlines: dict[str, nn.Module]) -> None:
    family = FAMILIES[model_type]
    found = [
        name
        for name, _ in outline(model_type, outlines).named_parameters()
        if re.search(rf"\b({'|'.join(map(re.escape, family.attention))})\.(k|key)_\w*norm", name)
    ]
    assert family.key_norm != "none" or not found, (
        f"transformers' class of {model_type} has {found[0]}: correct key_norm and key_norm_name in its record in "
        "gqa_convert/families/records/"
    )
    assert all(f".{family.key_norm_name}." in name for name in found), (
        f"transformers' class of {model_type} has {found[0]}: correct key_norm_name in its record in "
        "gqa_convert/families/records/"
    )


@pytest.mark.parametrize("model_type", sorted(own_files.SIZES))
def test_the_mlp_of_types_with_a_modelling_file(model_type: str) -> None:
    model = own_files.make_source_model(model_type)
    gated = any(GATES.search(name) for name, _ in model.named_parameters())
    mlp = FAMILIES[model_type].mlp
    expected = str(model.config.feed_forward_proj).startswith("gated") if mlp == "feed_forward_proj" else mlp == "gated"
    assert gated == expected


def rotary_types() -> list[str]:
    return [name for name in NATIVE if FAMILIES[name].rotary != "none"]


BY_LAYER = {"beam", "cohere_compass_text", "gemma3_text", "gemma3n_text", "lfm3", "mellum", "olmo3"}
"""Types whose rotary parameters differ between layers: one share cannot be stated for all."""


@pytest.mark.parametrize(
    ("model_type", "share"),
    [(name, share) for name in rotary_types() for share in (None, 0.5) if share is None or name not in BY_LAYER],
)
def test_rotary_dimensions_are_those_of_the_class(
    model_type: str, share: float | None, outlines: dict[str, nn.Module]
) -> None:
    """With the class's default share, and with a share that the config states: some classes read it, some do not."""
    family = FAMILIES[model_type]
    config = make_config(model_type)
    stated = config.to_dict().get("rope_parameters")
    overrides: dict[str, Any] = {}
    if share is not None:
        assert isinstance(stated, dict)
        assert not any(isinstance(value, dict) for value in stated.values())
        plain = {"rope_type": "default", "rope_theta": stated.get("rope_theta", 1e4)}
        overrides = {"rope_parameters": plain | {"partial_rotary_factor": share}}
        config = make_config(model_type, **overrides)
    model = outline(model_type, outlines, **overrides)
    angles = [
        buffer.shape[0]
        for name, buffer in model.named_buffers()
        if name.endswith("inv_freq") and not re.search("vision|audio", name)
    ]
    assert angles
    head_dim = config_value(config.to_dict(), str(family.head_dim_key)) or config.hidden_size // HEADS
    found = 2 * len(rotary_pairs(family, config.to_dict(), head_dim)[0])
    assert found == 2 * max(angles), (
        f"transformers' class of {model_type} rotates {2 * max(angles)} dimensions of a head, its record says "
        f"{found}: correct rotary_dimensions in gqa_convert/families/records/"
    )


def test_default_shares_are_stated_for_every_class_that_reads_one() -> None:
    """The fact that went unnoticed as long as it had a default: what a config without a share stands for."""
    shares = {
        name: family.rotary_dimensions.default
        for name, family in FAMILIES.items()
        if isinstance(family.rotary_dimensions, RotaryShare) and family.rotary_dimensions.keys
    }
    assert shares["phi"] == 0.5
    assert shares["gqa_gpt_neox"] == shares["gpt_neox"] == 0.25
    assert share_of_head(0.25)["rotary_dimensions"].default == 0.25


def test_results_with_a_modelling_file() -> None:
    for name, family in FAMILIES.items():
        if family.modeling is None:
            assert not family.is_converted
            assert family.stock_type == name
            continue
        assert family.stock_type == family.modeling.source_type
        assert family.is_converted == (name != family.stock_type)
        assert name in (family.modeling.model_type, family.modeling.source_type)
        assert family.stock_type in CONFIG_MAPPING
