"""The JSON files that one command writes and another reads."""

import json
from typing import Any

import pytest

from gqa_convert.errors import ReportError
from gqa_convert.measuring.results.schemas import (
    BenchmarkFile,
    ConversionRecord,
    EvaluationFile,
    Head,
    InspectionFile,
    ModelScores,
    TimedCell,
)
from gqa_convert.measuring.results.stored import FORMAT_VERSION
from tests.helpers.result_files import HEAD


def test_what_was_set_is_written_and_read_back() -> None:
    """Keys that were not set stay out of the file, and null stays null; integers stay integers."""
    scores = ModelScores(model="m\u202e", loss=2.5, difference=None, tokens=7)
    head = Head.model_validate({"kind": "evaluate", "command": None, **HEAD})
    file = EvaluationFile(objective="causal", results=(scores,)).headed(head)
    written = json.loads(json.dumps(file.as_json()))
    assert written["results"] == [{"model": "m\u202e", "loss": 2.5, "tokens": 7, "difference": None}]
    assert written["format_version"] == FORMAT_VERSION
    assert written["command"] is None
    assert written["machine"] == HEAD["machine"]
    assert type(written["machine"]["memory_bytes"]) is int
    assert EvaluationFile.read(written, "a.json").results[0].model == "m\\u202e"


@pytest.mark.parametrize("declared", [EvaluationFile, BenchmarkFile, InspectionFile, ConversionRecord])
@pytest.mark.parametrize("version", [99, None])
def test_files_of_other_versions_are_refused(declared: Any, version: int | None) -> None:
    with pytest.raises(ReportError, match=rf"new\.json has format version {version}, .* write it again"):
        declared.read({"format_version": version}, "new.json")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"results": [{"model": "m", "loss": "low"}]}, 'loss of results[0] of f is "low" where a number belongs'),
        ({"results": [{"difference": {"loss": True}}]}, "loss of difference of results[0] of f is true"),
        ({"results": {"model": "m"}}, "where a list of objects belongs"),
        ({"results": [3]}, "results[0] of f is 3 where an object belongs"),
        ({"reference": {"tokens": -1}}, "tokens of reference of f is -1 where a count belongs"),
        ({"command": ["a", 1]}, 'command of f is ["a", 1] where a list of strings belongs'),
        ({"machine": {"versions": 3}}, "versions of machine of f is 3 where an object belongs"),
        ([], "f is [] where an object belongs"),
    ],
)
def test_a_message_names_the_key_its_place_and_its_type(content: Any, words: str) -> None:
    if isinstance(content, dict):
        content = {"format_version": 1} | content
    with pytest.raises(ReportError) as problem:
        EvaluationFile.read(content, "f")
    assert words in str(problem.value)
    assert str(problem.value).endswith("write the file again, or move it away")


def test_a_number_of_heads_is_needed() -> None:
    for groups in (0, None, True, "3"):
        with pytest.raises(ReportError, match="a number of K/V heads belongs"):
            TimedCell.read({"format_version": 1, "groups": groups}, "f")
    with pytest.raises(ReportError, match="f has no groups"):
        ConversionRecord.read({"format_version": 1}, "f")
