"""The files that `evaluate` writes: which are read, and that none of others is replaced."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from gqa_convert.errors import NoSpaceError, OutputError, ReportError
from gqa_convert.measuring.results import (
    EvaluationFile,
    ModelScores,
    ScoredText,
    load_evaluation,
    write_result,
)
from gqa_convert.runtime.machine import measurement
from tests.helpers.checkpoints import refused


def scores(
    model: str, fingerprint: str | None = None, loss: float | None = 2.0, **more: Any
) -> ModelScores:
    known = {"tokens": 9, "kv_bytes_per_token": 4096, "bits_per_byte": 1.25} | more
    return ModelScores(model=model, fingerprint=fingerprint, loss=loss, **known)


def evaluation(*results: ModelScores, text: str = "a.txt", **more: Any) -> EvaluationFile:
    known = {"objective": "causal", "context": 64, "data": ScoredText(source=text)} | more
    return EvaluationFile(**measurement("evaluate", None), results=list(results), **known)


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    made = evaluation(scores("m"))
    write_result(tmp_path / "c.json", made)
    assert load_evaluation(tmp_path / "c.json") == made
    written = json.loads((tmp_path / "c.json").read_text())
    assert written == made.as_json()
    assert type(written["machine"]["memory_bytes"]) is int
    assert written["results"][0]["kl"] is None


def changed(**keys: Any) -> bytes:
    return json.dumps(evaluation(scores("m")).as_json() | keys).encode()


@pytest.mark.parametrize(
    "content",
    [
        None,
        b"mine",
        b"[" * 100_000,
        b"\xff",
        b'{"kind": "inspect"}',
        changed(format_version=99),
        changed(results=[{"model": "m", "tokens": 7, "loss": "2.5"}]),
        changed(results=[{"model": "m", "tokens": 7, "loss": float("nan")}]),
        changed(results=[]),
        changed(machine={"device": "cpu"}),
    ],
)
def test_other_files_are_refused_in_one_line(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "a.json").write_bytes(content)
    words = (
        "can't be read as results of evaluate: name" if content is not None else "does not exist"
    )
    with refused(ReportError, f"a.json {words}"):
        load_evaluation(tmp_path / "a.json")


def test_files_that_exist_are_kept(tmp_path: Path) -> None:
    file, before = tmp_path / "a.json", changed()
    file.write_bytes(before)
    with pytest.raises(OutputError, match="exists already: name a new file"):
        write_result(file, evaluation(scores("m")))
    assert file.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.parametrize(
    ("number", "expected"), [(errno.EDQUOT, NoSpaceError), (errno.EIO, OutputError)]
)
def test_a_disk_that_fails(
    number: int, expected: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(expected, match=r"a\.json"):
        write_result(tmp_path / "a.json", evaluation(scores("m")))
    assert list(tmp_path.iterdir()) == []
