"""The files that `evaluate` and `benchmark` write, and the fingerprint by which results of a checkpoint are known."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from gqa_convert.checkpoint.machine import measurement
from gqa_convert.errors import NoSpaceError, OutputError, ReportError
from gqa_convert.measuring.results import (
    BenchmarkFile,
    EvaluationFile,
    ModelScores,
    ScoredText,
    TimedCell,
    load_result,
    write_file,
    write_result,
)


def evaluation(**scores: Any) -> EvaluationFile:
    return EvaluationFile(
        **measurement("evaluate", ["gqa-convert", "evaluate"]),
        data=ScoredText(source="a.txt"),
        objective="causal",
        results=[ModelScores(model="m", tokens=7, **scores)],
    )


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    times = BenchmarkFile(
        **measurement("benchmark", None),
        model="m",
        results=[TimedCell(groups=[4, 2], batch=1, context=64, kv_bytes=1920)],
    )
    for name, value in (("a.json", evaluation(loss=2.5)), ("b.json", times)):
        (tmp_path / name).write_text(json.dumps(value.as_json()))
        assert load_result(tmp_path / name) == value
    write_result(tmp_path / "c.json", evaluation(loss=2.5))
    written = json.loads((tmp_path / "c.json").read_text())
    assert written == evaluation(loss=2.5).as_json()
    assert type(written["machine"]["memory_bytes"]) is int
    assert written["results"][0]["kl"] is None


def changed(**keys: Any) -> bytes:
    return json.dumps(evaluation(loss=2.5).as_json() | keys).encode()


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
    with pytest.raises(ReportError) as problem:
        load_result(tmp_path / "a.json")
    words = "can't be read as results of evaluate or benchmark" if content is not None else "does not exist"
    assert f"a.json {words}" in str(problem.value)
    assert "\n" not in str(problem.value)


@pytest.mark.parametrize("overwrite", [False, True])
def test_files_of_others_are_kept(tmp_path: Path, overwrite: bool) -> None:
    file = tmp_path / "a.json"
    times = BenchmarkFile(**measurement("benchmark", None), model="m", results=[])
    for mine in (b"", b"mine", b'{"kind": "benchmark"}', json.dumps(times.as_json()).encode()):
        file.write_bytes(mine)
        words = "results of evaluate" if overwrite else "exists already"
        with pytest.raises((OutputError, ReportError), match=words):
            write_result(file, evaluation(), overwrite=overwrite)
        assert file.read_bytes() == mine
    file.write_bytes(changed())
    if overwrite:
        write_result(file, evaluation(loss=1.0), overwrite=True)
        assert load_result(file).results[0].loss == 1.0  # type: ignore[union-attr]
    else:
        with pytest.raises(OutputError, match="with --overwrite"):
            write_result(file, evaluation())
        assert file.read_bytes() == changed()
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.parametrize(("number", "expected"), [(errno.EDQUOT, NoSpaceError), (errno.EIO, OutputError)])
def test_a_disk_that_fails(
    number: int, expected: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_file(tmp_path / "a.png", b"a picture")

    def fails(_: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(expected, match=r"a\.png"):
        write_file(tmp_path / "a.png", b"another")
    assert {each.name: each.read_bytes() for each in tmp_path.iterdir()} == {"a.png": b"a picture"}
