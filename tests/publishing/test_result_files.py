"""Which files with results a card takes."""

import json
from pathlib import Path

import pytest

from gqa_convert.errors import ReportError
from gqa_convert.publishing import result_files
from gqa_convert.publishing.result_files import DEPTH, find_results
from tests.helpers.result_files import LOSSES, TIMES, benchmark, evaluation, write_json

SCORED = evaluation({"m": LOSSES[3]})


def found(*places: Path) -> list[str]:
    evaluations, benchmarks = find_results(places)
    return [each.origin.path.name for each in (*evaluations, *benchmarks)]


def test_what_is_looked_into(tmp_path: Path) -> None:
    """Folders four levels deep, without hidden ones; a checkpoint's own files need not be strict JSON."""
    deep = "/".join("abcd"[:DEPTH])
    for name in (f"{deep}/in.json", f"{deep}/e/out.json", ".hidden/out.json", ".out.json", "out.txt"):
        write_json(tmp_path / name, SCORED)
    write_json(tmp_path / "model" / "near.json", benchmark(TIMES))
    (tmp_path / "model" / "config.json").write_text('{"dropout": NaN}')
    write_json(tmp_path / "model" / "gqa_conversion.json", {"groups": 3})
    (tmp_path / "running.json").touch()
    assert found(tmp_path) == ["in.json", "near.json"]
    assert found(tmp_path, tmp_path / "model", tmp_path / "model" / "near.json") == ["in.json", "near.json"]


def test_large_files_are_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_json(tmp_path / "a.json", SCORED)
    size = (tmp_path / "a.json").stat().st_size
    (tmp_path / "b.json").write_text(json.dumps(SCORED) + " ")
    monkeypatch.setattr(result_files, "_LARGEST", size)
    assert found(tmp_path) == ["a.json"]


def test_no_results_and_broken_ones_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match="does not exist"):
        find_results([tmp_path / "absent"])
    write_json(tmp_path / "other.json", {"kind": "uptrain"})
    with pytest.raises(ReportError, match="nothing that evaluate or benchmark wrote"):
        find_results([tmp_path])
    for content, words in (
        (SCORED | {"format_version": 99}, "has format version 99"),
        (SCORED | {"results": []}, "holds no results"),
        (SCORED | {"results": [{"loss": 2.5}]}, "names no model"),
    ):
        path = write_json(tmp_path / "broken.json", content)
        with pytest.raises(ReportError, match=words):
            find_results([tmp_path])
    path.write_text('{"kind": "evaluate", "loss": NaN}')
    with pytest.raises(ReportError, match="not valid JSON"):
        find_results([path])
