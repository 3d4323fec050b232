"""The registry of merge methods.

A new method is one record here, and its arithmetic beside it: in `pooling` if it merges the heads
of every tensor by itself (the writer calls it), in `merge_layer` if it merges whole layers, whose
query and output projections absorb maps. `conversion/prepared_layers.py`,
`conversion/layers/one_layer.py` and `measuring/sensitivity/merged_copies.py` call that one for
every method that does so, and would need to choose by a field of the record. This module imports
the standard library only, so that `--help` can read it without loading numpy.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from gqa_convert.errors import OptionError

Pooling = Literal["mean", "first"]
"""How the numbers of several heads become those of one: a key of `pooling.POOLINGS`, which holds
the arithmetic.
"""


@dataclass(frozen=True, kw_only=True)
class MergeMethod:
    """One merge method.

    Attributes:
        name: as `--method` takes it and as `gqa_conversion.json` records it.
        card_sentence: what a model card says happened to the heads, without a capital and a full
            stop.
        pooling: how it merges the heads of each K/V tensor by itself, while they are copied; None
            if it does not.
        merges_layers: whether `merge_layer` merges the heads of whole attention layers before the
            writer runs: heads are reordered, and query and output projections absorb maps.
        text: whether it measures on calibration text, in which case the source runs in torch.
        trains: whether gradient steps follow (`--fit-steps`, `--kl-steps`), which also move heads
            whose maps nothing can absorb. They need text.
    """

    name: str
    card_sentence: str
    pooling: Pooling | None = None
    merges_layers: bool = False
    text: Literal["never", "optional", "required"] = "never"
    trains: bool = False

    @property
    def is_exact(self) -> bool:
        """Whether the result computes what its source computes. Users do not choose these
        methods: N does.
        """
        return self.pooling is None and not self.merges_layers


FIT = MergeMethod(
    name="fit",
    card_sentence="the K/V heads of a group were factorised together and fitted, layer after "
    "layer, to what the source's layers give on a calibration text",
    merges_layers=True,
    text="required",
    trains=True,
)
FACTOR = MergeMethod(
    name="factor",
    card_sentence="the K/V heads of a group were factorised together, and the factors folded into "
    "the query and output projections",
    merges_layers=True,
    text="optional",
)
MEAN = MergeMethod(
    name="mean",
    card_sentence="the K/V heads of a group were replaced by their mean, as in the GQA paper "
    "(Ainslie et al., 2023, section 2.1)",
    pooling="mean",
)
FIRST = MergeMethod(
    name="first", card_sentence="of the K/V heads of a group the first was kept", pooling="first"
)
REPEAT = MergeMethod(
    name="repeat",
    card_sentence="K/V heads were repeated exactly; the model computes what its source does",
)
COPY = MergeMethod(
    name="copy", card_sentence="nothing was changed; the model computes what its source does"
)

METHODS = {method.name: method for method in (FIT, FACTOR, MEAN, FIRST, REPEAT, COPY)}
"""Every method by its name, those that lose least first."""
CHOICES = tuple(method for method in METHODS.values() if not method.is_exact)
"""The methods that `--method` accepts."""
DEFAULT = FACTOR
"""The default where the user names no calibration text; it measures on text that every machine
has.
"""
CALIBRATED_DEFAULT = FIT
"""The default with calibration text."""
METHOD_HELP = (
    "How heads are merged: fit (needs --calibration), factor, mean or first. "
    "Default: fit with --calibration, factor on built-in text without."
)


def choose_method(name: str) -> MergeMethod:
    """The method that `--method` names.

    Raises:
        OptionError: there is no such method, or N alone decides whether it applies.
    """
    method = METHODS.get(name)
    if method not in CHOICES:
        raise OptionError(f"--method {name!r} is unknown: choose one of {names(CHOICES)}")
    return method


def names(methods: Iterable[MergeMethod]) -> str:
    """The names of methods, as a message lists them."""
    return ", ".join(method.name for method in methods)
