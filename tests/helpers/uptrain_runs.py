"""A converted checkpoint, recipes of a few steps, and runs in other processes, for the tests of
uptraining.
"""

import argparse
import hashlib
import inspect
import json
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Never

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

import gqa_convert
from gqa_convert import convert_checkpoint
from gqa_convert.conversion.options import ConversionOptions
from gqa_convert.errors import GQAConvertError, InterruptedRunError
from gqa_convert.training.uptrain import uptrain_checkpoint

DEMO = Path(gqa_convert.__file__).parent / "demo_checkpoint"
STEPS = 6
SMALL: dict[str, Any] = {
    "tokens": STEPS * 64,
    "tokens_per_step": 64,
    "sequence_length": 32,
    "learning_rate": 1e-3,
    "precision": "no",
    "save_every": 2,
}


MEASURED = ("peak_memory_gb",)
"""The values of a line of metrics that differ between two equal runs, beside `tokens_per_second`.
"""


def make_student(folder: Path) -> Path:
    """The bundled model with 3 K/V heads, and text beside it."""
    convert_checkpoint(DEMO, folder / "student", 3, ConversionOptions(method="mean"))
    (folder / "text.txt").write_text(inspect.getsource(argparse)[:40_000], encoding="utf-8")
    (folder / "other.txt").write_text(inspect.getsource(json.decoder)[:3_000], encoding="utf-8")
    return folder


def in_float32(folder: Path) -> None:
    """Store a checkpoint in float32, so that merging adapters and asking a teacher rounds
    nothing.
    """
    tensors = load_file(folder / "model.safetensors")
    wide = {name: each.float() for name, each in tensors.items()}
    save_file(wide, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))


@contextmanager
def student_home(folder: Path) -> Iterator[Path]:
    """A context with a student in a folder, in which the cache of tokens lies too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        yield make_student(folder)


def recipe(home: Path, output: Path, **keys: Any) -> Path:
    """Write a recipe file for a run of a few steps."""
    values = {
        "model": str(home / "student"),
        "data": str(home / "text.txt"),
        "output": str(output),
        **SMALL,
        **keys,
    }
    path = output.with_suffix(".yaml")
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return path


def run(home: Path, output: Path, **keys: Any) -> dict[str, Any]:
    """Run a recipe in this process."""
    return uptrain_checkpoint(recipe(home, output, **keys), []).as_json()


def metrics(output: Path) -> list[dict[str, Any]]:
    """Return the lines of the metrics file, without what depends on the clock and the machine."""
    lines = [
        json.loads(line)
        for line in (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    for line in lines:
        assert line.pop("tokens_per_second") > 0
        for name in MEASURED:
            line.pop(name)
    return lines


def losses(output: Path) -> list[float]:
    return [line["loss"] for line in metrics(output)]


def weights(output: Path) -> str:
    return hashlib.sha256((output / "model" / "model.safetensors").read_bytes()).hexdigest()


def leftovers(output: Path) -> list[str]:
    """Return the hidden files, which only an unfinished run may have."""
    hidden = [path for path in output.rglob(".*") if path.name not in (".lock", ".metadata")]
    return sorted(str(path.relative_to(output)) for path in hidden)


def in_child(action: Callable[[], Any]) -> tuple[int, str]:
    """Its exit status (negative for a signal) and the error's message, of an action in a fork of
    this process.
    """
    torch.set_num_threads(1)  # threads of kernels do not survive a fork
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there are other threads
        pid = os.fork()
    if pid == 0:
        os.close(read)
        _act(action, write)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        message = pipe.read().decode()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), message


def _act(action: Callable[[], Any], pipe: int) -> Never:
    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = (
        "1"  # torch's kernels fail now and then in threads of a fork
    )
    status = 0
    try:
        action()
    except (GQAConvertError, InterruptedRunError) as mistake:
        status = mistake.exit_code
        os.write(pipe, str(mistake).encode())
    except BaseException as problem:
        status = 99
        os.write(pipe, f"{type(problem).__name__}: {problem}".encode())
    os._exit(status)


class AtFileEvent:
    """Does something at the n-th time that Python touches a path below a folder: opens, renames,
    removes, makes.

    Attributes:
        seen: how many there were.
    """

    EVENTS = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "shutil.rmtree")

    def __init__(self, folder: Path, number: int, act: Callable[[], None]) -> None:
        self.seen = 0
        self._folder, self._number, self._act = f"{folder}/", number, act
        sys.addaudithook(self._hook)  # for good: for forks only

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in self.EVENTS and str(arguments[0]).startswith(self._folder):
            self.seen += 1
            if self.seen == self._number:
                self._act()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
