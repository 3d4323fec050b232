"""Sentences of Debian's prose, spoken by espeak-ng in five voices: an audio folder with its texts.

    python -m benchmarks.real.spoken /tmp/whisper/held-out --sentences 200 --held-out
    python -m benchmarks.real.spoken /tmp/whisper/calibration --sentences 400

The folder follows the convention of `datasets`: WAV files, and metadata.jsonl with `file_name` and
`text`.
"""

import argparse
import json
import random
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

from benchmarks.real.text import prose

VOICES = ("en-us", "en-gb", "en-us+f3", "en-gb+m3", "en-gb-scotland")
_WORDS = range(8, 29)
"""How many words a sentence has."""
_SENTENCE = re.compile(r"[A-Z][A-Za-z ,;'-]+\.")
"""Sentences that are spoken as they are written: without digits, abbreviations and names of
files.
"""


def sentences(held_out: bool, seed: int) -> Iterator[str]:
    """Distinct sentences in a shuffled order, from other pages where `held_out`."""
    found: dict[str, None] = {}
    for page in prose(held_out):
        for paragraph in page.split("\n\n"):
            for text in re.split(r"(?<=\.) ", paragraph):
                if _SENTENCE.fullmatch(text) and len(text.split()) in _WORDS:
                    found[text] = None
    shuffled = sorted(found)
    random.Random(seed).shuffle(shuffled)
    yield from shuffled


def speak(folder: Path, count: int, *, held_out: bool, seed: int) -> None:
    """Write `count` spoken sentences to `folder`, which must not exist."""
    folder.mkdir(parents=True)
    rows = []
    for number, text in zip(range(count), sentences(held_out, seed), strict=False):
        name = f"{number:05d}.wav"
        voice = VOICES[number % len(VOICES)]
        subprocess.run(["espeak-ng", "-v", voice, "-w", str(folder / name), text], check=True)
        rows.append({"file_name": name, "text": text})
    if len(rows) < count:
        raise SystemExit(f"the prose has {len(rows)} sentences, {count} were asked for")
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "metadata.jsonl").write_text(lines, encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where to write; must not exist")
    parser.add_argument("--sentences", type=int, default=200)
    parser.add_argument(
        "--held-out",
        action="store_true",
        help="sentences of the pages that calibration does not see",
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    speak(options.folder, options.sentences, held_out=options.held_out, seed=options.seed)
