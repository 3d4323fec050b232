"""The commands in the code blocks of README, docs and recipes."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml
from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "recipes").rglob("*.md")),
]
SHIPPED_RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))

_ASSIGNMENT = re.compile(r"[A-Z_]+=\S*")
_LAUNCHERS = ("-m", "gqa_convert")


@dataclass(frozen=True)
class Block:
    """A code block: the line on which its text begins, its language ("indented" if it is no
    fence), its text.
    """

    line: int
    language: str
    text: str


@dataclass(frozen=True)
class Command:
    """One command line.

    Attributes:
        line: of the document.
        words: as the shell splits them, without environment and redirection.
        stdout: the file that its output goes to, if any.
        shown: what the document says that it prints.
    """

    line: int
    words: tuple[str, ...]
    stdout: str | None = None
    shown: str | None = None

    def __str__(self) -> str:
        return shlex.join(self.words)

    @property
    def program(self) -> str:
        return Path(self.words[0]).name

    @property
    def ours(self) -> tuple[str, ...] | None:
        """The arguments of gqa-convert, with or without a launcher; None for other programs."""
        if self.program == "gqa-convert":
            return self.words[1:]
        for place in range(len(self.words) - 1):
            if self.words[place : place + 2] == _LAUNCHERS:
                return self.words[place + 2 :]
        return None

    @property
    def synopsis(self) -> bool:
        """Whether it is a synopsis of options, which cannot be run."""
        return any(re.search(r"\[|\.\.\.", word) for word in self.words)


def blocks(path: Path) -> Iterator[Block]:
    """Yield the code blocks of a page."""
    for token in MarkdownIt().parse(path.read_text(encoding="utf-8")):
        text = token.content.rstrip("\n")
        if token.type == "fence":
            yield Block(token.map[0] + 2, token.info.partition(" ")[0], text)
        elif token.type == "code_block":
            yield Block(token.map[0] + 1, "indented", text)


def commands(block: Block) -> Iterator[Command]:
    """Yield the commands of a shell block; for a session, with the output that it shows."""
    lines = block.text.split("\n")
    place = 0
    while place < len(lines):
        line, number = lines[place].strip(), block.line + place
        while line.endswith("\\"):
            place += 1
            line = f"{line[:-1]} {lines[place].strip()}"
        place += 1
        shown = None
        if block.language == "console":
            assert line.startswith("$ "), f"line {number}: a session begins with `$ `"
            line, end = line[2:], place
            while end < len(lines) and not lines[end].startswith("$ "):
                end += 1
            shown, place = "\n".join(lines[place:end]).strip("\n"), end
        yield from _parts(line, number, shown)


def _parts(line: str, number: int, shown: str | None = None) -> Iterator[Command]:
    """Yield the commands of a line, which `&&` may join."""
    for part in line.split(" && "):
        words = shlex.split(part, comments=True)
        while words and _ASSIGNMENT.fullmatch(words[0]):
            del words[0]
        stdout = None
        if ">" in words:
            stdout = words[words.index(">") + 1]
            del words[words.index(">") :]
        if words:
            yield Command(number, tuple(words), stdout, shown)


def recipe_commands(path: Path) -> Iterator[Command]:
    """Yield the commands `convert` and `launch` of the comments at the top of a recipe."""
    text = path.read_text(encoding="utf-8")
    assert isinstance(yaml.safe_load(text), dict)
    for number, line in enumerate(text.splitlines(), 1):
        if found := re.match(r"#\s+(?:convert|launch)\s+(\S.*)", line):
            yield from _parts(found[1], number)
