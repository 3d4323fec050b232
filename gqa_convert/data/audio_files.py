"""Reads a folder of sound, with or without its texts, in the convention of datasets' `audiofolder`.

Files of metadata in it state `file_name`, from where they lie, and `text` for each sound; without them, every audio file
counts, and there are no texts. soundfile decodes the files, and soxr resamples them.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gqa_convert.data.files import explained, read_rows
from gqa_convert.data.folders import TRAIN, data_files, note_unread
from gqa_convert.errors import DataError, MissingExtraError

SUFFIXES = (".wav", ".flac", ".mp3", ".ogg", ".opus", ".aiff", ".aif")
METADATA = ("metadata.csv", "metadata.jsonl", "metadata.parquet")
SHORTEST_SECONDS = 0.2
"""A shorter file holds no word."""

Samples = npt.NDArray[np.float32]


class AudioFile(NamedTuple):
    """A file of sound, and what is said in it; None where the folder has no texts."""

    path: Path
    text: str | None


def list_audio_files(folder: Path, split: str = TRAIN) -> list[AudioFile]:
    """The audio files of a folder, in the order of their metadata, or of their names.

    Raises:
        DataError: there is no folder, no such split or no audio file, or the metadata does not fit the files.
    """
    if not folder.is_dir():
        raise DataError(
            f"{folder} is no folder: a model that hears takes a folder of audio files, with texts or without"
        )
    paths = data_files(folder, SUFFIXES, split, shared=METADATA)
    sounds = [path for path in paths if path.name not in METADATA]
    if not sounds:
        raise DataError(
            f"{folder} holds no audio files ({', '.join(SUFFIXES)}): name a folder that does"
        )
    texts: dict[Path, str] = {}
    for metadata in (path for path in paths if path.name in METADATA):
        problem = "has no rows: add one for each audio file, or remove it"
        with explained(metadata), metadata.open("rb") as handle:
            for _, row in read_rows(metadata, handle, ("file_name", "text")):
                name, text = row.get("file_name"), row.get("text")
                path = metadata.parent / str(name)
                problem = ""
                if not isinstance(name, str):
                    problem = "has a row without file_name: every row names its audio file"
                elif path in texts:
                    problem = f"names {name}, which a row before it names: remove one of them"
                elif not path.is_file():
                    problem = f"names {name}, which is not there: add it or remove the row"
                elif not isinstance(text, str):
                    problem = f"states no text for {name}: add it, or remove the row"
                if problem:
                    break
                texts[path] = str(text)
        if problem:
            raise DataError(f"{metadata} {problem}")
    # rows of one file may describe sounds of several splits
    found = [AudioFile(path, text) for path, text in texts.items() if path in sounds]
    if found:
        note_unread(folder, {path: "not in the metadata" for path in sounds if path not in texts})
    return found or [AudioFile(path, None) for path in sounds]


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
        raise DataError(
            f"{path} can't be read as sound ({problem}): repair it, or take it out of the folder"
        ) from None
    samples: Samples = soxr.resample(channels.mean(axis=1), found_rate, rate)
    fault = ""
    if len(samples) < SHORTEST_SECONDS * rate:
        fault = f"lasts {len(samples) / rate:.2f} seconds, and nothing is said in less than {SHORTEST_SECONDS}"
    elif not np.isfinite(samples).all():
        fault = "holds samples that are no finite numbers"
    if fault:
        raise DataError(f"{path} {fault}: take it out of the folder")
    return samples
