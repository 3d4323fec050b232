"""Results of commands as Python objects."""

import json
from pathlib import Path

from gqa_convert.checkpoint.strict_json import JsonObject
from gqa_convert.conversion.options import ConversionOptions
from gqa_convert.conversion.run import convert_checkpoint
from tests.helpers.checkpoints import write_llama


def test_the_json_of_a_conversion_says_what_its_attributes_do(tmp_path: Path) -> None:
    source = write_llama(tmp_path / "source")
    result = convert_checkpoint(source, tmp_path / "out", 3, ConversionOptions(method="mean"))
    content: JsonObject = json.loads(json.dumps(result.as_json()))
    assert content["groups"] == result.plan.stated_groups == 3
    assert content["out"] == str(result.out)
    assert content["merge_error"] == result.merge_error
