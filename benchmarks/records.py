"""Results on the disk: one JSON file that grows cell by cell, so that a killed measurement loses only the cell it was
at.
"""

import hashlib
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

from gqa_convert import __version__

Cell = dict[str, Any]
_FOLDER_OPTIONS = ("--cache", "--folder")
"""Options that name a place on one machine, which is of no use to others."""


def versions() -> dict[str, str]:
    return {
        "gqa_convert": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def command_line(module: str) -> list[str]:
    """The command that is running, as a user would give it.

    Args:
        module: the name that stands after `python -m`.
    """
    given = sys.argv[1:]
    for option in _FOLDER_OPTIONS:
        if option in given:
            del given[given.index(option) : given.index(option) + 2]
    return ["python", "-m", module, *given]


def fingerprint(folder: Path) -> str:
    """Of a checkpoint's weights."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


class Records:
    """A JSON file of `{"commands", "models", "cells"}`; a cell is known by its keys.

    Args:
        path: of the file; it need not exist.
        keys: what tells cells apart.
    """

    def __init__(self, path: Path, keys: tuple[str, ...]) -> None:
        self.path, self.keys = path, keys
        self.data: dict[str, Any] = {"commands": [], "versions": versions(), "models": {}, "cells": []}
        if path.is_file():
            self.data = json.loads(path.read_text(encoding="utf-8")) | {"versions": versions()}

    @property
    def cells(self) -> list[Cell]:
        found: list[Cell] = self.data["cells"]
        return found

    def begin(self, module: str, held_out_tokens: int) -> None:
        """Remember the command that is running, and what losses are measured on.

        Args:
            module: the name that stands after `python -m`.
            held_out_tokens: the number of tokens; a file contains the measurements of one number.
        """
        if self.data.setdefault("held_out_tokens", held_out_tokens) != held_out_tokens:
            sys.exit(
                f"{self.path} was measured on {self.data['held_out_tokens']} tokens, this is {held_out_tokens}: name another --output"
            )
        line = command_line(module)
        if line not in self.data["commands"]:
            self.data["commands"].append(line)

    def model(self, name: str, folder: Path) -> dict[str, Any]:
        """What is known of a source; cells of other weights by the same name are dropped."""
        now = fingerprint(folder)
        known: dict[str, Any] = self.data["models"].setdefault(name, {"weights": now})
        if known["weights"] != now:
            sys.stderr.write(f"{folder} has other weights than those measured: its cells are measured anew\n")
            self.data["cells"] = [cell for cell in self.cells if cell["model"] != name]
            known = self.data["models"][name] = {"weights": now}
        return known

    def find(self, **wanted: Any) -> Cell | None:
        """The cell with these values of all keys."""
        return next((cell for cell in self.cells if all(cell[key] == wanted[key] for key in self.keys)), None)

    def add(self, cell: Cell) -> None:
        """Put a cell in place of the one with the same keys, and write the file."""
        old = self.find(**{key: cell[key] for key in self.keys})
        self.data["cells"] = [other for other in self.cells if other is not old] + [cell]
        self.write()

    def write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        temporary.write_text(json.dumps(self.data, indent=1) + "\n", encoding="utf-8")
        temporary.replace(self.path)
