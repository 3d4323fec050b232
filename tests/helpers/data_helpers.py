"""Tokenizers, and token sources without files."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import gqa_convert
from gqa_convert.data import samples, token_files
from gqa_convert.data.encoders import LAST
from gqa_convert.data.sampler import SampleSettings
from gqa_convert.data.sources import as_source
from gqa_convert.data.token_files import TokenSource

DEMO = Path(gqa_convert.__file__).parent / "demo_checkpoint"
WORDS = 500
PAD, EOS = 0, 1
SENTINELS = range(WORDS + 6, WORDS + 106)
"""Of `span_tokenizer`."""


def demo_tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(DEMO)


def word_tokenizer(names: list[str], **special: str | None) -> Any:
    """A tokenizer of words between spaces, whose tokens are numbered as the names are."""
    tokenizer = Tokenizer(
        models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", **special)


def span_tokenizer(sentinels: int = 100, eos: str | None = "</s>") -> Any:
    """Words w0, w1, ... and sentinels as T5 has them, the first one last; the word w0 is the
    token 3.
    """
    names = [
        "<pad>",
        "</s>",
        "<unk>",
        *(f"w{number}" for number in range(WORDS)),
        "[NLU]",
        "[NLG]",
        "[S2S]",
    ]
    names += [f"<extra_id_{number}>" for number in reversed(range(sentinels))]
    return word_tokenizer(names, eos_token=eos, pad_token="<pad>")


def restored(inputs: list[int], targets: list[int]) -> list[int]:
    """The text of `span_tokenizer` that T5's span corruption took apart."""
    assert inputs[-1] == targets[-1] == EOS
    spans: dict[int, list[int]] = {}
    for token in targets[:-1]:
        if token in SENTINELS:
            spans[token] = []
        else:
            spans[[*spans][-1]].append(token)
    text = [
        token
        for each in inputs[:-1]
        for token in (spans.pop(each) if each in SENTINELS else [each])
    ]
    assert not spans
    return text


def array_tokens(
    tokens: npt.ArrayLike, *, is_stream: bool = False, complete: bool = True
) -> TokenSource:
    """Tokens in memory; the end-of-text token ends documents."""
    marked = np.array(tokens, np.uint32)
    marked[marked == EOS] |= LAST
    return TokenSource(marked, is_stream=is_stream, complete=complete)


def tokenize_into(cache: Path, text: Any, encoder: Any, **settings: Any) -> TokenSource:
    """The tokens of a text, kept in a folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_files, "default_cache", lambda: cache)
        return token_files.tokenize(text, encoder, **settings)


_OWN = ("seed", "tokens")


def open_samples(sources: Any, tokenizer: Any, **given: Any) -> samples.Samples:
    """Samples, by the names of all settings in one call."""
    return _opened(samples.open_samples, sources, tokenizer, {"seed": 0, "tokens": 10**9} | given)


def evaluation_blocks(sources: Any, tokenizer: Any, **given: Any) -> samples.EvaluationBlocks:
    """Blocks, by the names of all settings in one call."""
    return _opened(samples.evaluation_blocks, sources, tokenizer, given)


def _opened(call: Any, sources: Any, tokenizer: Any, given: dict[str, Any]) -> Any:
    named = [as_source(source) for source in ([sources] if isinstance(sources, str) else sources)]
    own = {name: given.pop(name) for name in _OWN if name in given}
    progress = given.pop("progress", lambda *_: None)
    with pytest.MonkeyPatch.context() as patch:
        if "cache" in given:
            patch.setenv("XDG_CACHE_HOME", str(given.pop("cache")))
        settings = SampleSettings(tokenizer, length=given.pop("sequence_length"), **given)
        return call(named, settings, progress, **own)
