"""The safetensors header: nothing but whole, gapless tilings get through, and the safetensors library agrees."""

import json
import math
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save as save_numpy
from safetensors.torch import save as save_torch

from benchmarks.synthetic import make_llama
from gqa_convert.checkpoint.headers import (
    DTYPE_BITS,
    MAX_HEADER_BYTES,
    Header,
    build_header,
    header_length,
    parse_header,
)
from gqa_convert.checkpoint.source import open_checkpoint
from gqa_convert.errors import CorruptCheckpointError, GQAConvertError
from tests.helpers.checkpoints import CONFIG, llama_arrays

fuzz = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)


def parse_file(raw: bytes) -> Header:
    """A whole file's header, as the reader takes it."""
    length = header_length(raw[:8], len(raw), "some file")
    return parse_header(raw[8 : 8 + length], len(raw), "some file")


def as_file(header: bytes | dict[str, Any] | str, data: bytes = b"") -> bytes:
    raw = header if isinstance(header, bytes) else (header if isinstance(header, str) else json.dumps(header)).encode()
    return len(raw).to_bytes(8, "little") + raw + data


def outcome(raw: bytes) -> Header | str:
    """The header of a whole file, checked, or the message with which it is refused."""
    try:
        header = parse_file(raw)
    except CorruptCheckpointError as problem:
        message = str(problem)
    else:
        check_tiling(header, len(raw))
        return header
    assert message.isprintable()
    assert len(message) < 2000
    return message


def refused(raw: bytes) -> str:
    message = outcome(raw)
    assert isinstance(message, str)
    return message


def check_tiling(header: Header, size: int) -> None:
    """The tensors lie one behind the other from the header's end to the file's end."""
    at = header.data_start
    for entry in header.tensors.values():
        assert entry.start == at
        assert entry.nbytes * 8 == math.prod(entry.shape) * DTYPE_BITS[entry.dtype]
        at += entry.nbytes
    assert at == size


def library_reads(path: Path, raw: bytes) -> dict[str, tuple[str, tuple[int, ...]]] | None:
    """What safetensors lists of a file, or None if it refuses it."""
    path.write_bytes(raw)
    try:
        with safe_open(path, "np") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            return {name: (piece.get_dtype(), tuple(piece.get_shape())) for name, piece in slices.items()}
    except SafetensorError:
        return None


def agree(path: Path, raw: bytes) -> bool:
    """Check that both readers say the same of a file; returns whether they accept it."""
    theirs = library_reads(path, raw)
    if theirs is None:
        refused(raw)
        return False
    header = parse_file(raw)
    check_tiling(header, len(raw))
    assert {name: (entry.dtype, entry.shape) for name, entry in header.tensors.items()} == theirs
    return True


words = st.text(st.characters(codec="utf-8"), max_size=8)
leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
json_values = st.recursive(leaves, lambda inner: st.lists(inner) | st.dictionaries(words, inner))


@st.composite
def files(draw: st.DrawFn) -> tuple[dict[str, Any], bytes]:
    """A valid header as a dictionary, in an order unlike that of the offsets, and its data."""
    names = draw(st.lists(words, unique=True, max_size=6))
    entries, at = [], 0
    for name in names:
        dtype = draw(st.sampled_from(sorted(DTYPE_BITS)))
        shape = draw(st.lists(st.integers(0, 4), max_size=4))
        bits = DTYPE_BITS[dtype] * math.prod(shape)
        assume(bits % 8 == 0 and name != "__metadata__")
        entries.append((name, {"dtype": dtype, "shape": shape, "data_offsets": [at, at + bits // 8]}))
        at += bits // 8
    header: dict[str, Any] = dict(draw(st.permutations(entries)))
    metadata = draw(st.none() | st.dictionaries(words, words))
    if metadata is not None:
        header["__metadata__"] = metadata
    return header, draw(st.binary(min_size=at, max_size=at))


class TestFuzz:
    @fuzz
    @given(st.binary(max_size=200))
    @example(b"")
    @example(b"\0" * 8)
    @example(b"\xff" * 8)
    @example((1 << 63).to_bytes(8, "little") + b"{}")
    def test_any_bytes_are_a_tiling_or_refused(self, raw: bytes) -> None:
        outcome(raw)

    @fuzz
    @given(json_values)
    def test_any_json_is_a_tiling_or_refused(self, value: Any) -> None:
        outcome(as_file(json.dumps(value)))

    @fuzz
    @given(files(), st.integers(0, 20), st.booleans())
    def test_valid_files_agree_with_the_library(
        self, tmp_path: Path, file: tuple[dict[str, Any], bytes], padding: int, ascii_only: bool
    ) -> None:
        header, data = file
        raw = as_file(json.dumps(header, ensure_ascii=ascii_only).encode() + b" " * padding, data)
        assert agree(tmp_path / "file", raw)
        assert parse_file(raw).metadata == (header.get("__metadata__") or {})

    @fuzz
    @given(files(), st.data())
    def test_mutated_files_agree_with_the_library(
        self, tmp_path: Path, file: tuple[dict[str, Any], bytes], data: st.DataObject
    ) -> None:
        raw = bytearray(as_file(file[0], file[1]))
        for _ in range(data.draw(st.integers(1, 3))):
            at = data.draw(st.integers(0, len(raw) - 1))
            kind = data.draw(st.sampled_from(["set", "flip", "cut", "insert", "end"]))
            if kind == "set":
                raw[at] = data.draw(st.sampled_from(b'0123456789-+.eE[]{}:,"\\ \t\0\xff'))
            elif kind == "flip":
                raw[at] ^= 1 << data.draw(st.integers(0, 7))
            elif kind == "insert":
                raw[at:at] = data.draw(st.sampled_from([b"0", b"-", b" ", b'"', b",", b"[", b"{", b"1", b"\\ud800"]))
            elif at:
                del raw[at : at + 1 if kind == "cut" else len(raw)]
        theirs = library_reads(tmp_path / "file", bytes(raw))
        ours = outcome(bytes(raw))
        if isinstance(ours, Header):
            assert theirs == {name: (entry.dtype, entry.shape) for name, entry in ours.tensors.items()}
        else:  # refused here and not there: see TestStricterThanTheLibrary
            stricter = ("does not have exactly the keys", "occurs twice", "does not begin with")
            assert theirs is None or any(text in ours for text in stricter)

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
    def test_any_index_is_read_or_refused(self, tmp_path: Path, index: Any) -> None:
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


class TestAgreement:
    """Hand-picked headers: the library accepts the first kind and refuses the second."""

    @pytest.mark.parametrize(
        ("header", "data"),
        [
            ({}, b""),
            ({"a": F32}, b"1234"),
            ({"": F32}, b"1234"),
            ({"__metadata__": None, "a": F32}, b"1234"),
            ({"__metadata__": {}, "a": F32}, b"1234"),
            ({"a": F32, "z": one(shape=[0], data_offsets=[4, 4])["a"]}, b"1234"),
            ({"a": one(data_offsets=[4, 8])["a"], "b": F32}, b"12345678"),
            (one(shape=[0, 2**63], data_offsets=[0, 0]), b""),
            (one(shape=[], data_offsets=[0, 4]), b"1234"),
            (one(shape=[1] * 64), b"1234"),
            (one(dtype="F4", shape=[2], data_offsets=[0, 1]), b"1"),
            (json.dumps({"a": F32}) + " \n\t\r", b"1234"),
        ],
    )
    def test_accepted_by_both(self, tmp_path: Path, header: Any, data: bytes) -> None:
        assert agree(tmp_path / "file", as_file(header, data))

    @pytest.mark.parametrize(
        ("header", "data"),
        [
            ("", b""),
            ("[]", b""),
            ("null", b""),
            ("{}", b"1"),
            ({"a": F32}, b"123"),
            ({"a": F32}, b"12345"),
            (one(data_offsets=[1, 5]), b"12345"),
            ({"a": F32, "b": F32}, b"1234"),
            ({"a": F32, "b": one(data_offsets=[2, 6])["a"]}, b"123456"),
            ({"a": F32, "z": one(shape=[0], data_offsets=[2, 2])["a"]}, b"1234"),
            ({"a": F32, "__metadata__": {"n": 1}}, b"1234"),
            ({"a": F32, "__metadata__": {"n": None}}, b"1234"),
            ({"a": F32, "__metadata__": ["n"]}, b"1234"),
            (one(dtype="F128"), b"1234"),
            (one(dtype=None), b"1234"),
            (one(dtype=["F32"]), b"1234"),
            (one(dtype="F4", shape=[1], data_offsets=[0, 1]), b"1"),
            (one(shape=[1.0]), b"1234"),
            (one(shape=[True]), b"1234"),
            (one(shape=["1"]), b"1234"),
            (one(shape=1), b"1234"),
            (one(shape=[-1]), b"1234"),
            (one(shape=[2**32, 2**32]), b"1234"),
            (one(shape=[2**63, 2, 0], data_offsets=[0, 0]), b""),
            (one(shape=[2**64]), b"1234"),
            (one(data_offsets=[0.0, 4.0]), b"1234"),
            (one(data_offsets=[False, 4]), b"1234"),
            (one(data_offsets=[0]), b"1234"),
            (one(data_offsets=[0, 4, 8]), b"1234"),
            (one(data_offsets=[4, 0]), b"1234"),
            (one(data_offsets=[-4, 0]), b"1234"),
            (one(data_offsets=[0, 2**70]), b"1234"),
            (one(data_offsets=[0, float("nan")]), b"1234"),
            (one(data_offsets=[0, float("inf")]), b"1234"),
            ({"a": None}, b""),
            ({"a": {"dtype": "F32", "shape": [1]}}, b"1234"),
            (json.dumps(one(data_offsets=["N", 4])).replace('"N"', "-0"), b"1234"),
            (json.dumps(one(data_offsets=[0, "N"])).replace('"N"', "4e0"), b"1234"),
            (json.dumps(one(data_offsets=[0, "N"])).replace('"N"', "9" * 5000), b"1234"),
            ('{"a\\ud800":' + json.dumps(F32) + "}", b"1234"),
            ('{"__metadata__":{"a":"\\udc00"}}', b""),
            (b'{"\xff":' + json.dumps(F32).encode() + b"}", b"1234"),
            (b"\xef\xbb\xbf" + json.dumps({"a": F32}).encode(), b"1234"),
            (json.dumps({"a": F32}) + "\0", b"1234"),
            ('{"a":' * 3000 + "1" + "}" * 3000, b""),
            ("{" + '"a":' + "[" * 100_000 + "]" * 100_000 + "}", b""),
        ],
    )
    def test_refused_by_both(self, tmp_path: Path, header: Any, data: bytes) -> None:
        assert not agree(tmp_path / "file", as_file(header, data))

    def test_the_length_field(self, tmp_path: Path) -> None:
        raw = as_file({"a": F32}, b"1234")
        for length in (0, 1, len(raw) - 7, MAX_HEADER_BYTES, MAX_HEADER_BYTES + 1, 1 << 63, (1 << 64) - 1):
            assert not agree(tmp_path / "file", length.to_bytes(8, "little") + raw[8:])
        for size in range(len(raw)):
            assert not agree(tmp_path / "file", raw[:size])


class TestStricterThanTheLibrary:
    """What safetensors 0.8 lets pass and a converter had better not: it would have to guess, or lose something."""

    @pytest.mark.parametrize(
        "header",
        [
            '{"a":%s,"a":%s}',
            '{"__metadata__":{"n":"1","n":"2"},"a":%s}',
            '  {"a":%s}',
            '{"a":["F32",[1],[0,4]]}',
            '{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4],"strides":[1]}}',
        ],
    )
    def test_refused(self, tmp_path: Path, header: str) -> None:
        raw = as_file(header.replace("%s", json.dumps(F32)), b"1234")
        assert library_reads(tmp_path / "file", raw) is not None
        refused(raw)


class TestCost:
    def test_a_stated_size_allocates_nothing(self) -> None:
        raw = as_file(one(shape=[2**20, 2**20], data_offsets=[0, 2**42]), b"")
        tracemalloc.start()
        refused(raw)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 1 << 20

    def test_a_long_hostile_name_makes_a_short_message(self) -> None:
        message = refused(as_file({"\x1b[2J\n" * 100_000: F32}, b"123"))
        assert "\x1b" not in message
        refused(as_file({"b\n\r\u2028" * 1000: one(dtype="X" * 100_000)["a"]}, b"1234"))


class TestBuild:
    @pytest.mark.parametrize("metadata", [None, {"format": "pt"}, {"ключ": 'a"\\\n\té\x7f\u2028'}])
    def test_same_bytes_as_the_library(self, metadata: dict[str, str] | None) -> None:
        arrays = llama_arrays(layers=1)
        arrays |= {name: array.astype(np.float16) for name, array in arrays.items() if "norm" in name}
        arrays['ünï\u2028/"\\\x01'] = np.zeros((0, 3), np.int64)
        theirs = save_numpy(arrays, metadata=metadata)
        header = parse_file(theirs)
        described = [(name, entry.dtype, entry.shape, entry.nbytes) for name, entry in header.tensors.items()]
        assert build_header(described, header.metadata) == theirs[: header.data_start]
        assert header.data_start % 8 == 0

    def test_same_bytes_for_bfloat16(self) -> None:
        theirs = save_torch({"x": torch.ones(3, 5, dtype=torch.bfloat16), "a": torch.ones(7)}, {"format": "pt"})
        header = parse_file(theirs)
        described = [(name, entry.dtype, entry.shape, entry.nbytes) for name, entry in header.tensors.items()]
        assert [name for name, *_ in described] == ["a", "x"]
        assert build_header(described, {"format": "pt"}) == theirs[: header.data_start]

    @given(files(), st.sampled_from([8, 64, 4096]), st.data())
    @fuzz
    def test_round_trip(
        self, tmp_path: Path, file: tuple[dict[str, Any], bytes], modulus: int, data: st.DataObject
    ) -> None:
        remainder = data.draw(st.integers(0, modulus - 1))
        header = parse_file(as_file(*file))
        described = [(name, entry.dtype, entry.shape, entry.nbytes) for name, entry in header.tensors.items()]
        built = build_header(described, header.metadata, data_start_modulo=(remainder, modulus))
        assert len(built) % modulus == remainder
        again = parse_file(built + file[1])
        assert list(again.tensors) == list(header.tensors)
        assert again.metadata == header.metadata
        assert agree(tmp_path / "file", built + file[1])


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The headers of a Mixtral of 4,900 tensors in 3 files."""
    folder = tmp_path_factory.mktemp("headers") / "mixtral"
    make_llama(folder, layers=4, hidden=256, intermediate=64, heads=8, experts=400, shard_bytes=90_000_000, sparse=True)
    return folder


def test_a_tensors_header_takes_little_memory(experts: Path) -> None:
    assert open_checkpoint(experts)  # with imports
    tracemalloc.start()
    try:
        checkpoint = open_checkpoint(experts)
        held, at_most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    count = sum(1 for _ in checkpoint.tensors())
    assert held < 500 * count
    assert at_most < 1000 * count
