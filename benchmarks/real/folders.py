"""The model that is converted, and where everything lies in the benchmark's folder."""

from pathlib import Path

DEFAULT_FOLDER = Path("~/.cache/gqa-convert/real")
SMOLLM2 = "smollm2"
GROUPS = 1
"""The number of K/V heads that the model, which has 3, is converted to."""


def model_folder(folder: Path) -> Path:
    return folder / SMOLLM2


def text_file(folder: Path, kind: str, part: str) -> Path:
    """The JSON lines of a kind; `part` is `calibration` or `held-out`."""
    return folder / "text" / f"{kind}-{part}.jsonl"


def scratch(folder: Path, *parts: str) -> Path:
    """A path for files that can be made again; its parent exists."""
    path = folder.joinpath("scratch", *parts)
    path.parent.mkdir(parents=True, exist_ok=True)
    return path
