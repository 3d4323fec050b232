"""The model that is converted, and where everything lies in the benchmark's folder."""

from pathlib import Path
from typing import NamedTuple

DEFAULT_FOLDER = Path("~/.cache/gqa-convert/real")
SMOLLM2 = "smollm2"


class Target(NamedTuple):
    """A source and the number of K/V heads that it is converted to."""

    model: str
    groups: int


KV_HEADS = {SMOLLM2: 3}
TARGET = Target(SMOLLM2, 1)


def model_folder(folder: Path, model: str) -> Path:
    return folder / model


def text_file(folder: Path, kind: str, part: str) -> Path:
    """The JSON lines of a kind; `part` is `calibration` or `held-out`."""
    return folder / "text" / f"{kind}-{part}.jsonl"


def scratch(folder: Path, *parts: str) -> Path:
    """A path for files that can be made again; its parent exists."""
    path = folder.joinpath("scratch", *parts)
    path.parent.mkdir(parents=True, exist_ok=True)
    return path
