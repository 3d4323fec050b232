"""Text that a checkpoint writes itself (`self` as a source), generated once into the cache and then read like any other.

Liu et al. 2023 (LLM-QAT) distil on such text where that of the pretraining is not at hand.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gqa_convert.checkpoint.paths import local_path
from gqa_convert.checkpoint.source import open_checkpoint
from gqa_convert.text.generating import GenerationOptions, generate_text, generation_settings


@dataclass(frozen=True, slots=True)
class OwnText:
    """Text of a checkpoint's own.

    Attributes:
        file: JSON lines in the cache, with `text`.
        label: what it is, for records.
    """

    file: Path
    label: str


def own_text(
    model: str | Path,
    cache: Path,
    *,
    tokens: int,
    seed: int = 0,
    temperature: float = 1.0,
    device: str | None = None,
    progress: Callable[[str, int, int], None] = lambda label, done, total: None,
) -> OwnText:
    """The text that a checkpoint writes, generated unless the cache has it; a call that was stopped is continued.

    Each text begins with the token that begins documents. The file is found again by the checkpoint's files, the number
    of tokens, the seed and the temperature.

    Args:
        model: the checkpoint, a folder or a Hub id.
        cache: the folder of the file.
        tokens: to generate at least.
        seed: of the sampling.
        temperature: of the sampling.
        device: such as `cpu` or `cuda:1`; None for a GPU if there is one.
        progress: called with a label, the tokens that are generated and their number.

    Raises:
        OptionError: the model is an encoder-decoder, or a number is out of range.
        DataError: the tokenizer has no token to begin with.
        StoppedError: a signal asked to stop; finished batches are kept.
    """
    options = GenerationOptions(tokens=tokens, seed=seed, temperature=temperature, device=device)
    checkpoint = open_checkpoint(str(model), download=True)
    key = json.dumps([generation_settings(checkpoint, options), tokens], sort_keys=True)
    file = cache / f"own-text-{hashlib.sha256(key.encode()).hexdigest()[:32]}.jsonl"
    name = local_path(checkpoint.source_id).name if checkpoint.folder else checkpoint.source_id
    label = f"{name}'s own text (at least {tokens:,} tokens at temperature {temperature:g}, seed {seed})"
    if not file.is_file():
        cache.mkdir(parents=True, exist_ok=True)
        generate_text(checkpoint, file, options, progress)
    return OwnText(file, label)
