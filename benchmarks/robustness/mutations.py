"""Mutated safetensors headers, indices, configs, recipes and texts, each given to a command in this process."""

import gzip
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.robustness.calling import Called, call
from benchmarks.robustness.changing import changed_bytes, changed_value, written
from benchmarks.robustness.oracle import GROUPS, conversion_mistake, recipe_mistake, token_count
from benchmarks.robustness.outcomes import Case, Outcome
from benchmarks.robustness.sources import digests, write_checkpoint
from gqa_convert.training.recipe import read_recipe

RECIPE: dict[str, Any] = {
    "model": "model",
    "output": "run",
    "data": "text.txt",
    "tokens": 4096,
    "tokens_per_step": 64,
    "sequence_length": 32,
    "micro_batch_size": 2,
    "learning_rate": 1e-3,
    "warmup_steps": 2,
    "schedule": "cosine",
    "precision": "no",
    "save_every": 50,
    "seed": 3,
}

TEXT = "A line of text.\n\nÄnother paragraph, with accents: é, 漢字 and 🙂.\n" * 8


@dataclass(frozen=True, slots=True)
class Subject:
    """One kind of input.

    Attributes:
        name: its row of the table.
        mutate: writes a mutated input into an empty folder.
        judge: runs a command on it; its end, and what is wrong with what it accepted.
    """

    name: str
    mutate: Callable[[Path, random.Random], None]
    judge: Callable[[Path], tuple[Called, str | None]]


def run_mutations(number: int, seed: int, folder: Path, only: str | None = None) -> Iterator[Case]:
    """Yield `number` cases for each seed, spread evenly over the subjects, whose files lie in `folder` meanwhile."""
    subjects = _subjects(folder / "originals")
    (folder / "home").mkdir()
    os.environ["XDG_CACHE_HOME"] = str(folder / "home")
    here = Path.cwd()
    for place in range(number):
        subject = subjects[place % len(subjects)]
        if only in (None, subject.name, str(place)):
            work = folder / f"case-{place}"
            work.mkdir()
            os.chdir(work)
            try:
                yield _case(subject, work, f"seed {seed}, number {place}", random.Random(f"{seed} {place}"))
            finally:
                os.chdir(here)
                shutil.rmtree(work)


def _case(subject: Subject, work: Path, name: str, dice: random.Random) -> Case:
    subject.mutate(work, dice)
    before = digests(work)
    called, mistake = subject.judge(work)
    after = digests(work)
    if called.code is None:
        return Case(subject.name, name, Outcome.TRACEBACK, called.err)
    if {file: digest for file, digest in after.items() if file in before} != before:
        return Case(subject.name, name, Outcome.SOURCE_CHANGED, called.err)
    if called.code == 0:
        outcome = Outcome.RIGHT if mistake is None else Outcome.WRONG
        return Case(subject.name, name, outcome, mistake or "")
    if after.keys() != before.keys():
        return Case(subject.name, name, Outcome.HALF_WRITTEN, str(sorted(after.keys() - before.keys())))
    return Case(subject.name, name, Outcome.REFUSED if called.refused else Outcome.OTHER, f"{called.code} {called.err}")


def _subjects(originals: Path) -> list[Subject]:
    whole = write_checkpoint(originals / "whole")
    sharded = write_checkpoint(originals / "sharded", shards=3)

    def header(work: Path, dice: random.Random) -> None:
        model = Path(shutil.copytree(whole, work / "model")) / "model.safetensors"
        content = model.read_bytes()
        length = int.from_bytes(content[:8], "little")
        raw, data = content[8 : 8 + length], content[8 + length :]
        if dice.random() < 0.6:
            raw = written(changed_value(json.loads(raw), dice), dice)
            stated = len(raw)
        else:
            raw = changed_bytes(raw, dice)
            stated = len(raw) if dice.random() < 0.7 else dice.choice((0, 1, length, 2**31, 2**63, 2**64 - 1))
        if dice.random() < 0.1:
            data = changed_bytes(data, dice)
        model.write_bytes(stated.to_bytes(8, "little") + raw + data)

    def index(work: Path, dice: random.Random) -> None:
        _mutate_json(Path(shutil.copytree(sharded, work / "model")) / "model.safetensors.index.json", dice)

    def config(work: Path, dice: random.Random) -> None:
        _mutate_json(Path(shutil.copytree(whole, work / "model")) / "config.json", dice)

    def recipe(work: Path, dice: random.Random) -> None:
        if dice.random() < 0.6:
            changed = changed_value(RECIPE, dice)
            lines = [f"{key}: {_scalar(value)}" for key, value in changed.items()]
            raw = "\n".join(lines).encode("utf-8", "surrogatepass")
        else:
            raw = changed_bytes("\n".join(f"{key}: {value}" for key, value in RECIPE.items()).encode(), dice)
        (work / "recipe.yaml").write_bytes(raw)

    def text(work: Path, dice: random.Random) -> None:
        shutil.copytree(whole, work / "model")
        suffix = dice.choice((".txt", ".jsonl", ".json", ".jsonl.gz", ".jsonl.zst", ".parquet"))
        rows = [{"text": line, "id": place} for place, line in enumerate(TEXT.splitlines())]
        if dice.random() < 0.5 and suffix != ".txt":
            rows = changed_value(rows, dice)
        plain = TEXT.encode() if suffix == ".txt" else _rows(rows, suffix)
        packed = suffix.endswith((".gz", ".zst", ".parquet"))
        if not packed or dice.random() < 0.3:
            plain = changed_bytes(plain, dice)
        if packed:
            plain = _packed(plain, suffix)
            plain = changed_bytes(plain, dice) if dice.random() < 0.7 else plain
        (work / f"text{suffix}").write_bytes(plain)
        changes = {"data": f"text{suffix}", "model": "model", "tokens": 64}
        (work / "recipe.yaml").write_text(json.dumps(RECIPE | changes), encoding="utf-8")

    return [
        Subject("safetensors headers", header, _converted),
        Subject("indices", index, _converted),
        Subject("configs", config, _converted),
        Subject("recipes", recipe, _read),
        Subject("texts", text, _tokenized),
    ]


def _mutate_json(path: Path, dice: random.Random) -> None:
    raw = path.read_bytes()
    path.write_bytes(
        written(changed_value(json.loads(raw), dice), dice) if dice.random() < 0.7 else changed_bytes(raw, dice)
    )


def _scalar(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _rows(rows: Any, suffix: str) -> bytes:
    if suffix == ".json" or not isinstance(rows, list):
        return json.dumps(rows).encode()
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def _packed(plain: bytes, suffix: str) -> bytes:
    """Rows, compressed or as a Parquet file."""
    if suffix.endswith(".gz"):
        return gzip.compress(plain, mtime=0)
    sink = pa.BufferOutputStream()
    if suffix.endswith(".zst"):
        with pa.CompressedOutputStream(sink, "zstd") as stream:
            stream.write(plain)
    else:
        lines = [line.decode("utf-8", "replace") for line in plain.splitlines()]
        pq.write_table(pa.table({"text": lines, "id": list(range(len(lines)))}), sink)
    return bytes(sink.getvalue())


def _converted(work: Path) -> tuple[Called, str | None]:
    called = call(["convert", "model", "out", "--groups", str(GROUPS), "--method", "mean", "--quiet"])
    return called, conversion_mistake(work / "model", work / "out") if called.code == 0 else None


def _tokenized(work: Path) -> tuple[Called, str | None]:
    called = call(["tokenize", "recipe.yaml", "--json", "--processes", "1"])
    if called.code != 0:
        return called, None
    (path,) = work.glob("text.*")
    found, expected = json.loads(called.out)["sources"][0]["tokens"], token_count(path)
    return called, None if found == expected else f"{found} tokens, expected {expected}"


def _read(work: Path) -> tuple[Called, str | None]:
    """A recipe that is accepted here would be trained: the command line gets those that are refused."""
    path = work / "recipe.yaml"
    try:
        resolved = read_recipe(path).resolved()
    except Exception:
        return call(["uptrain", "recipe.yaml"]), None
    return Called(0, "", ""), recipe_mistake(path.read_bytes(), resolved)
