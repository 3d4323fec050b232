"""The records of families: the derived rows against transformers' own classes, and what the
handwritten ones must hold.
"""

import json
import runpy
from pathlib import Path

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from gqa_convert.conversion.rewriting.source import STOCK_TYPES
from gqa_convert.families.records import ALL, COMPOSITES, FAMILIES, INNER, REFUSALS
from tests.helpers import folding_cases as cases
from tests.helpers import own_files
from tests.helpers.selection import slow_but

ROOT = Path(__file__).parents[2]
DERIVED = json.loads(
    (ROOT / "gqa_convert" / "families" / "derived.json").read_text(encoding="utf-8")
)
SCRIPT = runpy.run_path(str(ROOT / "tools" / "derive_families.py"))
FACTS = SCRIPT["read_facts"]()
SOME = (
    "llama",
    "gemma3_text",
    "phi3",
    "stablelm",
    "cohere",
    "olmo2",
    "gpt_neox",
    "bart",
    "gpt2",
    "qwen3_next",
)
"""Types with other layouts, norms and rotary positions, which are looked at in every run."""


@pytest.mark.parametrize("model_type", slow_but(SOME, DERIVED))
def test_a_derived_row_is_what_the_class_says(model_type: str) -> None:
    assert (
        json.loads(json.dumps(SCRIPT["derive"](model_type, FACTS[model_type])))
        == DERIVED[model_type]
    ), (
        f"transformers' class of {model_type} changed: run python tools/derive_families.py "
        f"{model_type}"
    )


def test_every_known_type_has_a_derived_row() -> None:
    assert DERIVED.keys() == {name for name in FACTS if name in CONFIG_MAPPING_NAMES}


STOCK = sorted(
    {family.stock_type for family in FAMILIES.values() if family.native or family.modeling}
)
HELPER = "tests/helpers/folding_facts.yaml"


@pytest.mark.parametrize("model_type", STOCK)
def test_the_tests_know_the_family(model_type: str) -> None:
    """Norms, gates and layouts stand a second time in the tests, and a type must not be missing
    there.
    """
    family = FAMILIES[model_type]
    if family.modeling is not None:
        assert model_type in own_files.SIZES, (
            f"add a tiny {model_type} to tests/helpers/own_files.yaml"
        )
        for path in family.modeling.files:
            assert path.is_file(), f"the record of {model_type} names {path}: write it"
    normed = family.key_norm != "none" or family.gainless_key_norm is not None
    assert normed == (model_type in cases.NORMED or model_type in cases.NORMED_IF), (
        f"key_norm, or {HELPER}"
    )
    constrained = model_type in cases.GATED | cases.VALUES_NORMED | cases.OUTPUT_NORMED
    assert (family.value_constraint is not None) == constrained, f"value_constraint, or {HELPER}"
    layout = family.fused_layout if family.fused else None
    assert layout == cases.FUSED.get(model_type), f"fused_layout, or {HELPER}"


def test_results_with_a_modelling_file() -> None:
    for name, family in FAMILIES.items():
        assert family.is_converted == (name != family.stock_type)
        assert family.modeling is None or name in (
            family.modeling.model_type,
            family.modeling.source_type,
        )
        if family.is_converted:
            assert not family.native
            assert not family.run_in or name == "nemotron-nas"
            assert not family.legacy_keys


def test_no_type_stands_in_two_tables() -> None:
    tables = [ALL.keys() - {"gpt_bigcode"}, COMPOSITES.keys(), REFUSALS.keys()]
    assert sum(map(len, tables)) == len(set().union(*tables))
    assert not INNER.keys() & FAMILIES.keys()


def test_a_rewritten_type_has_a_modelling_file_too() -> None:
    for form in STOCK_TYPES:
        assert FAMILIES[form.model_type].modeling
