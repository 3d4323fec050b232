"""The files that `evaluate` and `benchmark` write, and pages and plots of them: which results belong together."""

import errno
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from gqa_convert.checkpoint.machine import measurement
from gqa_convert.errors import MissingExtraError, NoSpaceError, OutputError, ReportError
from gqa_convert.measuring.evaluation.page import check_page, draw_page
from gqa_convert.measuring.results import (
    BenchmarkFile,
    EvaluationFile,
    ModelScores,
    ScoredText,
    load_evaluation,
    write_file,
    write_result,
)
from tests.helpers.checkpoints import refused
from tests.helpers.command_line import loaded_after
from tests.helpers.evaluate_models import causal, command_line


def scores(model: str, fingerprint: str | None = None, loss: float | None = 2.0, **more: Any) -> ModelScores:
    known = {"tokens": 9, "kv_bytes_per_token": 4096, "bits_per_byte": 1.25} | more
    return ModelScores(model=model, fingerprint=fingerprint, loss=loss, **known)


def evaluation(*results: ModelScores, text: str = "a.txt", **more: Any) -> EvaluationFile:
    known = {"objective": "causal", "context": 64, "data": ScoredText(source=text)} | more
    return EvaluationFile(**measurement("evaluate", None), results=list(results), **known)


def times() -> BenchmarkFile:
    known = {"model": "m", "fingerprint": "f", "model_type": "llama", "dtype": "float32", "attention": "gqa"}
    return BenchmarkFile(**measurement("benchmark", None), **known, heads=2, kv_heads=2, results=[])


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
    words = "can't be read as results of evaluate: name" if content is not None else "does not exist"
    with refused(ReportError, f"a.json {words}"):
        load_evaluation(tmp_path / "a.json")


def test_files_that_exist_are_kept(tmp_path: Path) -> None:
    file, before = tmp_path / "a.json", changed()
    file.write_bytes(before)
    with pytest.raises(OutputError, match="exists already: name a new file"):
        write_result(file, evaluation(scores("m")))
    assert file.read_bytes() == before
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


def test_a_page_is_drawn_again_but_no_file_of_others_is_replaced(tmp_path: Path) -> None:
    page = tmp_path / "a.html"
    draw_page([evaluation(scores("a", "1")), evaluation(scores("b<i>", "2"), text="b.txt")], page)
    assert check_page(page, []) == []
    drawn = page.read_text()
    for words in ("9 tokens of a.txt, causal, at most 64", "9 tokens of b.txt", "b&lt;i&gt;", "loss (nats per token)"):
        assert words in drawn
    page.write_text("mine")
    with pytest.raises(OutputError, match="gqa-convert did not draw it"):
        check_page(page, [])


def test_mistakes_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OutputError, match="does not exist"):
        check_page(tmp_path / "no" / "a.html", [])
    (tmp_path / "times.json").write_text(json.dumps(times().as_json()))
    with pytest.raises(ReportError, match=r"times\.json can't be read as results of evaluate"):
        check_page(tmp_path / "a.html", [tmp_path / "times.json"])
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtraError, match=r"--html needs: pip install 'gqa-convert\[plot\]'"):
        check_page(tmp_path / "a.html", [])


def test_the_command_draws_its_models_and_earlier_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    causal(tmp_path / "one")
    causal(tmp_path / "two", seed=1, num_key_value_heads=3)
    (tmp_path / "text.txt").write_text("for number in range(10):\n    print(number)\n" * 9)

    def ask(*arguments: object) -> tuple[int, str, str]:
        return command_line(monkeypatch, capsys, *arguments)

    capsys.readouterr()  # what transformers says about files
    assert ask("one", "--data", "text.txt", "-o", "one.json", "--json")[0] == 0
    code, _, err = ask("one", "two", "--data", "text.txt", "--with", "one.json", "--html", "a.html", "-o", "two.json")
    assert (code, err) == (0, "")
    cells = re.findall(r"<t[dh][^>]*>([^<]*)<", (tmp_path / "a.html").read_text())
    assert [each for each in cells if each in ("one", "two")] == ["one", "one", "two"]
    assert ask("--with", "one.json", "--with", "two.json", "--html", "b.html") == (0, "", "")
    assert re.findall(r"<t[dh][^>]*>([^<]*)<", (tmp_path / "b.html").read_text()) == cells
    code, out, err = ask("--with", "one.json", "--html", "b.html", "--json")
    assert (code, out, err) == (0, '{"html": "b.html"}\n', "")
    for arguments, words in (
        (("--with", "one.json"), "--with names results to draw"),
        (("--with", "none.json", "--html", "b.html"), "none.json does not exist"),
        (("--with", "one.json", "--html", "b.html", "--data", "text.txt"), "name a MODEL and the text"),
        (("two", "--html", "b.html"), "--data is missing"),
    ):
        code, out, err = ask(*arguments)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert words in err


def test_files_of_results_are_drawn_without_torch(tmp_path: Path) -> None:
    write_result(tmp_path / "a.json", evaluation(scores("a", "1")))
    code = (
        "sys.argv[1:] = ['evaluate', '--with', sys.argv[1], '--html', sys.argv[2]]\nfrom gqa_convert.cli import app\n"
    )
    code += "app(standalone_mode=False)"
    loaded = loaded_after(code, str(tmp_path / "a.json"), str(tmp_path / "a.html"))
    assert (tmp_path / "a.html").is_file()
    assert not loaded & {"torch", "transformers"}
