"""Word errors of a Whisper and its results in faster-whisper, which runs them by CTranslate2.

    python -m benchmarks.real.faster_whisper --sounds HELD_OUT --models SOURCE RESULT RESULT

HELD_OUT is a folder of benchmarks.real.spoken. Each model is converted to float32 and to int8, and
hears all sounds at once, by greedy search and with five beams, and with timestamps too, as by
default in faster-whisper; without the fallback to other temperatures. Errors are per word that is
said, after transformers' normaliser. The encoder, which no conversion changes, hears a sound once
for each type of weights. The table goes into docs/results/README.md.
"""

import argparse
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from faster_whisper import WhisperModel
from faster_whisper.audio import decode_audio, pad_or_trim
from faster_whisper.tokenizer import Tokenizer
from faster_whisper.transcribe import get_suppressed_tokens
from transformers.models.whisper.english_normalizer import EnglishTextNormalizer

from benchmarks.pages import filled, table
from gqa_convert.families.loading import read_config
from gqa_convert.measuring.evaluation.scoring import word_errors
from gqa_convert.publishing.atomic_files import write_json
from gqa_convert.serving.ctranslate2 import make_folder

OUTPUT, PAGE = Path("docs/results/faster-whisper.json"), Path("docs/results/README.md")
TYPES = ("float32", "int8")
SEARCHES = ((1, False), (5, False), (5, True))
"""Beams, and whether timestamps are decoded."""


def listen(model: WhisperModel, sounds: list[Path]) -> Any:
    """What the encoder makes of sounds, by faster-whisper's features."""
    features = []
    for sound in sounds:
        samples = decode_audio(str(sound), model.feature_extractor.sampling_rate)
        features.append(pad_or_trim(model.feature_extractor(samples)))
    return model.encode(np.stack(features))


def transcribe(
    model: WhisperModel, heard: Any, count: int, beam: int, timestamps: bool
) -> list[str]:
    """What a model writes, with faster-whisper's prompt and suppressed tokens."""
    tokenizer = Tokenizer(model.hf_tokenizer, True, task="transcribe", language="en")
    prompt = model.get_prompt(tokenizer, [], without_timestamps=not timestamps)
    suppressed = get_suppressed_tokens(tokenizer, [-1])
    results = model.model.generate(
        heard,
        [prompt] * count,
        beam_size=beam,
        max_length=model.max_length,
        suppress_tokens=suppressed,
    )
    tokens = [result.sequences_ids[0] for result in results]
    return [tokenizer.decode([token for token in row if token < tokenizer.eot]) for row in tokens]


def score(said: list[str], heard: list[str]) -> dict[str, float]:
    """Word errors and their standard error over sounds."""
    spoken = list(zip(said, heard, strict=True))
    wrong, words = word_errors(spoken, EnglishTextNormalizer({}))
    rate = wrong.sum() / words.sum()
    error = np.sqrt(len(words)) * np.std(wrong - rate * words) / words.sum()
    return {"word_errors": round(float(rate), 4), "error": round(float(error), 4)}


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """A cell for each model, type and number of beams."""
    lines = (options.sounds / "metadata.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines[: options.count]]
    sounds = [options.sounds / row["file_name"] for row in rows]
    cells = []
    for kind in TYPES:
        heard = None
        for folder in options.models:
            config = read_config(folder)
            kv_heads = config.get("multi_query_group_num", config["decoder_attention_heads"])
            with TemporaryDirectory() as made:
                make_folder(folder, Path(made) / "model", kind)
                model = WhisperModel(f"{made}/model", compute_type=kind, cpu_threads=1)
                if heard is None:
                    heard = listen(model, sounds)
                for beam, timestamps in SEARCHES:
                    texts = transcribe(model, heard, len(sounds), beam, timestamps)
                    scores = score([row["text"] for row in rows], texts)
                    cell = {"kv_heads": kv_heads, "type": kind, "beam": beam}
                    cells.append({**cell, "timestamps": timestamps, **scores})
                    print(cells[-1], flush=True)
    return cells


def report(cells: list[dict[str, Any]]) -> str:
    """A row for each number of heads."""
    columns = [(kind, *search) for kind in TYPES for search in SEARCHES]
    header = ["K/V heads"]
    for kind, beam, timestamps in columns:
        header.append(f"{kind}, beam {beam}{', timestamps' if timestamps else ''}")
    shown = {}
    for cell in cells:
        key = (cell["kv_heads"], cell["type"], cell["beam"], cell["timestamps"])
        shown[key] = f"{cell['word_errors']:.1%} ± {100 * cell['error']:.1f}"
    numbers = dict.fromkeys(cell["kv_heads"] for cell in cells)
    rows = [[str(number), *(shown[number, *column] for column in columns)] for number in numbers]
    return table(header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", type=Path, nargs="+", required=True)
    parser.add_argument("--sounds", type=Path, required=True)
    parser.add_argument("--count", type=int, default=30, help="sounds (default: 30)")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    options = parser.parse_args()
    cells = measure(options)
    write_json(options.output, {"sounds": options.count, "cells": cells})
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(filled(page, "faster-whisper", report(cells)), encoding="utf-8")


if __name__ == "__main__":
    main()
