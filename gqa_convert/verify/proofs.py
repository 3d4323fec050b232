"""How each merge method is proved.

This table repeats what the converter's registry says, on purpose: a mistake there must not change what is checked here.
A test compares the two.
"""

from enum import StrEnum
from typing import Any, Final


class Proof(StrEnum):
    """What a check on merged heads does."""

    IDENTICAL = "identical"
    """Every K/V head is one of SOURCE's, bit for bit."""
    RECOMPUTED = "recomputed"
    """Every K/V head is computed again from SOURCE's and must be equal, bit for bit."""
    ROTATED = "rotated"
    """The maps must be rotations, and the shared heads the means of the rotated ones."""
    OPTIMAL = "optimal"
    """The shared heads must lose no more than the optimum."""
    MEASURED = "measured"
    """OUT's predictions must be closer to SOURCE's than those of mean pooling."""


PROOFS: Final = {
    "copy": Proof.IDENTICAL,
    "repeat": Proof.IDENTICAL,
    "mean": Proof.RECOMPUTED,
    "first": Proof.RECOMPUTED,
    "random": Proof.RECOMPUTED,
    "align": Proof.ROTATED,
    "factor": Proof.OPTIMAL,
    "fit": Proof.MEASURED,
}
"""By method, for results that were made without calibration text unless the method requires it."""

CALIBRATED_PROOFS: Final = {"factor": Proof.MEASURED, "fit": Proof.MEASURED}
"""By method, for results that were made with calibration text; the other methods take none."""

RECOMPUTED: Final = tuple(name for name, proof in PROOFS.items() if proof is Proof.RECOMPUTED)
"""Methods whose K/V heads are functions of SOURCE's K/V heads alone."""

FOLDING: Final = tuple(name for name, proof in PROOFS.items() if proof not in (Proof.IDENTICAL, Proof.RECOMPUTED))
"""Methods that change the query and output projections too, by maps that these absorb from keys and values."""


def proof_of(method: Any) -> Proof | None:
    """How a claimed method is proved; None for a claim that names no method."""
    return PROOFS.get(method) if isinstance(method, str) else None
