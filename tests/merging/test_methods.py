"""Every merge method is complete: arithmetic, proof, help, model card and guide."""

from pathlib import Path

import pytest

from gqa_convert.errors import OptionError
from gqa_convert.merging.methods import (
    CHOICES,
    METHOD_HELP,
    METHODS,
    MergeMethod,
    choose_method,
    names,
)
from gqa_convert.merging.pooling import POOLINGS
from gqa_convert.verify.result import FACTORED, FITTED, PLAIN

GUIDE = Path(__file__).parents[2] / "docs" / "methods.md"


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_a_method_is_complete(method: MergeMethod) -> None:
    where = f"method {method.name} in gqa_convert/merging/methods.py"
    assert METHODS[method.name] is method, f"{where}: its name must be its key"
    assert method.card_sentence, f"{where}: card_sentence is empty"
    assert method.card_sentence[-1] != ".", (
        f"{where}: the card adds the full stop to card_sentence itself"
    )
    assert not (method.pooling and method.merges_layers), (
        f"{where}: it merges tensors or whole layers, not both"
    )
    assert method.merges_layers or not method.trains, (
        f"{where}: only methods that merge whole layers can train"
    )
    assert not method.trains or method.text == "required", (
        f"{where}: gradient steps need calibration text"
    )


def test_verify_has_a_proof_of_every_method() -> None:
    """verify has lists of its own, so that it stays independent of the converter."""
    where = "gqa_convert/verify/result.py and gqa_convert/merging/methods.py disagree"
    assert {*PLAIN, FACTORED, FITTED} == {method.name for method in CHOICES}, where
    assert {FACTORED, FITTED} == {method.name for method in CHOICES if method.merges_layers}, where
    assert [method.name for method in CHOICES if method.text == "required"] == [FITTED], where
    assert all(METHODS[name].pooling == name for name in PLAIN), where


def test_the_arithmetic_of_every_method_is_there() -> None:
    pooled = [method for method in CHOICES if method.pooling]
    assert POOLINGS.keys() == {method.pooling for method in pooled}, (
        "POOLINGS in merging/pooling.py lacks some"
    )
    assert {method.text for method in pooled} == {"never"}, (
        "the writer pools without text: merge whole layers"
    )


@pytest.mark.parametrize("method", CHOICES, ids=lambda method: method.name)
def test_the_guide_describes_every_choice(method: MergeMethod) -> None:
    text = GUIDE.read_text(encoding="utf-8")
    assert f"| `{method.name}`" in text, (
        f"docs/methods.md: the table of methods has no row for {method.name}"
    )
    sources = text.partition("### Sources")[2].partition("\n## ")[0]
    assert f"`{method.name}`" in sources, f"docs/methods.md: {method.name} is missing under Sources"
    assert method.name in METHOD_HELP, f"METHOD_HELP lacks {method.name}"


@pytest.mark.parametrize("name", ["median", "copy", "repeat", ""])
def test_an_unknown_method_is_refused_with_the_choices(name: str) -> None:
    with pytest.raises(OptionError, match=f"choose one of {names(CHOICES)}"):
        choose_method(name)
