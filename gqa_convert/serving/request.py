"""What the adapter of an engine receives. The module is imported by the engine's interpreter: standard library only."""

from dataclasses import dataclass, field
from typing import Any

TokenIds = list[list[int]]
"""Those of each of several sequences."""

NEW_TOKENS = 24
"""Number of tokens that an engine decodes after each prompt."""


class NotSupportedError(Exception):
    """The engine states that it does not know this kind of model, or can't do this. Any other error is a failure."""


class AbsentError(Exception):
    """Something that the engine needs besides its package is missing."""


@dataclass(frozen=True)
class Request:
    """A model, and the prompts that an engine answers with it.

    Attributes:
        folder: the checkpoint.
        config: content of its config.json.
        dtype: in which it computes, such as `float32`.
        context: tokens of the longest sequence, those that are decoded included.
        run_code: whether the checkpoint has this package's modelling file, and no other code.
        scratch: an empty folder for the adapter's own files.
        prompts: token ids of each prompt.
        sequences: each prompt followed by the tokens that transformers decoded after it.
    """

    folder: str
    config: dict[str, Any]
    dtype: str
    context: int
    run_code: bool
    scratch: str = ""
    prompts: TokenIds = field(default_factory=list)
    sequences: TokenIds = field(default_factory=list)
