"""An engine for tests of check-serving: it repeats the answer that the environment names, right or
with one thing wrong.
"""

import os
import pickle
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gqa_convert.serving.request import NEW_TOKENS, AbsentError, NotSupportedError, Request

TOKENS: dict[str, Any] = {
    "token": lambda tokens: tokens[-1].__setitem__(-1, tokens[-1][-1] ^ 1),
    "first token": lambda tokens: tokens[0].__setitem__(0, tokens[0][0] ^ 1),
    "stops": lambda tokens: tokens[1].__delitem__(slice(7, None)),
    "fewer prompts": lambda tokens: tokens.pop(),
}
LOGITS: dict[str, Any] = {
    "logit": lambda rows: rows.__setitem__((3, 5), rows[3, 5] + 0.02 * (rows.max() - rows.min())),
    "nan": lambda rows: rows.__setitem__((0, 0), float("nan")),
}

BEGINS: dict[str, Callable[[], object]] = {
    "dies": os.abort,
    "exits": lambda: os._exit(0),
    "hangs": lambda: time.sleep(600),
    "asks": lambda: input("Do you trust this checkpoint? "),
    "chatters": lambda: print('{"status": "failed"}'),
}
REFUSALS = {
    "unsupported": NotSupportedError("no such architecture"),
    "absent": AbsentError("no converter"),
}

PACKAGES = Path(__file__).parent / "engine_packages"
"""Packages with the names and the interfaces of the engines', and a converter of llama.cpp."""


def write_interpreter(path: Path, converter: Path = PACKAGES) -> Path:
    """Write a program that is Python with these packages."""
    path.write_text(
        f'#!/bin/sh\nPYTHONPATH={PACKAGES} LLAMA_CPP={converter} exec {sys.executable} "$@"\n'
    )
    path.chmod(0o755)
    return path


class Adapter:
    def __init__(self, request: Request) -> None:
        self._mode = os.environ["FAKE_MODE"]
        if self._mode == "raises":
            raise RuntimeError(f"no tensor\nfits {request.folder}")
        if self._mode == "scratch":
            raise RuntimeError(f"can't read {Path.cwd()}/model.gguf")
        if self._mode in REFUSALS:
            raise REFUSALS[self._mode]
        if self._mode in BEGINS:
            BEGINS[self._mode]()
        self._tokens, self._logits = pickle.loads(Path(os.environ["FAKE_ANSWER"]).read_bytes())

    def generate(self, *_: object) -> list[list[int]]:
        TOKENS.get(self._mode, list)(self._tokens)
        return self._tokens

    def logits(self, prompt: list[int], written: list[int]) -> Any:
        assert len(prompt) > 0
        assert len(written) == NEW_TOKENS - 1
        rows = self._logits.pop(0)
        if self._mode == "fewer rows":
            return rows[1:]
        LOGITS.get(self._mode, list)(rows)
        return rows
