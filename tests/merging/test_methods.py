"""Every merge method is complete: arithmetic, proof, help, model card and guide."""

from dataclasses import fields
from pathlib import Path

import pytest

from gqa_convert.errors import OptionError
from gqa_convert.merging.methods import (
    CHOICES,
    METHODS,
    MergeMethod,
    Need,
    Proof,
    choose_method,
    names,
)
from gqa_convert.verify.exact.merges import MERGES
from gqa_convert.verify.folded.modules import _CONCLUSIONS
from gqa_convert.verify.proofs import CALIBRATED_PROOFS, PROOFS

REGISTRY = "gqa_convert/merging/methods.py"
GUIDE = Path(__file__).parents[2] / "docs" / "methods.md"


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_a_method_is_complete(method: MergeMethod) -> None:
    where = f"method {method.name} in {REGISTRY}"
    assert METHODS[method.name] is method, f"{where}: its name must be its key"
    assert method.description.endswith("."), f"{where}: description must be a sentence"
    assert method.source, f"{where}: source must name a paper and section"
    assert method.card_sentence, f"{where}: card_sentence is empty"
    assert method.card_sentence[-1] != ".", f"{where}: the card adds the full stop to card_sentence itself"
    folds = method.merges_layers
    assert (method.pooling is not None) + folds == (0 if method.is_exact else 1), (
        f"{where}: a method merges by pooling or by folding, an exact one by neither"
    )
    assert folds or not method.trains, f"{where}: only methods that work on whole layers can train"
    assert not method.trains or method.calibration is Need.REQUIRED, f"{where}: gradient steps need calibration text"


def test_a_method_without_a_decision_is_refused() -> None:
    """No field has a default, so that Python names the ones that a new method lacks."""
    given = {field.name: None for field in fields(MergeMethod)}
    for name in given:
        with pytest.raises(TypeError, match=name):
            MergeMethod(**{key: value for key, value in given.items() if key != name})  # type: ignore[arg-type]


def test_verify_proves_every_method_as_the_registry_says() -> None:
    """verify has a table of its own, so that it stays independent of the converter."""
    message = "gqa_convert/verify/proofs.py and gqa_convert/merging/methods.py disagree"
    assert {name: proof.value for name, proof in PROOFS.items()} == {
        name: method.proof.value for name, method in METHODS.items()
    }, message
    assert {name: proof.value for name, proof in CALIBRATED_PROOFS.items()} == {
        name: method.calibrated_proof.value for name, method in METHODS.items() if method.calibrated_proof
    }, message


def test_verify_recomputes_every_method_whose_proof_says_so() -> None:
    recomputed = [method for method in METHODS.values() if method.proof is Proof.RECOMPUTED]
    assert set(MERGES) == {method.name for method in recomputed}, "gqa_convert/verify/exact/merges.py: MERGES"
    assert all(method.norm_pooling == method.name for method in recomputed)


def test_verify_checks_every_folding_method() -> None:
    folding = {method.proof for method in METHODS.values() if method.merges_layers}
    assert {proof.value for proof in folding} == {proof.value for proof in _CONCLUSIONS}, (
        "gqa_convert/verify/folded/modules.py: _CONCLUSIONS"
    )


@pytest.mark.parametrize("method", CHOICES, ids=lambda method: method.name)
def test_the_guide_describes_every_choice(method: MergeMethod) -> None:
    text = GUIDE.read_text(encoding="utf-8")
    assert f"| `{method.name}`" in text, f"docs/methods.md: the table of methods has no row for {method.name}"
    sources = text.partition("### Sources")[2].partition("\n## ")[0]
    assert f"`{method.name}`" in sources, f"docs/methods.md: {method.name} is missing under Sources"


@pytest.mark.parametrize("name", ["median", "copy", "repeat", ""])
def test_an_unknown_method_is_refused_with_the_choices(name: str) -> None:
    with pytest.raises(OptionError, match=f"choose one of {names(CHOICES)}"):
        choose_method(name)
