"""`metrics.jsonl`: one JSON object per optimizer step."""

import json
import os
from pathlib import Path
from typing import Any


class Metrics:
    """Appends to the file; a run that goes on from a step forgets what lies behind it.

    Args:
        path: of the file.
        step: the last step that counts; lines of later ones, and a line cut short by a crash, are removed.
    """

    def __init__(self, path: Path, step: int) -> None:
        kept = [line for line in read_metrics(path) if line["step"] <= step]
        partial = path.with_suffix(".jsonl.new")
        with partial.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in kept)
            file.flush()
            os.fsync(file.fileno())
        partial.rename(path)
        self._file = path.open("a", encoding="utf-8")

    def write(self, **values: Any) -> None:
        """Add a line; the kernel has it when this returns."""
        self._file.write(json.dumps({key: value for key, value in values.items() if value is not None}) + "\n")
        self._file.flush()

    def close(self) -> None:
        os.fsync(self._file.fileno())
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file, as far as they are whole; none if there is no file."""
    lines: list[dict[str, Any]] = []
    if path.is_file():
        for text in path.read_text(encoding="utf-8").splitlines():
            try:
                line = json.loads(text)
            except ValueError:
                break
            if isinstance(line, dict) and isinstance(line.get("step"), int):
                lines.append(line)
    return lines
