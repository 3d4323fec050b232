"""Opening a checkpoint: what is read, what is refused, and that every refusal is one line."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from transformers import AutoModelForCausalLM

from gqa_convert.checkpoint import files, quantised
from gqa_convert.checkpoint.source import open_checkpoint, read_checkpoint
from gqa_convert.conversion.options import ConversionOptions
from gqa_convert.conversion.run import convert_checkpoint
from gqa_convert.errors import (
    ConfigError,
    CorruptCheckpointError,
    GQAConvertError,
    SourceNotFoundError,
    UnsupportedFormatError,
)
from tests.helpers.checkpoints import Arrays, llama_arrays, same_weights, split, write_config, write_llama

INDEX = "model.safetensors.index.json"
FIRST = "model-00001-of-00003.safetensors"
SECOND = "model-00002-of-00003.safetensors"


def refused(folder: Path | str, kind: type[GQAConvertError], *words: str, **options: Any) -> None:
    """Check that opening fails with one line that holds all the words."""
    with pytest.raises(kind) as caught:
        open_checkpoint(folder, **options)
    message = str(caught.value)
    assert message.isprintable()
    assert type(caught.value) is kind
    for word in words:
        assert word in message


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return write_llama(tmp_path / "sharded", shards=3)


@pytest.fixture
def single(tmp_path: Path) -> Path:
    return write_llama(tmp_path / "single")


def edit_index(folder: Path, **changes: Any) -> None:
    """Set entries of the weight map; None removes one."""
    index = json.loads((folder / INDEX).read_bytes())
    index["weight_map"] = {name: file for name, file in (index["weight_map"] | changes).items() if file is not None}
    (folder / INDEX).write_text(json.dumps(index))


class TestRead:
    def test_single_and_sharded(self, single: Path, sharded: Path) -> None:
        one, three = open_checkpoint(single), open_checkpoint(str(sharded))
        assert len(one.shards) == 1
        assert [shard.file for shard in three.shards] == [FIRST, SECOND, "model-00003-of-00003.safetensors"]
        assert {name for _, name, _ in one.tensors()} == {name for _, name, _ in three.tensors()} == set(llama_arrays())
        assert one.weight_bytes == three.weight_bytes == sum(array.nbytes for array in llama_arrays().values())
        assert one.index_metadata is None
        assert three.index_metadata == {"total_size": three.weight_bytes}
        assert one.carried == ("tokenizer.json",)

    def test_byte_ranges_are_the_tensors(self, sharded: Path) -> None:
        arrays = llama_arrays()
        checkpoint = open_checkpoint(sharded)
        for number, name, entry in checkpoint.tensors():
            raw = (sharded / checkpoint.shards[number].file).read_bytes()[entry.start : entry.start + entry.nbytes]
            assert raw == arrays[name].tobytes()

    def test_a_single_file_goes_before_an_index_as_in_transformers(self, sharded: Path, tmp_path: Path) -> None:
        other = llama_arrays(seed=5)
        write_llama(sharded, arrays=other)
        assert [shard.file for shard in open_checkpoint(sharded).shards] == ["model.safetensors"]
        convert_checkpoint(sharded, tmp_path / "out", 12)
        assert same_weights(tmp_path / "out", write_llama(tmp_path / "other", arrays=other))
        assert not (tmp_path / "out" / INDEX).exists()
        assert not list((tmp_path / "out").glob("model-*"))

    def test_links_into_a_cache_are_followed(self, sharded: Path, tmp_path: Path) -> None:
        snapshot, blobs = tmp_path / "snapshots" / "abc", tmp_path / "blobs"
        snapshot.mkdir(parents=True)
        blobs.mkdir()
        for number, path in enumerate(sorted(sharded.iterdir())):
            path.rename(blobs / str(number))
            (snapshot / path.name).symlink_to(Path("../../blobs", str(number)))
        convert_checkpoint(snapshot, tmp_path / "out", 4)
        assert not any(path.is_symlink() for path in (tmp_path / "out").iterdir())
        convert_checkpoint(write_llama(tmp_path / "plain", shards=3), tmp_path / "expected", 4)
        assert same_weights(tmp_path / "out", tmp_path / "expected")

    def test_a_path_goes_before_a_hub_id(self, single: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(single.parent)
        assert open_checkpoint("single").folder is not None
        refused("single", SourceNotFoundError, "omit --revision", revision="main")


class TestCarriedFiles:
    def test_weights_in_other_formats_stay_behind(self, sharded: Path, tmp_path: Path) -> None:
        left = [
            "pytorch_model.bin",
            "pytorch_model-00001-of-00002.bin",
            "pytorch_model.bin.index.json",
            "training_args.bin",
            "optimizer.pt",
            "scheduler.pt",
            "rng_state_0.pth",
            "consolidated.safetensors",
            "consolidated.00.pth",
            "original/params.json",
            "original/consolidated.00.pth",
            "onnx/model.onnx",
            "onnx/model.onnx_data",
            "tf_model.h5",
            "flax_model.msgpack",
            "model.ckpt.index",
            "ggml-model.gguf",
            "rust_model.ot",
            "global_step5/mp_rank_00.pt",
            "model.fp16.safetensors",
            "openvino/openvino_model.xml",
            "coreml/x/weights/weight.bin",
        ]
        kept = [
            "generation_config.json",
            "README.md",
            "tokenizer.model",
            "chat_template.jinja",
            "modeling_x.py",
            "1_Pooling/config.json",
        ]
        hidden = [".gitattributes", ".cache/huggingface/x.lock", "__pycache__/modeling_x.cpython-311.pyc"]
        for name in [*left, *kept, *hidden]:
            (sharded / name).parent.mkdir(parents=True, exist_ok=True)
            (sharded / name).write_bytes(name.encode())
        assert set(open_checkpoint(sharded).left_behind) == set(left)
        convert_checkpoint(sharded, tmp_path / "out", 4)
        written = {
            path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*") if path.is_file()
        }
        weights = {path.name for path in sharded.glob("model-*")} | {
            INDEX,
            "config.json",
            "gqa_conversion.json",
            "tokenizer.json",
        }
        assert written == weights | set(kept)
        assert all((tmp_path / "out" / name).read_bytes() == name.encode() for name in kept)


class TestIndex:
    @pytest.mark.parametrize(
        "file", ["../x.safetensors", "/etc/x.safetensors", "a/x.safetensors", "", None, 3, ["x"], "config.json", INDEX]
    )
    def test_what_is_no_weight_file_of_the_folder(self, sharded: Path, file: Any) -> None:
        (sharded / "a").mkdir()
        for folder in (sharded.parent, sharded / "a"):
            shutil.copy(sharded / FIRST, folder / "x.safetensors")
        index = json.loads((sharded / INDEX).read_bytes())
        index["weight_map"]["model.norm.weight"] = file
        (sharded / INDEX).write_text(json.dumps(index))
        refused(sharded, CorruptCheckpointError, "model.norm.weight", "not a .safetensors file in this folder")

    def test_a_missing_shard(self, sharded: Path) -> None:
        (sharded / SECOND).unlink()
        refused(sharded, CorruptCheckpointError, SECOND, "missing")

    @pytest.mark.parametrize("keep", [0, 7, 8, 100, -1])
    def test_a_truncated_shard(self, sharded: Path, keep: int) -> None:
        raw = (sharded / SECOND).read_bytes()
        (sharded / SECOND).write_bytes(raw[:keep])
        refused(sharded, CorruptCheckpointError, SECOND)

    @pytest.mark.parametrize("keep", [4, 100])
    def test_a_shard_that_is_cut_while_it_is_read(self, sharded: Path, keep: int) -> None:
        listed = files.LocalFiles(sharded, "sharded")
        os.truncate(sharded / SECOND, keep)
        with pytest.raises(
            CorruptCheckpointError, match=rf"{SECOND} ends at byte {keep} instead of \d+: download or copy it again"
        ):
            read_checkpoint(listed)

    def test_a_header_that_lies(self, sharded: Path) -> None:
        raw = (sharded / SECOND).read_bytes()
        (sharded / SECOND).write_bytes(raw.replace(b"[60,96]", b"[61,96]", 1).replace(b"[56,60]", b"[57,60]", 1))
        refused(sharded, CorruptCheckpointError, SECOND, "invalid shape, data type, or offset")

    def test_a_tensor_in_two_shards(self, sharded: Path) -> None:
        name = split(list(llama_arrays()), 3)[0][0]
        arrays: Arrays = {key: llama_arrays()[key] for key in [name, *split(list(llama_arrays()), 3)[1]]}
        save_file(arrays, sharded / SECOND)
        refused(sharded, CorruptCheckpointError, name, "twice", FIRST, SECOND)

    def test_a_promise_that_is_not_kept(self, sharded: Path) -> None:
        edit_index(sharded, **{"lm_head.extra": FIRST})
        refused(sharded, CorruptCheckpointError, "lm_head.extra", "disagree")
        edit_index(sharded, **{"lm_head.extra": None, "lm_head.weight": FIRST})
        refused(sharded, CorruptCheckpointError, "lm_head.weight", "disagree")

    @pytest.mark.parametrize(
        "raw",
        [
            b"",
            b"{",
            b"[]",
            b"{}",
            b"null",
            b'{"weight_map": {}}',
            b'{"weight_map": []}',
            b'{"weight_map": {"a": "b"}, "metadata": 3}',
            b'{"weight_map": {"a": "x.safetensors", "a": "x.safetensors"}}',
            b'{"weight_map": {}, "weight_map": {}}',
            b"\xff\xfe{}",
            b'{"weight_map": {"\\ud800": "\\ud800.safetensors"}}',
            b"[" * 100_000,
            b'{"a":' + b"9" * 10_000 + b"}",
        ],
    )
    def test_a_damaged_index(self, sharded: Path, raw: bytes) -> None:
        (sharded / INDEX).write_bytes(raw)
        refused(sharded, CorruptCheckpointError, "sharded/")


class TestRefusals:
    @pytest.mark.parametrize(
        "changes",
        [
            {"quantization_config": "int8"},
            {"text_config": {"quantization_config": {"quant_method": "fp8\nx"}}},
            {"text_config": {"compression_config": {"format": "pack"}}},
        ],
    )
    def test_a_quantised_config(self, single: Path, changes: dict[str, Any]) -> None:
        write_config(single, **changes)
        refused(single, UnsupportedFormatError, "quantised")

    def test_no_quantisation(self, single: Path) -> None:
        write_config(single, quantization_config=None, text_config={"quantization_config": None})
        open_checkpoint(single)

    @pytest.mark.parametrize(
        ("prefix", "wrapper"),
        [
            ("module.", "DistributedDataParallel"),
            ("_orig_mod.", "torch.compile"),
            ("module._orig_mod.", "DistributedDataParallel"),
            ("model.layers.0._orig_mod.", "torch.compile"),
            ("base_model.model.", "PEFT"),
            ("_fsdp_wrapped_module.", "FSDP"),
            ("model.layers.0._checkpoint_wrapped_module.", "FSDP"),
        ],
    )
    def test_a_wrapped_model(self, tmp_path: Path, prefix: str, wrapper: str) -> None:
        inside = "model.layers.0." if prefix.startswith("model.") else ""
        arrays = {
            prefix + name.removeprefix(inside) if name.startswith(inside) else name: array
            for name, array in llama_arrays().items()
        }
        folder = write_llama(tmp_path / "wrapped", arrays=arrays)
        refused(folder, UnsupportedFormatError, wrapper, prefix, "save_pretrained")
        missing = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)[1]["missing_keys"]
        assert any("layers.0.self_attn" in name for name in missing)

    def test_adapters_in_folders_of_their_own(self, single: Path, tmp_path: Path) -> None:
        """They were trained for the source's heads."""
        (single / "speech").mkdir()
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            (single / "speech" / name).write_text("{}")
        checkpoint = open_checkpoint(single)
        assert checkpoint.left_behind == ("speech/adapter_config.json", "speech/adapter_model.safetensors")
        convert_checkpoint(single, tmp_path / "out", 3, ConversionOptions(method="mean"))
        assert not (tmp_path / "out" / "speech").exists()

    def test_an_adapter_that_is_not_merged(self, tmp_path: Path) -> None:
        arrays = {
            name.replace("q_proj.weight", "q_proj.base_layer.weight"): array for name, array in llama_arrays().items()
        }
        refused(
            write_llama(tmp_path / "wrapped", arrays=arrays),
            UnsupportedFormatError,
            "PEFT",
            "base_layer",
            "merge_and_unload",
        )

    @pytest.mark.parametrize(
        ("name", "dtype"),
        [
            ("self_attn.k_proj.qweight", np.int32),
            ("self_attn.k_proj.SCB", np.float32),
            ("self_attn.k_proj.weight_scale", np.float32),
            ("self_attn.k_proj.weight_scale_inv", np.float32),
            ("self_attn.k_proj.weight", np.uint8),
            ("mlp.up_proj.weight", np.int8),
            ("mlp.down_proj_blocks", np.uint8),
            ("self_attn.k_proj.g_idx", np.int32),
            ("mlp.weight.quant_state.bitsandbytes__nf4", np.uint8),
        ],
    )
    def test_quantised_tensors(self, single: Path, name: str, dtype: Any) -> None:
        full = f"model.layers.0.{name}"
        save_file(llama_arrays() | {full: np.ones((96, 60), dtype)}, single / "model.safetensors")
        refused(single, UnsupportedFormatError, full, "quantised")

    def test_fp8_weights(self, single: Path) -> None:
        import torch
        from safetensors.torch import save_file as save_torch

        save_torch({"a.weight": torch.ones(4, 4).to(torch.float8_e4m3fn)}, single / "model.safetensors")
        refused(single, UnsupportedFormatError, "F8_E4M3")

    @pytest.mark.parametrize(
        ("files", "words"),
        [
            (["__0_0.distcp", ".metadata"], "consolidate"),
            (["resolved_recipe.yaml", "checkpoints/step-000008/__0_0.distcp"], "folder model/"),
            (["global_step12/mp_rank_00_model_states.pt", "latest"], "zero_to_fp32"),
            (["flax_model.msgpack"], "weights for other programs"),
        ],
    )
    @pytest.mark.parametrize("config", [True, False])
    def test_foreign_formats(self, tmp_path: Path, files: list[str], words: str, config: bool) -> None:
        for name in files:
            (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
            (tmp_path / name).write_bytes(b"{}")
        if config:
            write_config(tmp_path)
        refused(tmp_path, UnsupportedFormatError, words)

    @pytest.mark.parametrize(
        "raw",
        [
            b"",
            b"[]",
            b"[1]",
            b"null",
            b'"x"',
            b"{",
            b"\xff\xfe",
            b"\xef\xbb\xbf{}",
            b'{"a": 1, "a": 2}',
            b'{"a": {"b": 1, "b": 1}}',
            b"[" * 99_999,
        ],
    )
    def test_a_damaged_config(self, single: Path, raw: bytes) -> None:
        (single / "config.json").write_bytes(raw)
        refused(single, ConfigError, "single/config.json")

    def test_no_config(self, single: Path) -> None:
        (single / "config.json").unlink()
        refused(single, ConfigError, "no config.json")

    def test_no_weights(self, single: Path) -> None:
        (single / "model.safetensors").unlink()
        refused(single, SourceNotFoundError, "model.safetensors", "pytorch_model.bin")

    def test_a_gguf_file(self, single: Path) -> None:
        (single / "model-Q4_K_M.gguf").write_bytes(b"GGUF")
        for source in (single / "model-Q4_K_M.gguf", "org/model-GGUF/model-Q8_0.gguf"):
            refused(source, UnsupportedFormatError, "is a GGUF file", "convert the Hugging Face checkpoint")

    @pytest.mark.parametrize("target", ["nowhere", "model.safetensors"])
    def test_a_link_to_nothing(self, single: Path, target: str) -> None:
        (single / "model.safetensors").unlink()
        (single / "model.safetensors").symlink_to(target)
        refused(single, CorruptCheckpointError, "broken link")

    @pytest.mark.parametrize(
        "path", ["~nobody-of-this-name/model", "x" * 5000, "a\0b", "/nowhere/at/all", "./nowhere", "a/b/c", "ä b"]
    )
    def test_paths_to_nothing(self, path: str) -> None:
        refused(path, SourceNotFoundError)

    def test_a_file_that_may_not_be_read(self, single: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def denied(path: Path, *_: Any) -> None:
            raise PermissionError(13, "Permission denied", str(path))

        monkeypatch.setattr(files.Path, "open", denied)
        refused(single, CorruptCheckpointError, "config.json cannot be read (Permission denied)")


@pytest.mark.parametrize(
    ("config", "method"),
    [
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({"text_config": {"quantization_config": {"quant_method": "fp8"}}}, "fp8"),
        ({"quantization_config": {"load_in_4bit": True, "load_in_8bit": False}}, "bitsandbytes"),
        ({"quantization": {"bits": 4, "group_size": 64}}, "mlx"),
        ({"quantization_config": None, "quantization": "none"}, None),
    ],
)
def test_the_method_in_a_config(config: dict[str, Any], method: str | None) -> None:
    assert quantised.quantisation_method(config) == method
