"""The commands that write files, and a folder with all that they read."""

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from benchmarks.robustness.processes import run_process
from benchmarks.robustness.sources import CONFIG, write_checkpoint

TEXT = "".join(
    f"Line {number} of the text, about {number * 7 % 13} things and {number % 5} more.\n" for number in range(200)
)


@dataclass(frozen=True, slots=True)
class Command:
    """A command that writes.

    Attributes:
        name: its row of the table.
        arguments: of the command line, which runs in the working folder.
        results: patterns of the files that appear whole or not at all, relative to the working folder.
        inputs: folders and files that no run may change.
        timed: whether the results show measured times, so that those of two runs differ.
        prepared_by: a command that makes what this one needs.
    """

    name: str
    arguments: tuple[str, ...]
    results: str
    inputs: tuple[str, ...] = ("model", "text.txt")
    timed: bool = False
    prepared_by: tuple[str, ...] = ()


_RECIPE = (
    "model=pooled",
    "teacher=model",
    "data=text.txt",
    "output=run",
    "tokens=384",
    "tokens_per_step=64",
    "sequence_length=32",
    "micro_batch_size=2",
    "precision=no",
    "save_every=2",
    "log_every=2",
    "learning_rate=1e-3",
)
_POOL = ("convert", "model", "pooled", "-n", "2", "-m", "mean", "-q")
_FIT = ("--calibration", "text.txt", "--calibration-tokens", "256", "--calibration-length", "32", "--fit-steps", "4")

_EVALUATE = ("evaluate", "pooled", "--reference", "model", "--data", "text.txt", "--tokens", "128", "--context", "32")
_BENCHMARK = ("benchmark", "model", "-n", "2", "--context", "8", "--steps", "1", "--repetitions", "1", "--batch", "1")
_MEAN = ("convert", "model", "out", "-n", "2", "-m", "mean")

COMMANDS = (
    Command("convert, mean", _MEAN, "out/**/*"),
    Command(
        "convert --overwrite",
        (*_MEAN, "--overwrite"),
        "out/**/*",
        prepared_by=("convert", "model", "out", "-n", "1", "-m", "first", "-q"),
    ),
    Command("convert, factor", ("convert", "model", "out", "-n", "2", *_FIT[:6], "-m", "factor"), "out/**/*"),
    Command("convert, fit", ("convert", "model", "out", "-n", "2", *_FIT, "--kl-steps", "0"), "out/**/*"),
    Command("restate", ("restate", "yi", "out"), "out/**/*", inputs=("yi",)),
    Command("tokenize", ("tokenize", "recipe.yaml", "--processes", "1"), "cache/*/tokens/*.tokens", prepared_by=_POOL),
    Command("uptrain", ("uptrain", "recipe.yaml"), "run/model/*", ("model", "text.txt", "pooled"), prepared_by=_POOL),
    Command("evaluate --output", (*_EVALUATE, "--output", "loss.json"), "loss.json", prepared_by=_POOL),
    Command("inspect --plot", ("inspect", "model", "--plot", "inspect.png"), "inspect.png"),
    Command("benchmark --plot", (*_BENCHMARK, "--plot", "speed.png"), "speed.png", timed=True),
    Command(
        "publish --dry-run",
        ("publish", "pooled", "--repo-id", "me/pooled", "--base-model", "org/model", "--license", "mit", "--dry-run"),
        "pooled/README.md",
        prepared_by=_POOL,
    ),
)


def use_caches_in(folder: Path) -> None:
    """Set where commands keep what they may reuse: each working folder has a cache of its own, and matplotlib's list of
    fonts lies beside them.
    """
    os.environ["XDG_CACHE_HOME"] = "cache"
    os.environ["MPLCONFIGDIR"] = str(folder / "matplotlib")


def template(folder: Path, prepared_by: tuple[str, ...]) -> Path:
    """A folder with all that commands read, and what another command prepares."""
    write_checkpoint(folder / "model", layers=2)
    shutil.copytree(folder / "model", folder / "yi")
    yi = CONFIG | {"model_type": "Yi", "architectures": ["YiForCausalLM"], "num_hidden_layers": 2}
    (folder / "yi" / "config.json").write_text(json.dumps(yi), encoding="utf-8")
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    lines = [each.replace("=", ": ", 1) for each in _RECIPE]
    (folder / "recipe.yaml").write_text("\n".join(lines) + "\n", encoding="utf-8")
    if prepared_by:
        ended = run_process(prepared_by, folder)
        assert ended.code == 0, ended.printed
    return folder
