"""Tokenizers, and token sources without files."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import gqa_convert
from gqa_convert.data import samples
from gqa_convert.data.objectives import SampleSettings
from gqa_convert.data.sources import Source, as_source
from gqa_convert.data.token_files import LAST, TokenSource

DEMO = Path(gqa_convert.__file__).parent / "demo_checkpoint"
WORDS = 500
PAD, EOS = 0, 1


def demo_tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(DEMO)


def word_tokenizer(names: list[str], **special: str | None) -> Any:
    """A tokenizer of words between spaces, whose tokens are numbered as the names are."""
    tokenizer = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", **special)


def span_tokenizer(sentinels: int = 100, eos: str | None = "</s>") -> Any:
    """Words w0, w1, ... and sentinels as T5 has them, the first one last; the word w0 is the token 3."""
    names = ["<pad>", "</s>", "<unk>", *(f"w{number}" for number in range(WORDS)), "[NLU]", "[NLG]", "[S2S]"]
    names += [f"<extra_id_{number}>" for number in reversed(range(sentinels))]
    return word_tokenizer(names, eos_token=eos, pad_token="<pad>")


def array_tokens(tokens: npt.ArrayLike, *, is_stream: bool = False, complete: bool = True) -> TokenSource:
    """Tokens in memory; the end-of-text token ends documents."""
    marked = np.array(tokens, np.uint32)
    marked[marked == EOS] |= LAST
    return TokenSource(marked, is_stream=is_stream, complete=complete)


_CACHE = ("is_local_main", "wait", "progress")
_OWN = ("seed", "tokens")


def open_samples(sources: Any, tokenizer: Any, **given: Any) -> samples.Samples:
    """Samples, by the names of all settings in one call."""
    return samples.open_samples(_sources(sources), *_settings(tokenizer, given), **given)


def evaluation_blocks(sources: Any, tokenizer: Any, **given: Any) -> samples.EvaluationBlocks:
    """Blocks, by the names of all settings in one call."""
    return samples.evaluation_blocks(_sources(sources), *_settings(tokenizer, given), **given)


def _sources(given: Any) -> list[Source]:
    return [as_source(source) for source in ([given] if isinstance(given, str) else given)]


def _settings(tokenizer: Any, given: dict[str, Any]) -> tuple[SampleSettings, samples.TokenCache]:
    """The settings of samples and the cache, which are taken out of what is given."""
    cache = {name: given.pop(name) for name in _CACHE if name in given}
    if "cache" in given:
        cache["folder"] = given.pop("cache")
    rest = {name: given.pop(name) for name in list(given) if name not in _OWN}
    return SampleSettings(tokenizer, length=rest.pop("sequence_length"), **rest), samples.TokenCache(**cache)
