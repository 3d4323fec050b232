"""A tiny model that hears, and folders of generated sound."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
from transformers import WhisperFeatureExtractor

from tests.helpers.data_helpers import demo_tokenizer
from tests.helpers.own_files import make_source

RATE = 16_000
WINDOW_SECONDS = 2


def hearing_model(folder: Path) -> Path:
    """A tiny Whisper with windows of two seconds and the bundled tokenizer; 12 decoder heads."""
    tokenizer = demo_tokenizer()
    sizes = {"vocab_size": len(tokenizer), "max_source_positions": 50 * WINDOW_SECONDS}
    make_source("whisper", folder, eos_token_id=tokenizer.eos_token_id, **sizes)
    tokenizer.save_pretrained(folder)
    WhisperFeatureExtractor(feature_size=8, chunk_length=WINDOW_SECONDS).save_pretrained(folder)
    return folder


def write_sound(
    path: Path, seconds: float, *, pitch: float = 440.0, rate: int = RATE, channels: int = 1
) -> None:
    """A tone with some noise."""
    count = int(seconds * rate)
    noise = np.random.default_rng(int(pitch)).normal(0, 0.05, count)
    samples = 0.5 * np.sin(2 * np.pi * pitch * np.arange(count) / rate) + noise
    soundfile.write(path, np.stack([samples] * channels, axis=1), rate)


def sound_folder(folder: Path, count: int, *, texts: bool = True, seconds: float = 0.5) -> Path:
    """A folder of sounds, with a sentence for each where `texts`."""
    folder.mkdir(parents=True)
    rows: list[dict[str, Any]] = []
    for number in range(count):
        name = f"{number:02d}.wav"
        write_sound(folder / name, seconds, pitch=200 + 30 * number)
        words = ["def", "return", "import", "class", "self"][: 1 + number % 5]
        rows.append({"file_name": name, "text": f"sound {number} " + " ".join(words)})
    if texts:
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / "metadata.jsonl").write_text(lines, encoding="utf-8")
    return folder
