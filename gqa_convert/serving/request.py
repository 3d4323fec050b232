"""What the adapter of an engine receives. The module is imported by the engine's interpreter: standard library only."""

from dataclasses import dataclass

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
    """A model, and the prompts that an engine answers with it, in float32. The working directory is for the adapter's own
    files.

    Attributes:
        folder: the checkpoint.
        context: tokens of the longest sequence, those that are decoded included.
        run_code: whether the checkpoint has this package's modelling file, and no other code.
        prompts: token ids of each prompt.
        sequences: each prompt followed by the tokens that transformers decoded after it.
    """

    folder: str
    context: int
    run_code: bool
    prompts: TokenIds
    sequences: TokenIds
