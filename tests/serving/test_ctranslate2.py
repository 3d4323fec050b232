"""Results of encoder-decoders in CTranslate2 itself, against transformers."""

import json
from pathlib import Path

import ctranslate2
import pytest

from gqa_convert import convert_checkpoint
from gqa_convert.conversion.options import ConversionOptions
from gqa_convert.serving import ctranslate2 as maker
from gqa_convert.serving.checking import ask_transformers, check_serving, compare
from gqa_convert.serving.ctranslate2 import Adapter, make_folder
from gqa_convert.serving.request import NEW_TOKENS, NotSupportedError, Request
from gqa_convert.serving.worker import OK, Outcome
from tests.helpers.data_helpers import word_tokenizer
from tests.helpers.own_files import CASES, make_source

SPECIAL = ("<pad>", "</s>", "<unk>")
SPOKEN = ("<|endoftext|>", "<|startoftranscript|>", "<|transcribe|>", "<|notimestamps|>")
"""Whisper's special tokens, which stand behind all others."""
WORDS = 60


def make_result(case: str, folder: Path, kv_heads: int | list[int]) -> Path:
    """A tiny result with a tokenizer of 64 tokens."""
    words = [f"w{number}" for number in range(WORDS)]
    kind, changes = CASES[case]
    if kind == "whisper":
        names, special = [*words, *SPOKEN], {"eos_token": SPOKEN[0], "bos_token": SPOKEN[1]}
        changes = {"decoder_start_token_id": WORDS + 1, "eos_token_id": WORDS}
        changes |= {"max_target_positions": 400}
    else:
        names = [*SPECIAL, *words, "<s>"]
        special = {"eos_token": "</s>", "pad_token": "<pad>", "bos_token": "<s>"}
        changes = changes | {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
    source = make_source(kind, folder / "source", **changes)
    word_tokenizer(names, **special).save_pretrained(source)
    out = folder / "out"
    convert_checkpoint(source, out, kv_heads, ConversionOptions(method="mean"))
    return out


def found_in_engine(out: Path) -> dict:
    """What the comparison says of the adapter, in this process; the working directory is its own."""
    prompts, reference = ask_transformers(out)
    sequences = [
        prompt + made[:-1] for prompt, made in zip(prompts, reference.tokens, strict=True)
    ]
    request = Request(
        folder=str(out), context=400, run_code=False, prompts=prompts, sequences=sequences
    )
    adapter = Adapter(request)
    tokens = adapter.generate(prompts, NEW_TOKENS)
    logits = []
    for prompt, sequence in zip(prompts, sequences, strict=True):
        logits.append(adapter.logits(sequence, list(range(len(prompt) - 1, len(sequence)))))
    return compare(reference, Outcome(OK, tokens=tokens, logits=logits), prompts)


@pytest.mark.parametrize(
    ("case", "kv_heads"),
    [
        ("t5", 3),
        ("t5", 1),
        ("t5, version 1.1", 4),
        ("mt5", 3),
        ("umt5", 3),
        ("bart", 3),
        ("bart", 1),
        ("mbart", 3),
        ("pegasus", 3),
        ("whisper", 12),
        ("whisper", 3),
        ("whisper", 1),
        ("opt", 3),
    ],
)
def test_tokens_and_logits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, kv_heads: int
) -> None:
    out = make_result(case, tmp_path, kv_heads)
    monkeypatch.chdir(tmp_path)
    found = found_in_engine(out)
    assert (found["status"], found["largest_difference"] < found["allowed"] / 100) == (OK, True), (
        found
    )
