"""The registry of merge methods: what each one needs, what it changes, how it is described and how it is proved.

Every other part of the package asks this registry instead of comparing names. The arithmetic itself is in `pooling`
(heads of one tensor) and in `merge_layer` (whole attention layers). This module imports the standard library only,
so that `--help` can read it without loading numpy.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Literal

from gqa_convert.errors import OptionError

Pooling = Literal["mean", "first"]
"""How the numbers of several heads become those of one, tensor by tensor; the functions are in `pooling`."""


class Need(StrEnum):
    """Whether a method uses something."""

    NEVER = "never"
    OPTIONAL = "optional"
    REQUIRED = "required"


class Proof(StrEnum):
    """How `verify` proves a result. `verify` has a separate enum with the same values, and a test compares the two."""

    IDENTICAL = "identical"
    """Every K/V head is one of the source's, bit for bit."""
    RECOMPUTED = "recomputed"
    """Every K/V head is computed again from the source's and must be equal, bit for bit."""
    OPTIMAL = "optimal"
    """The shared heads must lose no more than the optimum."""
    MEASURED = "measured"
    """The result's predictions must be closer to the source's than those of mean pooling."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeMethod:
    """One merge method. No field has a default: a new method must decide each of them."""

    name: str
    """As `--method` takes it and as `gqa_conversion.json` records it."""
    description: str
    """One sentence that says what the method does."""
    source: str
    """The paper and section that the method comes from."""
    card_sentence: str
    """What a model card says happened to the heads, without a capital and a full stop."""
    calibration: Need
    """Whether it measures on calibration text, in which case the source model runs in torch."""
    pooling: Pooling | None
    """How it merges the heads of each K/V tensor while they are streamed; None if it works on whole layers."""
    merges_layers: bool
    """Whether it merges the heads of whole attention layers by `merge_layer`, before the writer runs: it chooses which heads
    share a group, and query and output projections absorb maps. A method that trains begins with it."""
    trains: bool
    """Whether it takes gradient steps (`--fit-steps`, `--kl-steps`), which also move heads whose maps cannot be
    folded."""
    proof: Proof
    """How `verify` proves a result that was made without calibration text (with it, where text is required)."""

    @property
    def norm_pooling(self) -> Pooling:
        """How it merges the gains of norms that exist once per K/V head."""
        return self.pooling or "mean"

    @property
    def calibrated_proof(self) -> Proof | None:
        """How `verify` proves a result that was made with calibration text; None if the method takes none."""
        return None if self.calibration is Need.NEVER else Proof.MEASURED

    @property
    def is_exact(self) -> bool:
        """Whether the result computes what its source computes. Users do not choose these methods: N does."""
        return self.proof is Proof.IDENTICAL


_GQA_PAPER = "Ainslie et al., 2023, section 2.1"

_ALL: Final = (
    MergeMethod(
        name="fit",
        description="Factorises the heads of each layer on calibration text, then trains the merged projections to "
        "give what the source's layers and predictions give.",
        source="gqa-convert; distillation after Hinton et al., 2015, section 2",
        card_sentence="the K/V heads of a group were factorised together and fitted, layer after layer, to what the "
        "source's layers give on a calibration text",
        calibration=Need.REQUIRED,
        pooling=None,
        merges_layers=True,
        trains=True,
        proof=Proof.MEASURED,
    ),
    MergeMethod(
        name="factor",
        description="Replaces the heads of a group by the shared head, and the maps folded around it, that lose least.",
        source="gqa-convert; truncated decomposition after Eckart and Young, 1936",
        card_sentence="the K/V heads of a group were factorised together, and the factors folded into the query and "
        "output projections",
        calibration=Need.OPTIONAL,
        pooling=None,
        merges_layers=True,
        trains=False,
        proof=Proof.OPTIMAL,
    ),
    MergeMethod(
        name="mean",
        description="Replaces the K/V heads of a group by their mean.",
        source=_GQA_PAPER,
        card_sentence="the K/V heads of a group were replaced by their mean, as in the GQA paper (Ainslie et al., "
        "2023, section 2.1)",
        calibration=Need.NEVER,
        pooling="mean",
        merges_layers=False,
        trains=False,
        proof=Proof.RECOMPUTED,
    ),
    MergeMethod(
        name="first",
        description="Keeps the first K/V head of each group; a baseline.",
        source=_GQA_PAPER,
        card_sentence="of the K/V heads of a group the first was kept",
        calibration=Need.NEVER,
        pooling="first",
        merges_layers=False,
        trains=False,
        proof=Proof.RECOMPUTED,
    ),
    MergeMethod(
        name="repeat",
        description="Repeats every K/V head exactly, where N is a multiple of the source's count.",
        source="exact",
        card_sentence="K/V heads were repeated exactly; the model computes what its source does",
        calibration=Need.NEVER,
        pooling=None,
        merges_layers=False,
        trains=False,
        proof=Proof.IDENTICAL,
    ),
    MergeMethod(
        name="copy",
        description="Copies every tensor bit for bit, where N is the source's own count.",
        source="exact",
        card_sentence="nothing was changed; the model computes what its source does",
        calibration=Need.NEVER,
        pooling=None,
        merges_layers=False,
        trains=False,
        proof=Proof.IDENTICAL,
    ),
)

METHODS: Final = {method.name: method for method in _ALL}
"""Every method by its name, those that lose least first."""
CHOICES: Final = tuple(method for method in _ALL if not method.is_exact)
"""The methods that `--method` accepts."""
MEAN, FIRST, REPEAT, COPY = (METHODS[name] for name in ("mean", "first", "repeat", "copy"))
DEFAULT: Final = METHODS["factor"]
"""The default where the user names no calibration text; it measures on text that every machine has."""
CALIBRATED_DEFAULT: Final = METHODS["fit"]
"""The default with calibration text."""


def choose_method(name: str) -> MergeMethod:
    """The method that `--method` names.

    Raises:
        OptionError: there is no such method, or N alone decides whether it applies.
    """
    method = METHODS.get(name)
    if method is None or method.is_exact:
        raise OptionError(f"--method {name!r} is unknown: choose one of {names(CHOICES)}")
    return method


def names(methods: tuple[MergeMethod, ...]) -> str:
    """The names of methods, as a message lists them."""
    return ", ".join(method.name for method in methods)


def method_help() -> str:
    """The help text of `--method`."""
    required = " (needs --calibration)"
    listed = [f"{method.name}{required if method.calibration is Need.REQUIRED else ''}" for method in CHOICES]
    return (
        f"How heads are merged: {', '.join(listed[:-1])} or {listed[-1]}. "
        f"Default: {CALIBRATED_DEFAULT.name} with --calibration, {DEFAULT.name} on built-in text without."
    )
