"""Results of commands as Python objects."""

import json
from pathlib import Path

import pytest

from gqa_convert.checkpoint.strict_json import JsonObject
from gqa_convert.conversion.run import convert_checkpoint
from gqa_convert.measuring.results.schemas import InspectionFile
from tests.helpers.checkpoints import write_llama


def test_a_conversion_is_read_by_attribute_and_by_the_keys_of_its_json(tmp_path: Path) -> None:
    source = write_llama(tmp_path / "source")
    result = convert_checkpoint(source, tmp_path / "out", 3, method="mean")
    content: JsonObject = json.loads(json.dumps(result.as_json()))
    assert content["groups"] == result.plan.groups == 3
    assert content["out"] == str(result.out)
    assert content["merge_error"] == result.merge_error
    with pytest.warns(DeprecationWarning, match="as_json"):
        assert result["groups"] == 3


def test_a_declared_file_too() -> None:
    with pytest.warns(DeprecationWarning, match=r"result\['kv_heads'\]"):
        assert InspectionFile(kv_heads=5)["kv_heads"] == 5
