"""`metrics.jsonl`: one JSON object per optimizer step."""

import json
import os
from pathlib import Path
from typing import Any

from gqa_convert.checkpoint.atomic_files import write_whole


class Metrics:
    """Appends to the file; a run that goes on from a step forgets what lies behind it.

    Args:
        path: of the file.
        step: the last step that counts; lines of later ones, and a line cut short by a crash, are removed.
    """

    def __init__(self, path: Path, step: int) -> None:
        kept = [line for line in read_metrics(path) if line["step"] <= step]
        write_whole(path, "".join(json.dumps(line) + "\n" for line in kept).encode())
        self._file = path.open("ab", buffering=0)

    def write(self, **values: Any) -> None:
        """Add a line, of what is not None; the kernel has it when this returns."""
        line = memoryview(
            (json.dumps({key: value for key, value in values.items() if value is not None}) + "\n").encode()
        )
        while line:
            line = line[self._file.write(line) :]

    def sync(self) -> None:
        """Wait until all lines are on the disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self.sync()
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file, as far as they are whole; none if there is no file."""
    lines: list[dict[str, Any]] = []
    if path.is_file():
        for text in path.read_bytes().split(b"\n")[:-1]:
            try:
                line = json.loads(text)
            except ValueError:
                break
            if not isinstance(line, dict) or not isinstance(line.get("step"), int):
                break
            lines.append(line)
    return lines
