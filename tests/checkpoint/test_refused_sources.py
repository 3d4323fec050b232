"""Folders as users have them that hold no checkpoint to convert, with the exact line that each one gets."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gqa_convert.checkpoint.source import open_checkpoint
from gqa_convert.errors import GQAConvertError
from tests.helpers.checkpoints import CONFIG, llama_arrays, write_index, write_llama

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 9976576152\n"
ORIGINAL = "convert the unquantised checkpoint that it was made from"
Files = dict[str, str]


def adapter(base: str | None = "meta-llama/Llama-2-7b-hf", task: str | None = "CAUSAL_LM") -> str:
    return json.dumps({"base_model_name_or_path": base, "peft_type": "LORA", "r": 8, "task_type": task})


def quantised(**stated: Any) -> Files:
    return {"config.json": json.dumps(CONFIG | {"quantization_config": stated}), "model.safetensors": "{}"}


def plain(method: str) -> str:
    return (
        f"HERE/config.json says that the weights are quantised ({method}): `gqa-convert convert HERE PLAIN --groups N` writes them "
        "dequantised in bfloat16, and with the source's own number of K/V heads it changes nothing else"
    )


def merging(base: str) -> str:
    return (
        f"HERE holds an adapter{base} (adapter_config.json): merge it into its base model (peft's merge_and_unload), save that with its "
        "tokenizer, and convert it; or, to convert a model without it, move adapter_* to another folder"
    )


WHOLE = {"config.json": json.dumps(CONFIG)}
SHARDS = [f"pytorch_model-{number:05d}-of-00003.bin" for number in (1, 2, 3)]
INDEX = json.dumps({"metadata": {}, "weight_map": {f"t{number}": file for number, file in enumerate(SHARDS)}})
OTHERS = "HERE holds only weights for other programs: convert the Hugging Face checkpoint that they were made from"

REFUSED: dict[str, tuple[Files, str]] = {
    # adapters
    "a LoRA adapter": (
        {"adapter_config.json": adapter(), "adapter_model.safetensors": "{}", "tokenizer.json": "{}"},
        merging(" of meta-llama/Llama-2-7b-hf"),
    ),
    "an adapter whose config is no object": ({"adapter_config.json": "[]"}, merging("")),
    "an adapter beside its base": (
        WHOLE | {"model.safetensors": "{}", "adapter_config.json": adapter(), "adapter_model.safetensors": "{}"},
        merging(" of meta-llama/Llama-2-7b-hf"),
    ),
    "an adapter without its config": (
        WHOLE | {"adapter_model.bin": "{}"},
        (
            "HERE holds an adapter, not a whole model: merge it into its base model first (merge_and_unload) (found adapter_model.bin)"
        ),
    ),
    "a training checkpoint in parts": (
        WHOLE | {"checkpoint/__0_0.distcp": "", "checkpoint/.metadata": ""},
        (
            "HERE holds a training checkpoint in parts: consolidate it first (torch.distributed.checkpoint.format_utils, or DeepSpeed's "
            "zero_to_fp32.py) (found checkpoint/__0_0.distcp)"
        ),
    ),
    # quantised
    "GPTQ": (
        quantised(quant_method="gptq", bits=4, group_size=128, desc_act=False),
        f"HERE/config.json says that the weights are quantised (gptq): {ORIGINAL}",
    ),
    "bitsandbytes": (
        quantised(quant_method="bitsandbytes", load_in_4bit=True, bnb_4bit_quant_type="nf4"),
        f"HERE/config.json says that the weights are quantised (bitsandbytes): {ORIGINAL}",
    ),
    "FP8 with scales per block": (
        quantised(activation_scheme="dynamic", fmt="e4m3", quant_method="fp8", weight_block_size=[128, 128]),
        plain("fp8"),
    ),
    "MLX": (
        WHOLE
        | {
            "config.json": json.dumps(CONFIG | {"quantization": {"group_size": 64, "bits": 4}}),
            "model.safetensors": "{}",
        },
        f"HERE/config.json says that the weights are quantised (mlx): {ORIGINAL}",
    ),
    # foreign formats
    "GGUF": (WHOLE | {"model-Q4_K_M.gguf": "{}"}, f"{OTHERS} (found model-Q4_K_M.gguf)"),
    "original/ of Llama": (
        {"original/consolidated.00.pth": "{}", "original/params.json": "{}", "original/tokenizer.model": "{}"},
        f"{OTHERS} (found original/consolidated.00.pth)",
    ),
    "ONNX": (WHOLE | {"onnx/model_quantized.onnx": "{}"}, f"{OTHERS} (found onnx/model_quantized.onnx)"),
    "TensorFlow": (WHOLE | {"tf_model.h5": "{}"}, f"{OTHERS} (found tf_model.h5)"),
    "a trainer's folder": (
        {
            "checkpoint-500/config.json": "{}",
            "checkpoint-500/model.safetensors": "{}",
            "checkpoint-1000/pytorch_model.bin": "{}",
        },
        "HERE holds no weights itself: name a subfolder with weights, such as checkpoint-500 (2 found)",
    ),
    # incomplete downloads
    "Git LFS pointers": (
        WHOLE | {"pytorch_model.bin": POINTER},
        (
            "HERE/pytorch_model.bin is only a Git LFS pointer to its content: fetch the files with `git lfs pull`, or download the repository "
            "with `hf download`"
        ),
    ),
    "missing shards": (
        WHOLE | {"pytorch_model.bin.index.json": INDEX, SHARDS[1]: "{}"},
        (
            f"HERE/{SHARDS[0]} is missing, although pytorch_model.bin.index.json names it (and 1 more of its 3 files): finish the "
            "download (`hf download` resumes), or copy it again"
        ),
    ),
    "a variant that transformers does not load by default": (
        WHOLE | {"model.fp16.safetensors": "{}"},
        (
            "HERE holds no weights that transformers loads by default (none of model.safetensors, model.safetensors.index.json, "
            "pytorch_model.bin, pytorch_model.bin.index.json): name the folder that save_pretrained wrote, or finish the download"
        ),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_the_line(name: str, tmp_path: Path) -> None:
    files, line = REFUSED[name]
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    assert message(tmp_path) == line


def message(folder: Path) -> str:
    """The refusal of a folder, which is called HERE in it."""
    with pytest.raises(GQAConvertError) as caught:
        open_checkpoint(folder)
    return str(caught.value).replace(str(folder), "HERE")


CHANGED: dict[str, tuple[Callable[[Path], object], str]] = {
    "a tensor that an index lists and its file lacks": (
        lambda folder: write_index(
            folder / "model.safetensors.index.json",
            json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
            | {"model.layers.2.self_attn.k_proj.weight": "model-00002-of-00002.safetensors"},
        ),
        (
            "HERE: the index and the weight files disagree on tensor 'model.layers.2.self_attn.k_proj.weight' in "
            "model-00002-of-00002.safetensors: download or copy all of them again"
        ),
    ),
    "a tokenizer that is a Git LFS pointer": (
        lambda folder: (folder / "tokenizer.model").write_text(POINTER),
        (
            "HERE/tokenizer.model is only a Git LFS pointer to its content: fetch the files with `git lfs pull`, or download the repository "
            "with `hf download`"
        ),
    ),
}


@pytest.mark.parametrize("name", CHANGED)
def test_the_line_about_a_damaged_checkpoint(name: str, tmp_path: Path) -> None:
    folder = write_llama(tmp_path / "source", arrays=llama_arrays(), shards=2)
    change, line = CHANGED[name]
    change(folder)
    assert message(folder) == line
