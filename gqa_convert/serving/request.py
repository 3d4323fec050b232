"""What the adapter of an engine receives. Other interpreters import it: standard library only."""

from dataclasses import dataclass
from typing import Any

TokenIds = list[int]
Config = dict[str, Any]
"""Of a checkpoint."""

NEW_TOKENS = 24
"""Number of tokens that an engine decodes after each prompt."""


class NotSupportedError(Exception):
    """The engine states that it does not know this kind of model, or can't do this.

    Any other error is a failure.
    """


class AbsentError(Exception):
    """Something that the engine needs besides its package is missing."""


@dataclass(frozen=True)
class Request:
    """A model, and the prompts that an engine answers with it, in float32.

    The working directory is for the adapter's own files. The encoder of a text model reads the
    prompt, and the decoder begins with its start token. One that hears gets `random_sound`, and the
    prompt is what its decoder wrote before.

    Attributes:
        folder: the checkpoint.
        context: tokens of the longest sequence, those that are decoded included.
        run_code: whether the checkpoint has this package's modelling file, and no other code.
        prompts: token ids of each prompt.
        written: what transformers decoded after each prompt, but for the last token.
    """

    folder: str
    context: int
    run_code: bool
    prompts: list[TokenIds]
    written: list[TokenIds]


def commands(config: Config) -> TokenIds:
    """Tokens that a model that hears may not write here: its end of text, at which CTranslate2
    stops, and what stands behind that in a Whisper's vocabulary, since CTranslate2 reads a prompt
    with one of these in another way.

    Args:
        config: of the checkpoint.
    """
    end = config["eos_token_id"]
    is_whisper = config["model_type"].endswith("whisper")
    return list(range(end, config["vocab_size"])) if is_whisper else [end]


def random_sound(config: Config) -> Any:
    """What a model that hears gets beside every prompt: noise, float32 [1, mel bins, frames].

    Args:
        config: of the checkpoint.
    """
    import numpy as np

    shape = (1, config["num_mel_bins"], 2 * config["max_source_positions"])
    # the same numbers in every release of NumPy
    return np.random.RandomState(0).standard_normal(shape).astype(np.float32)
