"""Measurements on the disk: commands of gqa-convert, and one JSON file that grows cell by cell, so
that a killed measurement loses only the cell it was at.
"""

import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from gqa_convert.publishing.atomic_files import write_json
from gqa_convert.runtime.machine import machine

Cell = dict[str, Any]


def gqa_convert(*words: str | Path) -> tuple[dict[str, Any], dict[str, float]]:
    """The JSON of a command of gqa-convert, and the minutes that it took: `minutes` of wall time,
    and `core_minutes` of all cores together. What it says goes to this process's stderr.
    """
    began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "gqa_convert", *map(str, words), "--json"]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, env=os.environ | {"COLUMNS": "120"}, check=False
    )
    if done.returncode not in (0, 1):
        raise SystemExit(f"{' '.join(map(str, words))} ended with exit code {done.returncode}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    wall = time.monotonic() - began
    return json.loads(done.stdout), {
        "minutes": round(wall / 60, 2),
        "core_minutes": round(processor / 60, 2),
    }


class Records:
    """A JSON file of `{"commands", "machine", "models", "cells"}`; a cell is known by its keys.

    Args:
        path: of the file; it need not exist.
        keys: what tells cells apart.
        module: the name that stands after `python -m` in the command that is running.
    """

    def __init__(self, path: Path, keys: tuple[str, ...], module: str) -> None:
        self.path, self.keys = path, keys
        self.data: dict[str, Any] = {"commands": [], "models": {}, "cells": []}
        if path.is_file():
            self.data = json.loads(path.read_text(encoding="utf-8"))
        # a path of one machine says nothing on another
        words = [Path(word).name if Path(word).is_absolute() else word for word in sys.argv[1:]]
        line = ["python", "-m", module, *words]
        if line not in self.data["commands"]:
            self.data["commands"].append(line)
        self.data["versions"] = dict(machine().versions)

    def cell(self, **keys: Any) -> Cell:
        """The cell with these values of all keys; a new one if there is none."""
        cells: list[Cell] = self.data["cells"]
        for cell in cells:
            if all(cell[key] == keys[key] for key in self.keys):
                return cell
        cells.append(dict(keys))
        return cells[-1]

    def write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_json(self.path, self.data)
