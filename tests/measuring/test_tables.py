"""Tables of what models answered."""

import pytest

from gqa_convert.measuring.results import AskedQuestions, EvaluationFile, Found, ModelScores
from gqa_convert.measuring.tables import evaluation_tables
from gqa_convert.runtime.machine import machine


@pytest.mark.parametrize(
    ("share", "difference", "cell"),
    [
        (0.5, 0.0, "100%"),
        (0.75, 0.25, "150%"),
        (0.0, -0.5, "0%"),
        (0.25, 0.25, ""),
        (0.0, 0.0, ""),
        (0.5, None, ""),
    ],
)
def test_recovery_is_the_share_over_that_of_the_source(
    share: float, difference: float | None, cell: str
) -> None:
    """Where the source finds nothing, there is nothing to recover."""
    part = Found(
        kind=None,
        length=None,
        questions=96,
        found=share,
        found_standard_error=0.04,
        difference=difference,
    )
    ours = ModelScores(model="out", retrieval=[part])
    asked = AskedQuestions(lengths=[2048], questions=24, seed=0)
    results = EvaluationFile(
        created="", machine=machine(), questions=asked, objective="causal", results=[ours]
    )
    (table,) = evaluation_tables(results, [ours], {"out": "out"})
    assert table.rows[1].get("recovery", "") == cell
