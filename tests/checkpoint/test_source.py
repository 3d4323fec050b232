"""Opening a checkpoint: what is read, what is refused, and that every refusal is one line."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from gqa_convert.checkpoint import files, formats
from gqa_convert.checkpoint.source import open_checkpoint, read_checkpoint
from gqa_convert.errors import (
    ConfigError,
    CorruptCheckpointError,
    GQAConvertError,
    SourceNotFoundError,
    UnsupportedFormatError,
)
from tests.helpers.checkpoints import (
    CONFIG,
    by_mean,
    llama_arrays,
    refused,
    same_weights,
    split,
    write_config,
    write_index,
    write_llama,
)

INDEX = "model.safetensors.index.json"
FIRST, SECOND, THIRD = (f"model-{number:05d}-of-00003.safetensors" for number in (1, 2, 3))


def refuses(folder: Path | str, kind: type[GQAConvertError], *words: str, **options: Any) -> None:
    """Opening fails with one line that holds all the words."""
    with refused(kind, *words):
        open_checkpoint(folder, **options)


def write_files(folder: Path, contents: dict[str, str]) -> None:
    for name, text in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return write_llama(tmp_path / "sharded", shards=3)


@pytest.fixture
def single(tmp_path: Path) -> Path:
    return write_llama(tmp_path / "single")


def edit_index(folder: Path, **changes: Any) -> None:
    """Set entries of the weight map; None removes one."""
    weight_map = json.loads((folder / INDEX).read_bytes())["weight_map"] | changes
    write_index(
        folder / INDEX, {name: file for name, file in weight_map.items() if file is not None}
    )


class TestRead:
    def test_single_and_sharded(self, single: Path, sharded: Path) -> None:
        one, three, arrays = open_checkpoint(single), open_checkpoint(str(sharded)), llama_arrays()
        assert [shard.file for shard in one.shards] == ["model.safetensors"]
        assert [shard.file for shard in three.shards] == [FIRST, SECOND, THIRD]
        assert (
            one.weight_bytes == three.weight_bytes == sum(array.nbytes for array in arrays.values())
        )
        assert one.index_metadata is None
        assert three.index_metadata == {"total_size": three.weight_bytes}
        assert one.carried == ("tokenizer.json",)
        for checkpoint, folder in ((one, single), (three, sharded)):
            assert checkpoint.entries.keys() == arrays.keys()
            for number, name, entry in checkpoint.tensors():
                raw = (folder / checkpoint.shards[number].file).read_bytes()
                assert raw[entry.start : entry.start + entry.nbytes] == arrays[name].tobytes()

    def test_a_single_file_goes_before_an_index_as_in_transformers(
        self, sharded: Path, tmp_path: Path
    ) -> None:
        other = llama_arrays(seed=5)
        write_llama(sharded, arrays=other)
        assert [shard.file for shard in open_checkpoint(sharded).shards] == ["model.safetensors"]
        by_mean(sharded, tmp_path / "out", 12)
        assert same_weights(tmp_path / "out", write_llama(tmp_path / "other", arrays=other))
        assert not (tmp_path / "out" / INDEX).exists()
        assert not list((tmp_path / "out").glob("model-*"))

    def test_links_into_a_cache_are_followed(self, sharded: Path, tmp_path: Path) -> None:
        by_mean(sharded, tmp_path / "expected")
        snapshot, blobs = tmp_path / "snapshots" / "abc", tmp_path / "blobs"
        snapshot.mkdir(parents=True)
        blobs.mkdir()
        for number, path in enumerate(sorted(sharded.iterdir())):
            path.rename(blobs / str(number))
            (snapshot / path.name).symlink_to(Path("../../blobs", str(number)))
        by_mean(snapshot, tmp_path / "out")
        assert not any(path.is_symlink() for path in (tmp_path / "out").iterdir())
        assert same_weights(tmp_path / "out", tmp_path / "expected")

    def test_a_path_goes_before_a_hub_id(
        self, single: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(single.parent)
        assert open_checkpoint("single").folder is not None
        refuses("single", SourceNotFoundError, "omit --revision", revision="main")


LEFT = """
    pytorch_model.bin pytorch_model-00001-of-00002.bin pytorch_model.bin.index.json
    training_args.bin optimizer.pt scheduler.pt rng_state_0.pth consolidated.safetensors
    consolidated.00.pth original/params.json original/consolidated.00.pth onnx/model.onnx
    onnx/model.onnx_data tf_model.h5 flax_model.msgpack model.ckpt.index ggml-model.gguf
    rust_model.ot global_step5/mp_rank_00.pt model.fp16.safetensors openvino/openvino_model.xml
    coreml/x/weights/weight.bin speech/adapter_config.json speech/adapter_model.safetensors
"""
KEPT = (
    "generation_config.json README.md tokenizer.model chat_template.jinja modeling_x.py "
    "1_Pooling/config.json"
)
HIDDEN = ".gitattributes .cache/huggingface/x.lock __pycache__/modeling_x.cpython-311.pyc"


def test_weights_in_other_formats_stay_behind(sharded: Path, tmp_path: Path) -> None:
    """And adapters in folders of their own, which were trained for the source's heads."""
    out = tmp_path / "out"
    write_files(sharded, {name: name for name in f"{LEFT} {KEPT} {HIDDEN}".split()})
    assert set(open_checkpoint(sharded).left_behind) == set(LEFT.split())
    by_mean(sharded, out)
    written = {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()}
    weights = {FIRST, SECOND, THIRD, INDEX, "config.json", "gqa_conversion.json", "tokenizer.json"}
    assert written == weights | set(KEPT.split())
    assert all((out / name).read_text() == name for name in KEPT.split())


class TestIndex:
    @pytest.mark.parametrize(
        "file",
        [
            "../x.safetensors",
            "/etc/x.safetensors",
            "a/x.safetensors",
            "",
            None,
            3,
            ["x"],
            "config.json",
        ],
    )
    def test_what_is_no_weight_file_of_the_folder(self, sharded: Path, file: Any) -> None:
        (sharded / "a").mkdir()
        for folder in (sharded.parent, sharded / "a"):
            shutil.copy(sharded / FIRST, folder / "x.safetensors")
        index = json.loads((sharded / INDEX).read_bytes())
        write_index(sharded / INDEX, index["weight_map"] | {"model.norm.weight": file})
        refuses(
            sharded,
            CorruptCheckpointError,
            "model.norm.weight",
            "not a .safetensors file in this folder",
        )

    @pytest.mark.parametrize("keep", [0, 7, 8, 100, -1])
    def test_a_truncated_shard(self, sharded: Path, keep: int) -> None:
        raw = (sharded / SECOND).read_bytes()
        (sharded / SECOND).write_bytes(raw[:keep])
        refuses(sharded, CorruptCheckpointError, SECOND)

    @pytest.mark.parametrize("keep", [4, 100])
    def test_a_shard_that_is_cut_while_it_is_read(self, sharded: Path, keep: int) -> None:
        listed = files.LocalFiles(sharded, "sharded")
        os.truncate(sharded / SECOND, keep)
        with refused(CorruptCheckpointError, f"{SECOND} is truncated, or has a damaged header"):
            read_checkpoint(listed)

    def test_a_tensor_in_two_shards(self, sharded: Path) -> None:
        first, second, _ = split(list(llama_arrays()), 3)
        arrays = llama_arrays()
        save_file(
            {name: torch.from_numpy(arrays[name]) for name in [first[0], *second]}, sharded / SECOND
        )
        refuses(sharded, CorruptCheckpointError, first[0], "disagree", SECOND)

    def test_a_promise_that_is_not_kept(self, sharded: Path) -> None:
        edit_index(sharded, **{"lm_head.extra": FIRST})
        refuses(sharded, CorruptCheckpointError, "lm_head.extra", "disagree")
        edit_index(sharded, **{"lm_head.extra": None, "lm_head.weight": FIRST})
        refuses(sharded, CorruptCheckpointError, "lm_head.weight", "disagree")

    @pytest.mark.parametrize(
        "raw",
        [
            b"{}",
            b'{"weight_map": {}}',
            b'{"weight_map": []}',
            b'{"weight_map": {"a": "b"}, "metadata": 3}',
            b'{"weight_map": {"\\ud800": "\\ud800.safetensors"}}',
            b'{"a":' + b"9" * 10_000 + b"}",
        ],
    )
    def test_a_damaged_index(self, sharded: Path, raw: bytes) -> None:
        (sharded / INDEX).write_bytes(raw)
        refuses(sharded, CorruptCheckpointError, "sharded/")


@pytest.mark.parametrize(
    "raw", [b"", b"[1]", b"null", b"{", b"\xff\xfe", b"\xef\xbb\xbf{}", b"[" * 99_999]
)
def test_a_damaged_config(single: Path, raw: bytes) -> None:
    (single / "config.json").write_bytes(raw)
    refuses(single, ConfigError, "single/config.json")


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_a_type_that_from_pretrained_does_not_know(single: Path, key: str) -> None:
    """Loading the result in a type of one's own would hide it."""
    for known in ("bfloat16", None):
        write_config(single, **{key: known})
        open_checkpoint(single)
    for unknown in ("auto", "torch.bfloat16", "BF16", 16):
        write_config(single, **{key: unknown})
        refuses(single, ConfigError, key, repr(unknown), "which from_pretrained does not know")


@pytest.mark.parametrize(
    ("changes", "method"),
    [
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({"text_config": {"quantization_config": {"quant_method": "fp8\nx"}}}, "fp8\nx"),
        ({"text_config": {"compression_config": {"format": "pack"}}}, "unnamed method"),
        ({"quantization_config": "int8"}, "int8"),
        ({"quantization": {"bits": 4, "group_size": 64}}, "unnamed method"),
        (
            {
                "quantization_config": None,
                "quantization": "none",
                "text_config": {"quantization_config": None},
            },
            None,
        ),
    ],
)
def test_a_quantised_config(single: Path, changes: dict[str, Any], method: str | None) -> None:
    assert formats.quantisation_method(changes) == method
    write_config(single, **changes)
    if method is None:
        open_checkpoint(single)
    else:
        refuses(single, UnsupportedFormatError, "quantised (", "convert the unquantised checkpoint")


class TestTensors:
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
        refuses(folder, UnsupportedFormatError, wrapper, prefix, "save_pretrained")
        missing = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)[1][
            "missing_keys"
        ]
        assert any("layers.0.self_attn" in name for name in missing)

    def test_an_adapter_that_is_not_merged(self, tmp_path: Path) -> None:
        arrays = {
            name.replace("q_proj.", "q_proj.base_layer."): array
            for name, array in llama_arrays().items()
        }
        folder = write_llama(tmp_path / "wrapped", arrays=arrays)
        refuses(folder, UnsupportedFormatError, "PEFT", "base_layer", "merge_and_unload")

    @pytest.mark.parametrize(
        ("name", "dtype"),
        [
            ("self_attn.k_proj.qweight", "int32"),
            ("self_attn.k_proj.SCB", "float32"),
            ("self_attn.k_proj.weight_scale", "float32"),
            ("self_attn.k_proj.weight_scale_inv", "float32"),
            ("self_attn.k_proj.weight", "uint8"),
            ("self_attn.k_proj.weight", "float8_e4m3fn"),
            ("mlp.up_proj.weight", "int8"),
            ("mlp.down_proj_blocks", "uint8"),
            ("self_attn.k_proj.g_idx", "int32"),
            ("mlp.weight.quant_state.bitsandbytes__nf4", "uint8"),
        ],
    )
    def test_quantised(self, single: Path, name: str, dtype: str) -> None:
        full = f"model.layers.0.{name}"
        save_file(
            {full: torch.ones(96, 60).to(getattr(torch, dtype))}, single / "model.safetensors"
        )
        refuses(single, UnsupportedFormatError, full, "quantised")


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 9976576152\n"
WHOLE = {"config.json": json.dumps(CONFIG)}
ADAPTER = {"adapter_config.json": "{}", "adapter_model.safetensors": "{}"}
FP8 = {
    "config.json": json.dumps(CONFIG | {"quantization_config": {"quant_method": "fp8"}}),
    "model.safetensors": "{}",
}
SHARDS = [f"pytorch_model-{number:05d}-of-00003.bin" for number in (1, 2, 3)]
TORCH_INDEX = json.dumps(
    {"metadata": {}, "weight_map": {f"t{number}": file for number, file in enumerate(SHARDS)}}
)
FORMAT, NOT_FOUND, CORRUPT = UnsupportedFormatError, SourceNotFoundError, CorruptCheckpointError

REFUSED: dict[str, tuple[dict[str, str], type[GQAConvertError], str]] = {
    "a LoRA adapter": (
        ADAPTER | {"tokenizer.json": "{}"},
        FORMAT,
        "holds an adapter (adapter_config.json)",
    ),
    "an adapter beside its base": (
        WHOLE | {"model.safetensors": "{}"} | ADAPTER,
        FORMAT,
        "holds an adapter (",
    ),
    "FP8": (FP8, FORMAT, "or one that transformers has dequantised"),
    "GGUF": (
        WHOLE | {"model-Q4_K_M.gguf": "{}"},
        NOT_FOUND,
        "holds no weights that transformers loads by default",
    ),
    "a trainer's folder": (
        {"checkpoint-500/model.safetensors": "{}", "checkpoint-1000/pytorch_model.bin": "{}"},
        NOT_FOUND,
        "name a subfolder that does, such as checkpoint-500",
    ),
    "Git LFS pointers": (
        WHOLE | {"pytorch_model.bin": POINTER},
        CORRUPT,
        "pytorch_model.bin is only a Git LFS pointer",
    ),
    "a Git LFS pointer to a tokenizer": (
        WHOLE | {"model.safetensors": "{}", "tokenizer.model": POINTER},
        CORRUPT,
        "tokenizer.model is only a Git LFS pointer",
    ),
    "missing shards": (
        WHOLE | {"pytorch_model.bin.index.json": TORCH_INDEX, SHARDS[1]: "{}"},
        CORRUPT,
        f"{SHARDS[0]} is missing, although pytorch_model.bin.index.json names it",
    ),
    "an index of .bin files that leaves the folder": (
        WHOLE | {"pytorch_model.bin.index.json": TORCH_INDEX.replace("pytorch_model-", "../")},
        CORRUPT,
        "is not a .bin file in this folder",
    ),
    "a variant that transformers does not load by default": (
        WHOLE | {"model.fp16.safetensors": "{}"},
        NOT_FOUND,
        "(none of model.safetensors, model.safetensors.index.json, pytorch_model.bin",
    ),
    "no config": ({"model.safetensors": "{}"}, ConfigError, "has no config.json"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_folders_without_a_checkpoint_to_convert(name: str, tmp_path: Path) -> None:
    contents, kind, words = REFUSED[name]
    write_files(tmp_path, contents)
    refuses(tmp_path, kind, str(tmp_path), words)


class TestPaths:
    def test_a_file(self, single: Path) -> None:
        refuses(
            single / "model.safetensors",
            SourceNotFoundError,
            "is a file: name the folder that holds config.json",
        )

    @pytest.mark.parametrize("target", ["nowhere", "model.safetensors"])
    def test_a_link_to_nothing(self, single: Path, target: str) -> None:
        (single / "model.safetensors").unlink()
        (single / "model.safetensors").symlink_to(target)
        refuses(single, CorruptCheckpointError, "broken link")

    @pytest.mark.parametrize(
        "path",
        [
            "~nobody-of-this-name/model",
            "x" * 5000,
            "a\0b",
            "/nowhere/at/all",
            "./nowhere",
            "a/b/c",
            "ä b",
            "s3://a/b",
        ],
    )
    def test_paths_to_nothing(self, path: str) -> None:
        with pytest.raises(SourceNotFoundError):
            open_checkpoint(path)

    def test_a_file_that_may_not_be_read(
        self, single: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def denied(path: Path, *_: Any, **__: Any) -> None:
            raise PermissionError(13, "Permission denied", str(path))

        monkeypatch.setattr(files.Path, "open", denied)
        with pytest.raises(PermissionError, match=r"config\.json"):
            open_checkpoint(single)
