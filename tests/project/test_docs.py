"""Every command in README, docs and recipes is run here, in a folder that has what it names, only
smaller; or it is parsed, and tests/helpers/document_workplace.yaml says why it is not run.
"""

import contextlib
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from mkdocs.commands.build import build
from mkdocs.config import load_config
from typer.main import get_command

import gqa_convert
from gqa_convert.cli import app, main
from gqa_convert.conversion import planning
from gqa_convert.conversion.calibration import streams
from gqa_convert.data import sources
from gqa_convert.data.folders import source_files
from tests.helpers.document_workplace import NOT_RUN, furnish, needed, reason, shortened
from tests.helpers.documents import (
    DOCUMENTS,
    ROOT,
    Block,
    Command,
    blocks,
    commands,
    recipe_commands,
)

SHELL = ("sh", "console", "indented")

NOT_COMMANDS = ("134 MB  +  N x (1.05 MB + 0.59 MB x B)",)
"""Indented blocks that are neither."""

ALL_BLOCKS = [
    (path, block)
    for path in DOCUMENTS
    for block in blocks(path)
    if block.text.strip() not in NOT_COMMANDS
]
ALL = [
    (path, command)
    for path, block in ALL_BLOCKS
    if block.language in SHELL
    for command in commands(block)
]
PROGRAM = get_command(app)

Run = Callable[[list[str]], tuple[int, str, str]]


def named(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def parsed(arguments: list[str]) -> dict[str, Any]:
    """What the command line makes of arguments, without doing it."""
    if arguments[0].startswith("-"):
        assert arguments[0] in ("--version", "--help")
        return {}
    command = PROGRAM.commands[arguments[0]]  # type: ignore[attr-defined]
    return dict(command.make_context(arguments[0], arguments[1:]).params)


def typed(command: Command) -> list[str]:
    """The arguments of gqa-convert, without the marks of a synopsis."""
    words = [re.sub(r"[\[\]]|\.\.\.", "", word) for word in command.ours or ()]
    return [word for word in words if "KEY=VALUE" not in word.upper()]


def check(command: Command) -> None:
    """What can be seen without running it: options that exist, files that are there."""
    if command.ours is not None:
        parsed(typed(command))
    for word in command.words:
        if word.startswith(("recipes/", "benchmarks/")):
            assert (ROOT / word).exists(), word
    if command.program == "python" and command.ours is None:
        script = command.words[1]
        if script == "-m":
            module = command.words[2].replace(".", "/")
            script = f"{module}/__main__.py" if (ROOT / module).is_dir() else f"{module}.py"
        if script.startswith("benchmarks/"):
            source = (ROOT / script).read_text(encoding="utf-8")
            for option in command.words[2:]:
                assert not option.startswith("--") or f'"{option}"' in source, (
                    f"{script} has no {option}"
                )


@pytest.mark.parametrize(
    ("path", "command"), ALL, ids=[f"{named(path)}:{command.line}" for path, command in ALL]
)
def test_a_command_is_understood(path: Path, command: Command) -> None:
    assert command.program == "gqa-convert" or reason(command), (
        f"{path.name}: neither run nor listed in NOT_RUN: {command}"
    )
    check(command)


def test_the_list_of_what_is_not_run_is_not_longer_than_it_has_to_be() -> None:
    for pattern in NOT_RUN:
        assert any(re.search(pattern, str(command)) for _, command in ALL), (
            f"no document has {pattern}"
        )


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """The command line within this process: exit code, stdout, stderr."""
    handlers = {
        number: signal.getsignal(number)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    monkeypatch.setenv("COLUMNS", "300")
    # to tokenise all of the standard library takes seconds in every command on its text, and so do
    # its long blocks
    monkeypatch.setattr(
        sources, "source_files", lambda held_out: source_files(held_out=held_out)[::60]
    )
    monkeypatch.setattr(streams, "LENGTH", 64)
    monkeypatch.setattr(planning, "BUILT_IN_TOKENS", 512)

    def call(arguments: list[str]) -> tuple[int, str, str]:
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["gqa-convert", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    yield call
    for number, handler in handlers.items():
        signal.signal(number, handler)


def shown_is_printed(shown: str, printed: str, name: str) -> None:
    """The lines of a session occur in what was printed, in order; numbers are compared for
    `convert` and for mistakes alone.
    """

    def masked(line: str) -> str:
        line = " ".join(line.split())
        return (
            line
            if name == "convert" or line.startswith("gqa-convert:")
            else re.sub(r"\d[\d.,]*(e-\d+)?", "#", line)
        )

    lines = iter([masked(line) for line in printed.splitlines()])
    for line in map(masked, shown.splitlines()):
        assert line in ("", "...") or line in lines, f"not printed: {line}\n{printed}"


class Session:
    """The commands of one document, typed one after the other."""

    def __init__(self, folder: Path, run: Run) -> None:
        self.folder, self.run, self.names = folder, run, dict[str, Any]()

    def type(self, command: Command) -> None:
        options = parsed(list(command.ours or ()))
        arguments = shortened(command)
        made = str(options["out"]) if arguments[0] == "convert" else None
        self.prepare([word for word in arguments if word != made])
        if arguments[0] == "uptrain":
            recipe = yaml.safe_load(Path(arguments[1]).read_text(encoding="utf-8"))
            recipe |= dict(word.split("=", 1) for word in arguments[2:] if "=" in word)
            self.prepare(
                [str(recipe.get(key)) for key in ("model", "teacher", "data", "evaluation_data")]
            )
        code, out, err = self.run(arguments)
        mistake = command.shown is not None and "gqa-convert: " in command.shown
        assert code in ((2,) if mistake else (0,)), f"{command}\n{err}"
        if command.shown is not None:
            shown_is_printed(command.shown, err + out, arguments[0])
        if command.stdout is not None:
            Path(command.stdout).parent.mkdir(exist_ok=True)
            Path(command.stdout).write_text(out, encoding="utf-8")

    def execute(self, block: Block, path: Path) -> None:
        self.prepare(re.findall(r'"([\w./-]+)"', block.text))
        exec(compile(block.text, f"{path.name}, line {block.line}", "exec"), self.names)

    def prepare(self, names: list[str]) -> None:
        for line in needed(self.folder, names):
            for command in commands(Block(0, "sh", line)):
                self.type(command)


def runnable(block: Block) -> bool:
    is_shell = block.language in SHELL
    return block.language == "python" or (
        is_shell and any(reason(command) is None for command in commands(block))
    )


RUNNABLE = [
    path for path in DOCUMENTS if any(runnable(block) for each, block in ALL_BLOCKS if each == path)
]


@pytest.mark.slow
@pytest.mark.parametrize("path", RUNNABLE, ids=named)
def test_the_commands_run(
    path: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    furnish(tmp_path)
    session = Session(tmp_path, run)
    for each, block in ALL_BLOCKS:
        if each != path:
            continue
        if block.language == "python":
            session.execute(block, path)
        elif block.language in SHELL:
            for command in commands(block):
                if reason(command) is None:
                    session.type(command)


@pytest.mark.parametrize(
    "path", sorted((ROOT / "recipes").glob("*.yaml")), ids=lambda path: path.stem
)
def test_a_recipes_own_commands_are_understood(path: Path) -> None:
    convert, *launch = recipe_commands(path)
    keys = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert str(parsed(list(convert.ours or ()))["out"]) == keys["model"]
    assert launch
    for command in launch:
        assert ROOT / str(parsed(list(command.ours or ()))["recipe"]) == path
        check(command)


def slugs(path: Path) -> set[str]:
    """The anchors of a page's headings."""
    text = re.sub(
        r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL
    )
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {
        re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower())
        for heading in headings
    }


@pytest.mark.parametrize("path", DOCUMENTS, ids=named)
def test_anchors_lead_somewhere(path: Path) -> None:
    for target, anchor in re.findall(
        r"\]\(([^)#:\s]*)#([^)]+)\)", path.read_text(encoding="utf-8")
    ):
        assert anchor in slugs(path.parent / target if target else path), (
            f"{path.name} links to {target}#{anchor}"
        )


@pytest.mark.parametrize("path", DOCUMENTS, ids=named)
def test_files_that_a_page_names_exist(path: Path) -> None:
    for name in re.findall(
        r"`((?:gqa_convert|tests|docs|benchmarks|recipes)/[\w./-]+)`",
        path.read_text(encoding="utf-8"),
    ):
        assert (ROOT / name).exists(), f"{path.name} names {name}"


def test_the_picture_of_the_architecture_shows_every_package() -> None:
    packages = re.findall(
        r"^\| `(\w+)` \|",
        (ROOT / "docs" / "developing.md").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    drawn = re.findall(
        r">(\w+)</text>", (ROOT / "docs" / "packages.svg").read_text(encoding="utf-8")
    )
    assert packages
    assert set(packages) <= set(drawn)


def test_the_site_has_all_pages() -> None:
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    listed = re.findall(r": (\S+\.md)$", settings, re.MULTILINE)
    pages = [
        path.relative_to(ROOT / "docs").as_posix()
        for path in DOCUMENTS
        if path.is_relative_to(ROOT / "docs")
    ]
    assert sorted(listed) == sorted(pages), "list the page in mkdocs.yml under `nav`"


def test_the_reference_has_all_public_names() -> None:
    page = (ROOT / "docs" / "converting.md").read_text(encoding="utf-8")
    described = set(re.findall(r"^::: gqa_convert\.(\w+)$", page, re.MULTILINE))
    assert described == set(gqa_convert.__all__) - {"__version__"}


def test_the_site_is_built_without_warnings(tmp_path: Path) -> None:
    """Whole, of files of its own, with formulas drawn and the reference written."""
    with contextlib.chdir(ROOT):
        build(load_config("mkdocs.yml", strict=True, site_dir=str(tmp_path)))
    pages = {
        path.relative_to(tmp_path).as_posix(): path.read_text(encoding="utf-8")
        for path in tmp_path.rglob("*.html")
    }
    for name, page in pages.items():
        loaded = re.findall(r"<(?:script|link|img)[^>]+(?:src|href)=\"?(https?://[^\s\">]+)", page)
        assert not loaded, f"{name} loads {loaded}"
        assert "arithmatex" not in page, f"{name} shows a formula as TeX"
        for target in re.findall(r'<a [^>]*href="((?!https://)[^"#?]+)', page):
            assert (tmp_path / name).parent.joinpath(target).is_file() or name == "404.html", (
                f"{name} links to {target}"
            )
    assert pages["methods.html"].count("<math") > 20
    assert "<code>config.json</code> is missing or no JSON object" in pages["converting.html"]
