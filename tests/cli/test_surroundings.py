"""Commands where folders have unusual names, and where nothing can be written."""

import errno
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gqa_convert.checkpoint import atomic_files
from gqa_convert.cli import main
from tests.helpers.checkpoints import digests, write_llama

Run = Callable[..., tuple[int, str, str]]
NAME = "a folder, ümläute and 漢字"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """The command line in this process: exit code, stdout, stderr."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}

    def call(*arguments: str | Path) -> tuple[int, str, str]:
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["gqa-convert", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        return int(ended.value.code or 0), *capsys.readouterr()

    yield call
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """`source` in a folder with an unusual name."""
    place = tmp_path / NAME
    write_llama(place / "source")
    return place


def commands(place: str) -> list[list[str]]:
    """Commands that write, with a trailing slash after every folder, and then those that read what they wrote."""
    pool = ["convert", f"{place}source/", f"{place}out/", "-n", "4", "-m", "mean"]
    publish = ["publish", f"{place}out/", "--repo-id", "me/x", "--base-model", "a/b", "--license", "mit", "--dry-run"]
    return [
        ["convert", f"{place}source/", "-n", "4", "--dry-run"],
        pool,
        ["verify", f"{place}out/", "--source", f"{place}source/", "--no-logits"],
        publish,
    ]


@pytest.mark.parametrize("columns", ["40", "80"])
def test_unusual_names_and_trailing_slashes(
    folder: Path, columns: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", columns)
    before = digests(folder / "source", ignore=())
    for command in commands(""):
        code, _, err = run(*command)
        assert code == 0, f"{command[0]}: {err}"
    assert digests(folder / "source", ignore=()) == before
    assert {path.name for path in folder.iterdir()} == {"source", "out"}


def test_a_full_disk_in_every_command_that_writes(folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line, exit code 2, and no file of the result."""
    _, pool, _, publish = commands(f"{folder}/")
    assert run(*pool)[0] == 0
    before = digests(folder, ignore=())

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    monkeypatch.setattr(atomic_files.os, "fsync", full)
    pool[2] = f"{folder}/second"
    for command in (pool, publish):
        code, out, err = run(*command)
        assert (code, out) == (2, ""), err
        assert err.splitlines()[-1].startswith("gqa-convert: ")
        assert "full" in err or "No space left" in err
        assert {name: digest for name, digest in digests(folder, ignore=()).items() if name in before} == before
        assert not [name for name in digests(folder, ignore=()) if name not in before]


def test_a_result_in_its_source_through_a_link(folder: Path, run: Run) -> None:
    (folder / "link").symlink_to(folder / "source", target_is_directory=True)
    for out in ("source", "source/", "link", "link/", "link/inside", "source/../link/inside/deeper"):
        code, _, err = run("convert", folder / "source", f"{folder}/{out}", "-n", "4", "-m", "mean", "--overwrite")
        assert code == 2
        assert err.count("\n") == 1
        assert "name a" in err
    assert {path.name for path in folder.iterdir()} == {"source", "link"}
