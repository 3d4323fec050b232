"""Text of several kinds for the real model, calibration apart from held-out, as JSON lines:

- `prose`: English, from the Debian packages `debian-handbook` and `anarchism`, divided by file;
- `code`: the standard library's sources, divided by file as for the bundled model;
- `chat`: conversations that the model writes itself, in its chat template;
- `mixed`: prose and code in turn; calibration only.

    python -m benchmarks.real.text /tmp/smollm2 /tmp/real-text
"""

import argparse
import html
import itertools
import json
import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from gqa_convert.data.files import Fields, Files
from gqa_convert.data.folders import is_held_out, source_files
from gqa_convert.families.loading import load_model, load_tokenizer

PACKAGES = {
    "debian-handbook": "usr/share/doc/debian-handbook/html/en-US",
    "anarchism": "usr/share/doc/anarchism/html",
}
KINDS = ("prose", "code", "chat")
_SKIPPED = re.compile(r"<(script|style|head|nav)\b.*?</\1>", re.DOTALL)
_BLOCK = re.compile(r"</?(?:p|li|dd|dt|h[1-5]|pre|blockquote|div|tr|title)\b[^>]*>")
_SHORTEST = 400
"""Characters; what is shorter is navigation."""
_PIECE = 12_000
"""Characters of a document of the mixed text."""
_AT_ONCE = 16
"""Samples of a batch."""
_QUESTION_TOKENS = 96
_SAMPLE_TOKENS = 384


def page_text(page: str) -> str:
    """The paragraphs of a page, separated by empty lines."""
    lines = _BLOCK.sub("\0", _SKIPPED.sub("", page)).split("\0")
    words = [html.unescape(re.sub(r"<[^>]*>", "", line)).split() for line in lines]
    return "\n\n".join(" ".join(line) for line in words if line)


def prose(held_out: bool) -> Iterator[str]:
    """The pages of the packages, which apt-get downloads, in a shuffled order."""
    texts = []
    with tempfile.TemporaryDirectory() as scratch:
        for package, pages in PACKAGES.items():
            subprocess.run(["apt-get", "download", "-qq", package], cwd=scratch, check=True)
            archive = next(Path(scratch).glob(f"{package}_*.deb"))
            subprocess.run(["dpkg-deb", "-x", archive, scratch], check=True)
            files = sorted((Path(scratch) / pages).glob("*.html"))
            chosen = [
                path for path in files if is_held_out(f"{package}/{path.name}", share=8) == held_out
            ]
            texts += [page_text(path.read_text(encoding="utf-8")) for path in chosen]
    return _shuffled([text for text in texts if len(text) > _SHORTEST])


def modules(held_out: bool) -> list[str]:
    """The standard library's modules, without those that are nearly empty or not UTF-8."""
    files = Files("the standard library", source_files(held_out), lenient=True)
    return [piece.text for piece in files.pieces(Fields())]


def code(held_out: bool) -> Iterator[str]:
    """The standard library's modules, in a shuffled order."""
    return _shuffled(modules(held_out))


def _shuffled(texts: list[str]) -> Iterator[str]:
    """In an order in which any first part is a sample of all."""
    for number in torch.randperm(len(texts), generator=torch.Generator().manual_seed(0)).tolist():
        yield texts[number]


def mixed() -> Iterator[str]:
    """Pieces of prose and of code in turn."""
    each = [_pieces(kind(held_out=False)) for kind in (prose, code)]
    return itertools.chain.from_iterable(zip(*each, strict=False))


def _pieces(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        yield from (text[first : first + _PIECE] for first in range(0, len(text), _PIECE))


def chat(model: Any, tokenizer: Any, rounds: int, seed: int) -> Iterator[str]:
    """Conversations of one question and one answer, both sampled."""
    opening = tokenizer.apply_chat_template(
        [{"role": "user", "content": "\0"}], tokenize=False
    ).partition("\0")[0]
    torch.manual_seed(seed)
    for _ in range(rounds):
        questions = _sampled(model, tokenizer, [opening] * _AT_ONCE, _QUESTION_TOKENS)
        asked = [
            question.partition("<|im_end|>")[0].rstrip() + "<|im_end|>\n<|im_start|>assistant\n"
            for question in questions
        ]
        yield from _sampled(model, tokenizer, asked, _SAMPLE_TOKENS)


def _sampled(model: Any, tokenizer: Any, starts: list[str], tokens: int) -> list[str]:
    """Each start with a continuation from the model's distribution, up to its end-of-text token."""
    batch = tokenizer(
        starts, add_special_tokens=False, padding=True, padding_side="left", return_tensors="pt"
    )
    rows = model.generate(
        **batch, do_sample=True, top_k=0, top_p=1.0, temperature=1.0, max_new_tokens=tokens
    )
    texts = []
    for row, start in zip(rows[:, batch["input_ids"].shape[1] :].tolist(), starts, strict=True):
        end = row.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in row else len(row)
        texts.append(start + tokenizer.decode(row[:end]))
    return texts


def write(path: Path, texts: Iterator[str]) -> None:
    """Write JSON lines of documents, unless the file is there."""
    if path.is_file():
        return
    partial = path.with_suffix(".partial")
    with partial.open("w", encoding="utf-8") as file:
        for text in texts:
            file.write(json.dumps({"text": text}) + "\n")
    partial.replace(path)


def make_text(model_folder: Path, out: Path, rounds: int) -> None:
    """Write every kind to `out` as `KIND-calibration.jsonl` or `KIND-held-out.jsonl`."""
    out.mkdir(parents=True, exist_ok=True)
    for part in ("held-out", "calibration"):
        write(out / f"prose-{part}.jsonl", prose(part == "held-out"))
        write(out / f"code-{part}.jsonl", code(part == "held-out"))
    write(out / "mixed-calibration.jsonl", mixed())
    model, _ = load_model(model_folder, torch.float32)
    tokenizer = load_tokenizer(model_folder)
    with torch.inference_mode():
        write(out / "chat-held-out.jsonl", chat(model, tokenizer, rounds, seed=1))
        write(out / "chat-calibration.jsonl", chat(model, tokenizer, rounds, seed=2))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="the checkpoint of benchmarks.real.make_source")
    parser.add_argument("out", type=Path, help="folder of the texts")
    parser.add_argument("--rounds", type=int, default=2, help="batches of 16 conversations")
    options = parser.parse_args()
    make_text(options.model, options.out, options.rounds)
