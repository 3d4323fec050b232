"""`.bin` checkpoints: the same result as from safetensors, little memory, and no code run."""

import collections
import json
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gqa_convert.checkpoint.source import open_checkpoint
from gqa_convert.checkpoint.source_files import SourceFiles
from gqa_convert.conversion.options import ConversionOptions
from gqa_convert.conversion.run import convert_checkpoint
from gqa_convert.errors import CorruptCheckpointError, GQAConvertError, UnsupportedFormatError
from tests.helpers.checkpoints import digests, llama_arrays, read_weights, split, write_config, write_index, write_llama

State = dict[str, torch.Tensor]
SINGLE = "pytorch_model.bin"


def llama_state() -> State:
    return {name: torch.from_numpy(array) for name, array in llama_arrays().items()}


def write_bin(folder: Path, state: Any, **options: Any) -> Path:
    """A checkpoint folder around one `.bin` file."""
    folder.mkdir(exist_ok=True)
    write_config(folder)
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    torch.save(state, folder / SINGLE, **options)
    return folder


def expected(tmp_path: Path, arrays: dict[str, np.ndarray[Any, Any]] | None = None) -> dict[str, np.ndarray[Any, Any]]:
    """The weights that come of the same tensors in safetensors."""
    convert_checkpoint(
        write_llama(tmp_path / "reference-source", arrays=arrays),
        tmp_path / "reference",
        4,
        ConversionOptions(method="mean"),
    )
    return read_weights(tmp_path / "reference")


def converted(source: Path) -> dict[str, np.ndarray[Any, Any]]:
    """The weights of the conversion, after a look at what else came of it."""
    out = source.parent / f"{source.name}-out"
    convert_checkpoint(source, out, 4, ConversionOptions(method="mean"))
    assert not [path.name for path in out.rglob("*") if ".bin" in path.name or path.name.startswith(".")]
    return read_weights(out)


def same(ours: dict[str, np.ndarray[Any, Any]], theirs: dict[str, np.ndarray[Any, Any]]) -> bool:
    return ours.keys() == theirs.keys() and all(np.array_equal(ours[name], theirs[name]) for name in ours)


def test_what_a_killed_run_left_in_its_folder_is_replaced(tmp_path: Path) -> None:
    """The folder of merged layers stays for the next run, which continues in it."""
    source = write_bin(tmp_path / "old", llama_state(), _use_new_zipfile_serialization=False)
    checkpoint = open_checkpoint(source)
    assert checkpoint.shards[0].spilled
    read = []
    for work, left in ((tmp_path / "new", {}), (tmp_path / "used", {".spilled-0": b"x" * 10**6})):
        work.mkdir()
        for name, content in left.items():
            (work / name).write_bytes(content)
        with ExitStack() as stack:
            assert SourceFiles(checkpoint, work, stack)[0]
            read.append((work / ".spilled-0").read_bytes())
        assert list(work.iterdir()) == []
    assert read[0] == read[1]


def refused(source: Path, kind: type[GQAConvertError], *words: str) -> None:
    with pytest.raises(kind) as caught:
        open_checkpoint(source)
    message = str(caught.value)
    assert message.isprintable()
    for word in (SINGLE, *words):
        assert word in message


class TestRead:
    def test_a_module_s_own_state(self, tmp_path: Path) -> None:
        state: Any = collections.OrderedDict(
            (name, torch.nn.Parameter(tensor)) for name, tensor in llama_state().items()
        )
        state._metadata = collections.OrderedDict({"": {"version": 1}})
        assert same(converted(write_bin(tmp_path / "bin", state)), expected(tmp_path))

    def test_several_files(self, tmp_path: Path) -> None:
        state, source = llama_state(), tmp_path / "bin"
        source.mkdir()
        write_config(source)
        (source / "tokenizer.json").write_text('{"version": "1.0"}')
        weight_map = {}
        for number, names in enumerate(split(list(state), 3), 1):
            file = f"pytorch_model-{number:05d}-of-00003.bin"
            torch.save({name: state[name] for name in names}, source / file)
            weight_map |= dict.fromkeys(names, file)
        write_index(source / "pytorch_model.bin.index.json", weight_map)
        convert_checkpoint(source, tmp_path / "out", 4, ConversionOptions(method="mean"))
        convert_checkpoint(
            write_llama(tmp_path / "reference-source", shards=3),
            tmp_path / "reference",
            4,
            ConversionOptions(method="mean"),
        )
        ours, theirs = digests(tmp_path / "out"), digests(tmp_path / "reference")
        assert ours.keys() == theirs.keys()
        assert same(read_weights(tmp_path / "out"), read_weights(tmp_path / "reference"))
        index = "model.safetensors.index.json"
        assert json.loads((tmp_path / "out" / index).read_bytes()) == json.loads(
            (tmp_path / "reference" / index).read_bytes()
        )

    def test_tied_and_shared_tensors(self, tmp_path: Path) -> None:
        state = llama_state()
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
        norms = torch.stack([state["model.norm.weight"], state["model.layers.0.input_layernorm.weight"]])
        state["model.norm.weight"], state["model.layers.0.input_layernorm.weight"] = norms[0], norms[1]
        source = write_bin(tmp_path / "bin", state)
        assert not open_checkpoint(source).shards[0].spilled
        assert same(converted(source), expected(tmp_path, {name: tensor.numpy() for name, tensor in state.items()}))

    @pytest.mark.parametrize("kind", ["transposed", "expanded"])
    def test_tensors_in_another_order_are_spilled(self, tmp_path: Path, kind: str) -> None:
        state = llama_state()
        name = "model.layers.1.self_attn.k_proj.weight"
        state[name] = state[name].T.contiguous().T if kind == "transposed" else state[name][:1].expand(96, -1)
        assert not state[name].is_contiguous()
        source = write_bin(tmp_path / "bin", state)
        assert open_checkpoint(source).shards[0].spilled
        assert same(
            converted(source), expected(tmp_path, {key: tensor.contiguous().numpy() for key, tensor in state.items()})
        )

    def test_the_format_before_zip(self, tmp_path: Path) -> None:
        source = write_bin(tmp_path / "bin", llama_state(), _use_new_zipfile_serialization=False)
        assert open_checkpoint(source).shards[0].spilled
        assert same(converted(source), expected(tmp_path))

    def test_types_and_empty_tensors(self, tmp_path: Path) -> None:
        state = {name: tensor.bfloat16() for name, tensor in llama_state().items()}
        extra = {
            "empty": torch.zeros(0, 3),
            "scalar": torch.tensor(3.0),
            "half": torch.ones(3, dtype=torch.float16),
            "mask": torch.ones(2, 2, dtype=torch.bool),
            "positions": torch.arange(5),
            "double": torch.ones(1, dtype=torch.float64),
        }
        from safetensors.torch import load_file, save_file

        results = []
        for number, options in enumerate(({}, {"_use_new_zipfile_serialization": False})):
            source = write_bin(tmp_path / f"bin{number}", state | extra, **options)
            convert_checkpoint(source, tmp_path / f"out{number}", 4, ConversionOptions(method="mean"))
            results.append(load_file(tmp_path / f"out{number}" / "model.safetensors"))
        reference = write_llama(tmp_path / "reference")
        save_file(state | extra, reference / "model.safetensors", {"format": "pt"})
        convert_checkpoint(reference, tmp_path / "out", 4, ConversionOptions(method="mean"))
        wanted = load_file(tmp_path / "out" / "model.safetensors")
        for result in results:
            assert result.keys() == wanted.keys()
            assert all(
                result[name].dtype == wanted[name].dtype and torch.equal(result[name], wanted[name]) for name in wanted
            )

    def test_safetensors_go_first(self, tmp_path: Path) -> None:
        source = write_llama(tmp_path / "both")
        (source / SINGLE).write_bytes(b"not even a file of torch's")
        checkpoint = open_checkpoint(source)
        assert checkpoint.weights_format == "safetensors"
        assert checkpoint.left_behind == (SINGLE,)


class _Canary:
    """A pickle that writes a file when it is loaded with trust."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


class TestRefuse:
    @pytest.mark.parametrize("legacy", [False, True])
    @pytest.mark.parametrize("place", ["beside tensors", "as a tensor's name", "alone"])
    def test_code_is_never_run(self, tmp_path: Path, place: str, legacy: bool) -> None:
        canary = tmp_path / "canary"
        bomb: Any = _Canary(canary)
        state: Any = {"beside tensors": llama_state() | {"x": bomb}, "as a tensor's name": {bomb: 1}, "alone": bomb}[
            place
        ]
        source = write_bin(tmp_path / "bin", state, _use_new_zipfile_serialization=not legacy)
        refused(source, CorruptCheckpointError, "never run")
        with pytest.raises(GQAConvertError):
            convert_checkpoint(source, tmp_path / "out", 4, ConversionOptions(method="mean"))
        assert not canary.exists()
        torch.load(source / SINGLE, weights_only=False)  # the bomb is a live one
        assert canary.exists()

    @pytest.mark.parametrize("legacy", [False, True])
    @pytest.mark.parametrize("part", [0.0, 0.01, 0.5, 0.99])
    def test_a_truncated_file(self, tmp_path: Path, part: float, legacy: bool) -> None:
        source = write_bin(tmp_path / "bin", llama_state(), _use_new_zipfile_serialization=not legacy)
        os.truncate(source / SINGLE, int((source / SINGLE).stat().st_size * part))
        with pytest.raises(GQAConvertError) as caught:
            convert_checkpoint(source, tmp_path / "out", 4, ConversionOptions(method="mean"))
        assert str(caught.value).isprintable()
        assert SINGLE in str(caught.value)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["bin"]

    @pytest.mark.parametrize(
        "raw", [b"", b"PK", b"\x80\x02}q\x00.", b"not a pickle", b"PK\x05\x06" + b"\0" * 18, b"<html>\n</html>\n"]
    )
    def test_something_else(self, tmp_path: Path, raw: bytes) -> None:
        source = write_bin(tmp_path / "bin", {})
        (source / SINGLE).write_bytes(raw)
        refused(source, CorruptCheckpointError)

    @pytest.mark.parametrize(
        ("state", "kind", "words"),
        [
            ([torch.ones(1)], UnsupportedFormatError, "list"),
            (torch.ones(1), UnsupportedFormatError, "Tensor"),
            ({"model": {"x": torch.ones(1)}}, UnsupportedFormatError, "'model', a dict"),
            ({"x": torch.ones(1), "step": 3}, UnsupportedFormatError, "'step', a int"),
            ({3: torch.ones(1)}, UnsupportedFormatError, "3"),
            ({"x": torch.ones(2, 2).to_sparse()}, UnsupportedFormatError, "sparse"),
            ({"__metadata__": torch.ones(1)}, CorruptCheckpointError, "invalid name"),
            ({"a\nb": torch.ones(1)}, CorruptCheckpointError, "a\\nb"),
            ({"x.weight": torch.ones(2).to(torch.float8_e4m3fn)}, UnsupportedFormatError, "quantised"),
            ({"x": torch.ones(2, dtype=torch.complex128)}, UnsupportedFormatError, "complex128"),
        ],
    )
    @pytest.mark.filterwarnings("ignore::Warning")
    def test_not_a_map_of_plain_tensors(
        self, tmp_path: Path, state: Any, kind: type[GQAConvertError], words: str
    ) -> None:
        refused(write_bin(tmp_path / "bin", state), kind, words)

    def test_an_index_that_leaves_the_folder(self, tmp_path: Path) -> None:
        source = write_bin(tmp_path / "bin", {})
        (source / SINGLE).rename(source / "pytorch_model-1.bin")
        write_index(source / "pytorch_model.bin.index.json", {"x": "../bin/pytorch_model-1.bin"})
        with pytest.raises(CorruptCheckpointError, match=r"not a \.bin file in this folder"):
            open_checkpoint(source)
        write_index(source / "pytorch_model.bin.index.json", {"x": "model.safetensors"})
        with pytest.raises(CorruptCheckpointError, match=r"not a \.bin file"):
            open_checkpoint(source)
