"""What the caches of OUT hold is counted, and held against what SOURCE's hold."""

from types import SimpleNamespace

import pytest
import torch

from gqa_convert.verify.behaviour.caches import Caches, cache_shapes, judge_caches
from gqa_convert.verify.geometry import Counts, Geometry
from gqa_convert.verify.report import Failure


def caches(*heads: int, cross: tuple[int, ...] = ()) -> Caches:
    """Caches of layers with these numbers of K/V heads; 0 for a layer that holds no keys."""
    found = {}
    for kind, numbers in (("self", heads), ("cross", cross)):
        layers = [
            SimpleNamespace(keys=torch.zeros(1, each, 4, 8), values=torch.zeros(1, each, 4, 8))
            if each
            else SimpleNamespace(conv_states=None)
            for each in numbers
        ]
        if layers:
            found[kind] = cache_shapes(SimpleNamespace(layers=layers))
    return found


FEWER = Geometry({"decoder": Counts(12, 12, 3)}, {})
PAIR = Geometry({"decoder": Counts(12, 12, 3), "cross": Counts(12, 12, 3)}, {})
HALF = Geometry({"decoder": Counts(12, 6, 2)}, {})
COPY = Geometry({"decoder": Counts(12, 2, 2)}, {})
MANY = caches(12, 0, 12)
BOTH = caches(12, 12, cross=(12, 12))


@pytest.mark.parametrize(
    ("ours", "theirs", "geometry", "words"),
    [
        (caches(3, 0, 3), MANY, FEWER, "2 layers"),
        (caches(3, 3, cross=(3, 3)), BOTH, PAIR, "2 cross-attention layers"),
        (caches(2, 2), caches(2, 2), COPY, "2 heads in each"),
        (caches(12, 12), caches(12, 12), COPY, "12 heads"),  # as a type has it that caches repeated heads
    ],
)
def test_good_caches(ours: Caches, theirs: Caches, geometry: Geometry, words: str) -> None:
    found = judge_caches(ours, theirs, geometry, "").detail
    assert words in found
    assert ("cross-attention" in found) == ("cross" in ours)


@pytest.mark.parametrize(
    ("ours", "theirs", "geometry"),
    [
        (caches(3, 12), MANY, FEWER),
        (MANY, MANY, FEWER),
        (caches(3), MANY, FEWER),
        (caches(0), MANY, FEWER),
        (caches(3, 3, cross=(12, 12)), BOTH, PAIR),
        (caches(3, 3, cross=(3,)), BOTH, PAIR),
        (caches(3, 3), BOTH, PAIR),
        (caches(12, 12, cross=(3, 3)), BOTH, PAIR),
        (caches(12, 12), caches(2, 2), COPY),
        (caches(6, 6), caches(12, 12), COPY),
        (caches(12), caches(12, 12), COPY),
        (caches(0, 0), caches(12, 12), COPY),
        (caches(12, 12), caches(12, 12), HALF),
        (caches(6, 6), caches(6, 6), HALF),
    ],
)
def test_bad_caches(ours: Caches, theirs: Caches, geometry: Geometry) -> None:
    with pytest.raises(Failure):
        judge_caches(ours, theirs, geometry, "")


def test_what_is_no_cache() -> None:
    with pytest.raises(Failure, match="no keys"):
        cache_shapes(())
