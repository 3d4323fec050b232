"""Text of several kinds for the real model, calibration apart from held-out:

- `prose`: English, from the Debian packages `debian-handbook` and `anarchism`, divided by file;
- `code`: the standard library's sources, divided by file as for the bundled model;
- `chat`: conversations that the model writes itself, in its chat template, from seeds;
- `own`: text that the model writes from its first token on; calibration only.

    python -m benchmarks.real.text /tmp/smollm2 /tmp/real-text
"""

import argparse
import json
import subprocess
import tempfile
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import torch

from gqa_convert.data.stdlib_text import is_held_out, read_texts, source_files
from gqa_convert.families.loading import load_model, load_tokenizer

PACKAGES = {"debian-handbook": "usr/share/doc/debian-handbook/html/en-US", "anarchism": "usr/share/doc/anarchism/html"}
KINDS = ("prose", "code", "chat")
"""The kinds that have a held-out part."""
_BLOCKS = frozenset(("p", "li", "dd", "dt", "h1", "h2", "h3", "h4", "h5", "pre", "blockquote", "div", "tr", "title"))
_SKIPPED = frozenset(("script", "style", "head", "nav"))
_SHORTEST = 400
"""Characters; what is shorter is navigation."""
_AT_ONCE = 16
"""Samples of a batch."""
_QUESTION_TOKENS = 96
_SAMPLE_TOKENS = 384


class _Text(HTMLParser):
    """Collects the text of a page, a line for each block."""

    def __init__(self) -> None:
        super().__init__()
        self.lines = [""]
        self._skipping = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:  # noqa: ARG002
        self._skipping += tag in _SKIPPED
        if tag in _BLOCKS:
            self.lines.append("")

    def handle_endtag(self, tag: str) -> None:
        self._skipping -= tag in _SKIPPED
        if tag in _BLOCKS:
            self.lines.append("")

    def handle_data(self, data: str) -> None:
        if not self._skipping:
            self.lines[-1] += data


def page_text(html: str) -> str:
    """The paragraphs of a page, separated by empty lines."""
    page = _Text()
    page.feed(html)
    return "\n\n".join(line for line in (" ".join(line.split()) for line in page.lines) if line)


def prose(held_out: bool) -> Iterator[str]:
    """The pages of the packages, which apt-get downloads, in a shuffled order."""
    texts = []
    with tempfile.TemporaryDirectory() as scratch:
        for package, pages in PACKAGES.items():
            subprocess.run(["apt-get", "download", "-qq", package], cwd=scratch, check=True)
            archive = next(Path(scratch).glob(f"{package}_*.deb"))
            subprocess.run(["dpkg-deb", "-x", archive, scratch], check=True)
            texts += [
                page_text(path.read_text(encoding="utf-8"))
                for path in sorted((Path(scratch) / pages).glob("*.html"))
                if is_held_out(f"{package}/{path.name}", share=8) == held_out
            ]
    return _shuffled([text for text in texts if len(text) > _SHORTEST])


def code(held_out: bool) -> Iterator[str]:
    """The standard library's modules, in a shuffled order."""
    return _shuffled(read_texts(source_files(held_out)))


def _shuffled(texts: list[str]) -> Iterator[str]:
    """In an order in which any first part is a sample of all."""
    for number in torch.randperm(len(texts), generator=torch.Generator().manual_seed(0)).tolist():
        yield texts[number]


def chat(model: Any, tokenizer: Any, rounds: int, seed: int) -> Iterator[str]:
    """Conversations of one question and one answer, both sampled."""
    opening = tokenizer.apply_chat_template([{"role": "user", "content": "\0"}], tokenize=False).partition("\0")[0]
    torch.manual_seed(seed)
    for _ in range(rounds):
        asked = [
            question.partition("<|im_end|>")[0].rstrip() + "<|im_end|>\n<|im_start|>assistant\n"
            for question in _sampled(model, tokenizer, [opening] * _AT_ONCE, _QUESTION_TOKENS)
        ]
        yield from _sampled(model, tokenizer, asked, _SAMPLE_TOKENS)


def own(model: Any, tokenizer: Any, rounds: int, seed: int) -> Iterator[str]:
    """Text that the model writes behind its first token."""
    torch.manual_seed(seed)
    start = tokenizer.bos_token or tokenizer.eos_token
    for _ in range(rounds):
        for text in _sampled(model, tokenizer, [start] * _AT_ONCE, _SAMPLE_TOKENS):
            yield text.removeprefix(start)


def _sampled(model: Any, tokenizer: Any, starts: list[str], tokens: int) -> list[str]:
    """Each start with a continuation from the model's distribution, up to its end-of-text token."""
    batch = tokenizer(starts, add_special_tokens=False, padding=True, padding_side="left", return_tensors="pt")
    rows = model.generate(**batch, do_sample=True, top_k=0, top_p=1.0, temperature=1.0, max_new_tokens=tokens)
    texts = []
    for row, mask in zip(rows.tolist(), batch["attention_mask"].tolist(), strict=True):
        begin = mask.index(1)
        first = begin + sum(mask)
        end = next((at for at in range(first, len(row)) if row[at] == tokenizer.eos_token_id), len(row) - 1)
        texts.append(tokenizer.decode(row[begin : end + 1]))
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
    """Write every kind to `out` as `KIND-calibration.jsonl` and `KIND-held-out.jsonl`."""
    out.mkdir(parents=True, exist_ok=True)
    for held_out in (False, True):
        part = "held-out" if held_out else "calibration"
        write(out / f"prose-{part}.jsonl", prose(held_out))
        write(out / f"code-{part}.jsonl", code(held_out))
    model, _ = load_model(model_folder, torch.float32)
    tokenizer = load_tokenizer(model_folder)
    with torch.inference_mode():
        write(out / "chat-held-out.jsonl", chat(model, tokenizer, max(1, rounds // 4), seed=1))
        write(out / "chat-calibration.jsonl", chat(model, tokenizer, rounds, seed=2))
        write(out / "own-calibration.jsonl", own(model, tokenizer, rounds, seed=3))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="the checkpoint of benchmarks.real.make_source")
    parser.add_argument("out", type=Path, help="folder of the texts")
    parser.add_argument("--rounds", type=int, default=8, help="batches of 16 samples for chat and own text")
    options = parser.parse_args()
    make_text(options.model, options.out, options.rounds)
    print(options.out)
