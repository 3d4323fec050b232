"""`.bin` checkpoints: the same result as from safetensors, little memory, and no code run."""

import collections
import os
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from gqa_convert.checkpoint.source import open_checkpoint
from gqa_convert.conversion.options import ConversionOptions
from gqa_convert.conversion.run import convert_checkpoint
from gqa_convert.errors import CorruptCheckpointError, GQAConvertError, UnsupportedFormatError
from tests.helpers.checkpoints import (
    by_mean,
    digests,
    llama_arrays,
    refused,
    same_weights,
    split,
    write_config,
    write_index,
    write_llama,
)

State = dict[str, torch.Tensor]
SINGLE = "pytorch_model.bin"
OLD = {"_use_new_zipfile_serialization": False}
"""Options of `torch.save` for the format before torch 1.6."""


def llama_state() -> State:
    return {name: torch.from_numpy(array) for name, array in llama_arrays().items()}


def write_bin(folder: Path, state: Any, **options: Any) -> Path:
    """A checkpoint folder around one `.bin` file."""
    folder.mkdir(exist_ok=True)
    write_config(folder)
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    torch.save(state, folder / SINGLE, **options)
    return folder


def check_conversion(source: Path, state: State, shards: int = 1) -> None:
    """The result is that of the same tensors in safetensors, file by file."""
    base = source.parent
    plain = write_llama(base / "plain", shards=shards)
    if shards == 1:
        tensors = {name: tensor.detach().clone().contiguous() for name, tensor in state.items()}
        save_file(tensors, plain / "model.safetensors", {"format": "pt"})
    by_mean(plain, base / "expected")
    by_mean(source, base / "out")
    wanted, found = digests(base / "expected"), digests(base / "out")
    assert found.keys() == wanted.keys()
    differing = {name for name in found if found[name] != wanted[name]}
    assert all(name.endswith(".safetensors") for name in differing), (
        "tensors have their order in the source"
    )
    assert same_weights(base / "out", base / "expected")


class TestRead:
    def test_a_module_s_own_state(self, tmp_path: Path) -> None:
        parameters = [(name, torch.nn.Parameter(tensor)) for name, tensor in llama_state().items()]
        state: Any = collections.OrderedDict(parameters)
        state._metadata = collections.OrderedDict({"": {"version": 1}})
        check_conversion(write_bin(tmp_path / "bin", state), state)

    def test_several_files(self, tmp_path: Path) -> None:
        state = llama_state()
        source = write_bin(tmp_path / "bin", {})
        (source / SINGLE).unlink()
        weight_map = {}
        for number, names in enumerate(split(list(state), 3), 1):
            file = f"pytorch_model-{number:05d}-of-00003.bin"
            torch.save({name: state[name] for name in names}, source / file)
            weight_map |= dict.fromkeys(names, file)
        write_index(source / "pytorch_model.bin.index.json", weight_map)
        check_conversion(source, state, shards=3)

    def test_tied_and_shared_tensors(self, tmp_path: Path) -> None:
        state = llama_state()
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
        norms = torch.stack(
            [state["model.norm.weight"], state["model.layers.0.input_layernorm.weight"]]
        )
        state["model.norm.weight"], state["model.layers.0.input_layernorm.weight"] = (
            norms[0],
            norms[1],
        )
        check_conversion(write_bin(tmp_path / "bin", state), state)

    @pytest.mark.parametrize("kind", ["transposed", "expanded"])
    def test_tensors_whose_numbers_lie_in_another_order(self, tmp_path: Path, kind: str) -> None:
        state = llama_state()
        name = "model.layers.1.self_attn.k_proj.weight"
        state[name] = (
            state[name].T.contiguous().T if kind == "transposed" else state[name][:1].expand(96, -1)
        )
        assert not state[name].is_contiguous()
        check_conversion(write_bin(tmp_path / "bin", state), state)

    @pytest.mark.parametrize("options", [{}, OLD])
    def test_types_and_empty_tensors(self, tmp_path: Path, options: dict[str, Any]) -> None:
        state = {name: tensor.bfloat16() for name, tensor in llama_state().items()} | {
            "empty": torch.zeros(0, 3),
            "scalar": torch.tensor(3.0),
            "half": torch.ones(3, dtype=torch.float16),
            "mask": torch.ones(2, 2, dtype=torch.bool),
            "positions": torch.arange(5),
            "double": torch.ones(1, dtype=torch.float64),
        }
        check_conversion(write_bin(tmp_path / "bin", state, **options), state)

    def test_a_compressed_file(self, tmp_path: Path) -> None:
        state = llama_state()
        source = write_bin(tmp_path / "bin", state)
        with zipfile.ZipFile(source / SINGLE) as plain:
            records = {record: plain.read(record) for record in plain.namelist()}
        with zipfile.ZipFile(source / SINGLE, "w", zipfile.ZIP_DEFLATED) as compressed:
            for name, content in records.items():
                compressed.writestr(name, content)
        check_conversion(source, state)

    def test_a_file_that_changes_meanwhile(self, tmp_path: Path) -> None:
        source = write_bin(tmp_path / "bin", llama_state())
        options = ConversionOptions(method="mean")
        with refused(CorruptCheckpointError, SINGLE, "changed"):
            convert_checkpoint(
                source, tmp_path / "out", 4, options, progress=lambda _: os.utime(source / SINGLE)
            )
        assert not (tmp_path / "out").exists()

    def test_safetensors_go_first(self, tmp_path: Path) -> None:
        source = write_llama(tmp_path / "both")
        (source / SINGLE).write_bytes(b"not even a file of torch's")
        checkpoint = open_checkpoint(source)
        assert checkpoint.weights_format == "safetensors"
        assert checkpoint.left_behind == (SINGLE,)


def refuses(source: Path, kind: type[GQAConvertError], *words: str) -> None:
    with refused(kind, SINGLE, *words):
        open_checkpoint(source)


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
        state: Any = {
            "beside tensors": llama_state() | {"x": bomb},
            "as a tensor's name": {bomb: 1},
            "alone": bomb,
        }[place]
        source = write_bin(tmp_path / "bin", state, _use_new_zipfile_serialization=not legacy)
        refuses(source, CorruptCheckpointError, "never run")
        with pytest.raises(GQAConvertError):
            by_mean(source, tmp_path / "out", 4)
        assert not canary.exists()
        torch.load(source / SINGLE, weights_only=False)  # the bomb is a live one
        assert canary.exists()

    @pytest.mark.parametrize("legacy", [False, True])
    @pytest.mark.parametrize("part", [0.0, 0.01, 0.5, 0.99])
    def test_a_truncated_file(self, tmp_path: Path, part: float, legacy: bool) -> None:
        source = write_bin(
            tmp_path / "bin", llama_state(), _use_new_zipfile_serialization=not legacy
        )
        os.truncate(source / SINGLE, int((source / SINGLE).stat().st_size * part))
        with pytest.raises(GQAConvertError) as caught:
            by_mean(source, tmp_path / "out", 4)
        assert str(caught.value).isprintable()
        assert SINGLE in str(caught.value)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["bin"]

    @pytest.mark.parametrize(
        "raw",
        [
            b"",
            b"PK",
            b"\x80\x02}q\x00.",
            b"not a pickle",
            b"PK\x05\x06" + b"\0" * 18,
            b"<html>\n</html>\n",
        ],
    )
    def test_something_else(self, tmp_path: Path, raw: bytes) -> None:
        source = write_bin(tmp_path / "bin", {})
        (source / SINGLE).write_bytes(raw)
        refuses(source, CorruptCheckpointError)

    @pytest.mark.parametrize(
        ("state", "words"),
        [
            ([torch.ones(1)], "holds a list"),
            (torch.ones(1), "Tensor, no map"),
            ({"model": {"x": torch.ones(1)}}, "'model' (dict)"),
            ({"x": torch.ones(1), "step": 3}, "'step' (int)"),
            ({3: torch.ones(1)}, "3 (torch.float32"),
            ({"x": torch.ones(2, 2).to_sparse()}, "torch.sparse_coo"),
            ({"__metadata__": torch.ones(1)}, "'__metadata__'"),
            ({"a\nb": torch.ones(1)}, "'a\\nb' (torch.float32"),
            ({"x.weight": torch.ones(2).to(torch.float8_e4m3fn)}, "quantised"),
            ({"x": torch.ones(2, dtype=torch.complex128)}, "torch.complex128"),
        ],
    )
    @pytest.mark.filterwarnings("ignore::Warning")
    def test_not_a_map_of_plain_tensors(self, tmp_path: Path, state: Any, words: str) -> None:
        refuses(write_bin(tmp_path / "bin", state), UnsupportedFormatError, words)
