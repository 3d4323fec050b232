"""Reads a folder of sound, with or without its texts, in the convention of datasets' `audiofolder`.

A `metadata.jsonl` or `metadata.csv` states a `file_name` and a text for each file; without one, every audio file of the
folder counts, and there are no texts. soundfile decodes the files, and soxr resamples them.
"""

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gqa_convert.errors import DataError, MissingExtraError

SUFFIXES = (".wav", ".flac", ".mp3", ".ogg", ".opus", ".aiff", ".aif")
TEXT_COLUMNS = ("text", "transcription", "sentence")
"""The names under which datasets of speech hold the text, the first that is there."""
SHORTEST_SECONDS = 0.2
"""A shorter file holds no word."""

Samples = npt.NDArray[np.float32]


class AudioFile(NamedTuple):
    """A file of sound, and what is said in it; None where the folder has no texts."""

    path: Path
    text: str | None


def list_audio_files(folder: Path) -> list[AudioFile]:
    """The audio files of a folder, in the order of their metadata, or of their names.

    Raises:
        DataError: there is no folder or no audio file, or the metadata does not fit the files.
    """
    if not folder.is_dir():
        raise DataError(
            f"{folder} is no folder: a model that hears is calibrated on a folder of audio files, with their texts in "
            "metadata.jsonl or without"
        )
    for name, rows in (("metadata.jsonl", _json_rows), ("metadata.csv", _csv_rows)):
        if (folder / name).is_file():
            return _described_files(folder, name, rows(folder / name))
    found = [AudioFile(path, None) for path in sorted(_audio_files(folder))]
    if not found:
        raise DataError(f"{folder} holds no audio files ({', '.join(SUFFIXES)}): name a folder that does")
    return found


def _audio_files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file())


def _json_rows(path: Path) -> Iterator[Any]:
    for number, line in enumerate(_text(path).split("\n"), 1):
        try:
            if line.strip():
                yield json.loads(line)
        except ValueError as problem:
            raise DataError(f"{path}, line {number}, is no JSON ({problem}): repair it") from None


def _csv_rows(path: Path) -> Iterator[Any]:
    return csv.DictReader(io.StringIO(_text(path), newline=""))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as problem:
        raise DataError(f"{path} is no UTF-8 ({problem}): save it as UTF-8") from None


def _described_files(folder: Path, metadata: str, rows: Iterator[Any]) -> list[AudioFile]:
    """The files of all rows of the metadata."""
    found: dict[Path, AudioFile] = {}
    for row in rows:
        file = _described(folder, metadata, row)
        if file.path in found:
            raise DataError(f"{folder / metadata} names {row['file_name']} twice: remove one of its rows")
        found[file.path] = file
    if not found:
        raise DataError(f"{folder / metadata} has no rows: add one for each audio file, or remove it")
    return list(found.values())


def _described(folder: Path, metadata: str, row: Any) -> AudioFile:
    """The file of a row of the metadata."""
    if not isinstance(row, dict) or not isinstance(row.get("file_name"), str):
        raise DataError(f"{folder / metadata} has a row without file_name: every row names its audio file")
    path = folder / row["file_name"]
    if not path.is_file():
        raise DataError(f"{folder / metadata} names {row['file_name']}, which is not there: add it or remove the row")
    stated = [column for column in TEXT_COLUMNS if isinstance(row.get(column), str)]
    if not stated:
        raise DataError(
            f"{folder / metadata} states no text for {row['file_name']}, in none of the columns {', '.join(TEXT_COLUMNS)}: "
            "add it, or remove the metadata, and the source writes the texts itself"
        )
    return AudioFile(path, row[stated[0]])


def read_audio(path: Path, rate: int) -> Samples:
    """The samples of a file, [n], of one channel at `rate` samples per second.

    Raises:
        DataError: the file can't be decoded, is shorter than `SHORTEST_SECONDS`, or holds NaN.
        MissingExtraError: soundfile or soxr is not installed.
    """
    try:
        import soundfile
        import soxr
    except ImportError as problem:
        raise MissingExtraError(
            f"reading sound needs {problem.name}, which is not installed: pip install 'gqa-convert[audio]'"
        ) from None
    try:
        channels, found_rate = soundfile.read(path, dtype="float32", always_2d=True)
    except (soundfile.SoundFileError, OSError) as problem:
        raise DataError(f"{path} can't be read as sound ({problem}): repair it, or take it out of the folder") from None
    samples: Samples = soxr.resample(channels.mean(axis=1), found_rate, rate)
    if len(samples) < SHORTEST_SECONDS * rate:
        raise DataError(
            f"{path} lasts {len(channels) / found_rate:.2f} seconds, and nothing is said in less than {SHORTEST_SECONDS}: "
            "take it out of the folder"
        )
    if not np.isfinite(samples).all():
        raise DataError(f"{path} holds samples that are no finite numbers: repair it, or take it out of the folder")
    return samples
