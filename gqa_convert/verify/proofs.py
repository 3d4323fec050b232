"""How verify proves the result of each merge method.

This table repeats the converter's registry on purpose: a mistake there must not change what is checked here. A test
compares the two.
"""

from enum import StrEnum
from typing import Any, Final


class Proof(StrEnum):
    """What verify checks about merged heads."""

    IDENTICAL = "identical"
    """Every K/V head is one of SOURCE's, bit for bit."""
    RECOMPUTED = "recomputed"
    """Every K/V head equals the one recomputed from SOURCE's, bit for bit."""
    OPTIMAL = "optimal"
    """The shared heads lose no more than the optimum."""
    MEASURED = "measured"
    """OUT's predictions are closer to SOURCE's than those of mean pooling."""


PROOFS: Final = {
    "copy": Proof.IDENTICAL,
    "repeat": Proof.IDENTICAL,
    "mean": Proof.RECOMPUTED,
    "first": Proof.RECOMPUTED,
    "factor": Proof.OPTIMAL,
    "fit": Proof.MEASURED,
}
"""The proof of each method without calibration text; for methods that require one, with it."""

CALIBRATED_PROOFS: Final = {"factor": Proof.MEASURED, "fit": Proof.MEASURED}
"""The proof of each method with calibration text. The other methods accept none."""

RECOMPUTED: Final = tuple(name for name, proof in PROOFS.items() if proof is Proof.RECOMPUTED)
"""Methods that compute K/V heads from SOURCE's K/V heads alone."""

FOLDING: Final = tuple(name for name, proof in PROOFS.items() if proof not in (Proof.IDENTICAL, Proof.RECOMPUTED))
"""Methods that fold maps into the query and output projections too."""


def proof_of(method: Any) -> Proof | None:
    """The proof of a claimed method; None if the claim is not the name of a method."""
    return PROOFS.get(method) if isinstance(method, str) else None
