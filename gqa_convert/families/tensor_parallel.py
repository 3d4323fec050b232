"""The degrees of tensor parallelism that numbers of heads allow."""

from collections.abc import Collection
from typing import NamedTuple

from gqa_convert.families.engines import listed_in, run_in
from gqa_convert.families.records import record_of

_COPIES = "vLLM"
"""The engine that keeps copies of K/V heads."""


class ParallelDegrees(NamedTuple):
    """Degrees of tensor parallelism.

    Attributes:
        split: those that split the K/V heads of every layer evenly.
        with_copied_kv_heads: further ones, which vLLM reaches by keeping copies of K/V heads; empty for types for which
            it has no code.
    """

    split: list[int]
    with_copied_kv_heads: list[int]

    def in_words(self) -> str:
        """The degrees for people: "1, 3; with copied K/V heads (vLLM) also 6, 12"."""
        listed, copied = (", ".join(map(str, degrees)) for degrees in self)
        return listed + (f"; with copied K/V heads (vLLM) also {copied}" if copied else "")


def parallel_degrees(heads: int, kv_heads: Collection[int], model_type: str) -> ParallelDegrees:
    """The degrees that numbers of heads allow.

    Args:
        heads: query heads of a layer.
        kv_heads: the numbers of K/V heads that layers have.
        model_type: of the checkpoint. Those of modelling files are unknown to vLLM unless its tables name them.
    """
    degrees = [degree for degree in range(1, heads + 1) if heads % degree == 0]
    split = [degree for degree in degrees if not any(groups % degree for groups in kv_heads)]
    known = run_in(model_type) | listed_in(model_type)
    if record_of({"model_type": model_type}).modeling and _COPIES not in known:
        return ParallelDegrees(split, [])
    possible = [degree for degree in degrees if not any(groups % degree and degree % groups for groups in kv_heads)]
    return ParallelDegrees(split, [degree for degree in possible if degree not in split])
