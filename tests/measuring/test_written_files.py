"""Files of results and pictures appear whole or not at all; a killed writer leaves nothing that stays."""

import errno
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gqa_convert.checkpoint.machine import measurement
from gqa_convert.errors import NoSpaceError, OutputError
from gqa_convert.measuring.evaluation.page import save_picture
from gqa_convert.measuring.results import EvaluationFile, ModelScores, ScoredText, write_result
from tests.helpers.uptrain_runs import AtFileEvent, die, in_child


class Figure:
    """Stands for matplotlib's, which is slow to import."""

    def savefig(self, file: Any, **_: object) -> None:
        file.write(b"a picture")


def results(folder: Path) -> None:
    head = measurement("evaluate", None)
    scores = ModelScores(model="m", tokens=7)
    file = EvaluationFile(**head, data=ScoredText(source="a"), objective="causal", results=[scores])
    write_result(folder / "a.json", file.model_copy(update={"created": ""}), overwrite=True)


def picture(folder: Path) -> None:
    save_picture(Figure(), folder / "a.png")


@pytest.mark.parametrize("write", [results, picture])
def test_killed_at_any_file_event_and_run_again(write: Callable[[Path], None], tmp_path: Path) -> None:
    write(tmp_path)
    (name,) = (path.name for path in tmp_path.iterdir())
    whole = (tmp_path / name).read_bytes()
    number, code = 0, -signal.SIGKILL
    while code:
        number += 1

        def killed(number: int = number) -> None:
            AtFileEvent(tmp_path, number, die)
            write(tmp_path)

        code, _ = in_child(killed)
        assert (tmp_path / name).read_bytes() == whole
        write(tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == [name]
    assert number > 2


@pytest.mark.parametrize("write", [results, picture])
@pytest.mark.parametrize(
    ("number", "expected"), [(errno.ENOSPC, NoSpaceError), (errno.EDQUOT, NoSpaceError), (errno.EIO, OutputError)]
)
def test_a_disk_that_fails(
    write: Callable[[Path], None],
    number: int,
    expected: type[Exception],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write(tmp_path)
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()

    def fails(_: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(expected, match=path.name):
        write(tmp_path)
    assert {each.name: each.read_bytes() for each in tmp_path.iterdir()} == {path.name: whole}
