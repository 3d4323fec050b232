"""Results of encoder-decoders in CTranslate2 itself, against transformers."""

from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from gqa_convert import convert_checkpoint
from gqa_convert.conversion.options import ConversionOptions
from gqa_convert.serving.checking import ask_transformers, compare
from gqa_convert.serving.ctranslate2 import Adapter, make_folder
from gqa_convert.serving.request import NEW_TOKENS, NotSupportedError, Request
from gqa_convert.serving.worker import OK, Outcome
from tests.helpers.command_line import run, run_python
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


def compared(out: Path) -> dict[str, Any]:
    """What is said of the adapter, which works in this process and in the working directory."""
    prompts, reference = ask_transformers(out)
    written = [made[:-1] for made in reference.tokens]
    request = Request(
        folder=str(out), context=400, run_code=False, prompts=prompts, written=written
    )
    adapter = Adapter(request)
    logits = list(map(adapter.logits, prompts, written))
    tokens = adapter.generate(prompts)
    return compare(reference, Outcome(OK, tokens=tokens, logits=logits), prompts)


@pytest.mark.parametrize(
    ("case", "kv_heads"),
    [
        ("t5", 3),
        ("t5", 1),
        ("t5, version 1.1", 4),  # outputs are not scaled
        ("mt5", 3),
        ("umt5", 3),
        ("bart", 3),  # other heads in the encoder
        ("bart", 1),
        ("mbart", 3),  # no start token of its own
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
    found = compared(out)
    assert found["status"] == OK, found
    assert found["tokens"] >= 2 * NEW_TOKENS
    assert found["largest_difference"] < found["allowed"] / 100


def test_the_command_that_checks(tmp_path: Path) -> None:
    shown = run("check-serving", make_result("t5", tmp_path, 4), "--engine", "ctranslate2")
    assert shown.returncode == 0, shown.stdout + shown.stderr
    assert shown.stdout.startswith(
        f"ok             ctranslate2 {version('ctranslate2')}  72 tokens"
    )


def test_the_folder(tmp_path: Path) -> None:
    """It is made once, with the files that faster-whisper reads, in the type that is asked for."""
    import ctranslate2

    result, out = make_result("whisper", tmp_path, 3), tmp_path / "folder"
    (result / "preprocessor_config.json").write_text("{}", encoding="utf-8")
    command = ("-m", "gqa_convert.serving.ctranslate2", result, out, "--quantization")
    wrong = run_python(*command, "int7")
    assert (wrong.returncode, "int7 is not a valid" in wrong.stderr) == (2, True)
    made = run_python(*command, "int8")
    assert made.returncode == 0, made.stderr
    names = ["config.json", "model.bin", "preprocessor_config.json", "tokenizer.json"]
    assert sorted(path.name for path in out.iterdir()) == [*names, "vocabulary.json"]
    assert ctranslate2.models.Whisper(str(out)).compute_type == "int8_float32"
    again = run_python(*command, "int8")
    assert (again.returncode, f"{out} exists already" in again.stderr) == (2, True)


def test_what_has_no_loader_is_not_supported(tmp_path: Path) -> None:
    with pytest.raises(NotSupportedError, match="no loader for gqa_gpt2"):
        make_folder(make_result("gpt2", tmp_path, 3), tmp_path / "folder")
