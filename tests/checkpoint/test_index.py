"""The index of a sharded checkpoint: the parser that saves memory says what the ordinary one says."""

import json
import sys
import tracemalloc
from typing import Any

import pytest

from gqa_convert.checkpoint.headers import parse_header
from gqa_convert.checkpoint.index import _parse_long, parse_index
from gqa_convert.checkpoint.strict_json import parse_object
from gqa_convert.errors import CorruptCheckpointError

MAP = {"a.weight": "model-1.safetensors", "b.größe": "model-2.safetensors", "": "x"}

USUAL = {
    "as save_pretrained writes it": json.dumps(
        {"metadata": {"total_size": 12}, "weight_map": MAP}, indent=2, ensure_ascii=False
    ),
    "on one line": json.dumps({"weight_map": MAP, "metadata": {"total_size": 1}}, ensure_ascii=False),
    "with other whitespace": '\r\n{ "weight_map"\t:\n{\t"a" :\r"f" ,"b":"f"\n} }\n',
}

UNUSUAL = {
    "escapes in a name": '{"weight_map": {"a\\u0041": "f"}}',
    "a nested map": '{"metadata": {"weight_map": {"a": "f"}}}',
    "a nested map beside an empty one": '{"metadata": {"weight_map": {"a": "f"}}, "weight_map": {}}',
    "the key in a string": '{"x\\"weight_map": {"a": "f"}}',
    "the key in a value": '{"metadata": {"a": "weight_map"}, "weight_map": {"a": "f"}}',
    "the same key twice": '{"weight_map": {"a": "f", "a": "g"}}',
    "two maps": '{"weight_map": {"a": "f"}, "weight_map": {"a": "f"}}',
    "another key twice": '{"weight_map": {"a": "f"}, "x": 1, "x": 2}',
    "an empty map": '{"weight_map": {}}',
    "a trailing comma": '{"weight_map": {"a": "f",}}',
    "a number": '{"weight_map": {"a": 1}}',
    "a list": '{"weight_map": ["a"]}',
    "no object": '["weight_map"]',
    "a control character": '{"weight_map": {"a\n": "f"}}',
    "another kind of space": '{"weight_map":\u00a0{"a": "f"}}',
    "truncated": '{"weight_map": {"a": "f"',
    "truncated behind the map": '{"weight_map": {"a": "f"}',
    "more behind it": '{"weight_map": {"a": "f"}} {}',
    "a byte order mark": '\ufeff{"weight_map": {"a": "f"}}',
    "nothing": "",
}


def outcome(parse: Any, raw: bytes) -> Any:
    try:
        return parse(raw, "index")
    except CorruptCheckpointError as problem:
        return str(problem)


@pytest.mark.parametrize("text", [*USUAL.values(), *UNUSUAL.values()], ids=[*USUAL, *UNUSUAL])
def test_it_says_what_the_ordinary_parser_says(text: str) -> None:
    assert outcome(parse_index, text.encode()) == outcome(parse_object, text.encode())


@pytest.mark.parametrize("text", USUAL.values(), ids=USUAL)
def test_usual_ones_are_parsed_pair_by_pair(text: str) -> None:
    assert _parse_long(text, "index") is not None


def test_a_long_one_takes_little_memory() -> None:
    names = [f"model.layers.{number // 64}.mlp.experts.{number % 64}.up_proj.weight" for number in range(5000)]
    raw = json.dumps({"weight_map": {name: f"model-{len(name) % 7:05d}.safetensors" for name in names}}).encode()
    interned = parse_index(
        raw, "index"
    )  # so that the interpreter's table of names does not grow while memory is traced
    peaks = []
    for parse in (parse_index, parse_object):
        tracemalloc.start()
        parse(raw, "index")
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[0] < 0.7 * peaks[1]
    assert interned == parse_object(raw, "index")


def test_bytes_that_are_not_utf8() -> None:
    raw = b'{"weight_map": {"\xff": "f"}}'
    assert outcome(parse_index, raw) == outcome(parse_object, raw)


@pytest.mark.parametrize("text", ['{"weight_map": {"a.b-c": "f.g-h"}}', '{"weight_map": {"a.b\\u002dc": "f.g-h"}}'])
def test_names_are_those_of_the_headers(text: str) -> None:
    """A header that is read with the index's names holds the same objects, and a file has one name."""
    ((name, file),) = parse_index(text.encode(), "index")["weight_map"].items()
    raw = b'{"a.b-c": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}}'
    ((found, _),) = parse_header(raw, 8 + len(raw), "header", [name]).tensors.items()
    assert found is name
    assert file is sys.intern("".join(["f.g", "-h"]))
