"""The safetensors header: nothing but whole, gapless tilings get through."""

import json
import math
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from safetensors.torch import save as save_torch

from gqa_convert.checkpoint.headers import TensorEntry, bits_per_element, build_header, read_header
from gqa_convert.checkpoint.source import open_checkpoint
from gqa_convert.errors import CorruptCheckpointError, GQAConvertError
from tests.helpers.checkpoints import CONFIG, llama_arrays, refused

DTYPES = [
    *(
        "F4",
        "F6_E2M3",
        "F6_E3M2",
        "BOOL",
        "U8",
        "I8",
        "F8_E5M2",
        "F8_E4M3",
        "F8_E8M0",
        "F8_E4M3FNUZ",
        "F8_E5M2FNUZ",
    ),
    *("I16", "U16", "F16", "BF16", "I32", "U32", "F32", "I64", "U64", "F64", "C64"),
]
fuzz = settings(
    max_examples=150,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


def parse_file(raw: bytes) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    """The tensors and the metadata of a whole file, as the reader takes them."""
    with NamedTemporaryFile() as file:
        file.write(raw)
        file.flush()
        return read_header(Path(file.name))


def as_file(header: bytes | dict[str, Any] | str, data: bytes = b"") -> bytes:
    raw = (
        header
        if isinstance(header, bytes)
        else (header if isinstance(header, str) else json.dumps(header)).encode()
    )
    return len(raw).to_bytes(8, "little") + raw + data


words = st.text(st.characters(codec="utf-8"), max_size=8)
leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
json_values = st.recursive(leaves, lambda inner: st.lists(inner) | st.dictionaries(words, inner))


@st.composite
def files(draw: st.DrawFn) -> tuple[dict[str, Any], bytes]:
    """A valid header as a dictionary, in an order unlike that of the offsets, and its data."""
    names = draw(st.lists(words, unique=True, max_size=6))
    entries, at = [], 0
    for name in names:
        dtype = draw(st.sampled_from(DTYPES))
        shape = draw(st.lists(st.integers(0, 4), max_size=4))
        bits = bits_per_element(dtype) * math.prod(shape)
        assume(bits % 8 == 0 and name != "__metadata__")
        entries.append(
            (name, {"dtype": dtype, "shape": shape, "data_offsets": [at, at + bits // 8]})
        )
        at += bits // 8
    header: dict[str, Any] = dict(draw(st.permutations(entries)))
    metadata = draw(st.none() | st.dictionaries(words, words))
    if metadata is not None:
        header["__metadata__"] = metadata
    return header, draw(st.binary(min_size=at, max_size=at))


@fuzz
@given(files(), st.integers(0, 20), st.booleans())
def test_valid_files_are_read_as_they_are(
    file: tuple[dict[str, Any], bytes], padding: int, ascii_only: bool
) -> None:
    header, data = file
    raw = json.dumps(header, ensure_ascii=ascii_only).encode() + b" " * padding
    tensors, metadata = parse_file(as_file(raw, data))
    assert metadata == (header.pop("__metadata__", None) or {})
    found = {}
    for name, entry in tensors.items():
        start = entry.start - 8 - len(raw)
        found[name] = {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "data_offsets": [start, start + entry.nbytes],
        }
    assert found == header


@fuzz
@given(
    st.binary(max_size=120)
    | json_values
    | st.fixed_dictionaries({"weight_map": json_values, "metadata": json_values})
)
@example({"weight_map": {"a": "../x"}})
@example({"weight_map": {"a": ["model.safetensors"]}})
@example({"weight_map": {"a": "config.json"}})
@example({"weight_map": [], "metadata": 3})
def test_any_index_is_read_or_refused(tmp_path: Path, index: Any) -> None:
    raw = index if isinstance(index, bytes) else json.dumps(index).encode()
    folder = tmp_path / "source"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "model.safetensors.index.json").write_bytes(raw)
    with pytest.raises(GQAConvertError) as caught:
        open_checkpoint(folder)
    assert str(caught.value).isprintable()


F32 = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}


def one(**changes: Any) -> dict[str, Any]:
    return {"a": F32 | changes}


@pytest.mark.parametrize(
    ("header", "data", "words"),
    [
        ("[]", b"", "damaged header (invalid JSON in header"),
        (b"\xff", b"", "damaged header"),
        ("{}", b"1", "damaged header (incomplete metadata, file not fully covered)"),
        (
            {"a": F32},
            b"123",
            "is truncated, or has a damaged header (incomplete metadata, file not fully covered)",
        ),
        ({"a": F32}, b"12345", "damaged header (incomplete metadata, file not fully covered)"),
        (one(data_offsets=[1, 5]), b"12345", "invalid offset for tensor `a`"),
        ({"a": F32, "b": F32}, b"1234", "invalid offset for tensor `"),
        (one(dtype="F128"), b"1234", "unknown variant `F128`"),
        (one(shape=[2]), b"1234", "invalid shape, data type, or offset"),
        (one(shape=[-1]), b"1234", "invalid value: integer `-1`"),
        (one(shape=[2**63, 2, 0], data_offsets=[0, 0]), b"", "overflow"),
        ({"a": F32, "__metadata__": {"n": 1}}, b"1234", "expected a string"),
        ('{"a":' * 3000 + "1" + "}" * 3000, b"", "damaged header"),
    ],
)
def test_refused(header: Any, data: bytes, words: str) -> None:
    with refused(CorruptCheckpointError, words) as caught:
        parse_file(as_file(header, data))
    assert len(str(caught.value)) < 2000


@pytest.mark.parametrize(
    "raw", [b"", b"\0" * 8, b"\xff" * 8, (1 << 63).to_bytes(8, "little") + b"{}"]
)
def test_no_header(raw: bytes) -> None:
    with refused(CorruptCheckpointError, "damaged header"):
        parse_file(raw)


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}, {"ключ": 'a"\\\n\té\x7f\u2028'}])
def test_built_as_the_library_does(metadata: dict[str, str] | None) -> None:
    tensors = {name: torch.from_numpy(array) for name, array in llama_arrays(layers=1).items()}
    tensors |= {name: tensor.half() for name, tensor in tensors.items() if "norm" in name}
    tensors |= {
        'ünï\u2028/"\\\x01': torch.zeros(0, 3, dtype=torch.int64),
        "x": torch.ones(3, 5).bfloat16(),
    }
    theirs = save_torch(tensors, metadata)
    described, read = parse_file(theirs)
    assert list(described) != sorted(described)
    length = 8 + int.from_bytes(theirs[:8], "little")
    assert build_header(described, read) == theirs[:length]
    assert length % 8 == 0
