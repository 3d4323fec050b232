"""Made-up records and questions about them, in many formats: text that only a model predicts which finds again what stands
far above.

A document states facts that nobody can know (the badge of Tolvina is 48213), as rows of a table, as JSON, as settings, as
sentences among other prose and so on. Behind them, it asks for some of them, or states them again. Merging heads loses
this kind of reading first, and calibration text of other kinds hardly asks for it.
"""

import json
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

_WORDS: dict[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
_LETTERS = "ABCDEFGHJKLMNPQRSTUVWXYZ"
_SHORTEST = 300
"""Characters of a document, unless less is asked for."""
_FEWEST = 3
"""Records of a document."""
_ASKED = 12
"""The most facts that one asks for."""

Lines = list[str]


def _one_of(chance: Random, *lists: str) -> Lines:
    """One word of each list."""
    return [chance.choice(_WORDS[name].split()) for name in lists]


_VALUES: dict[str, Callable[[Random], str]] = {
    "digits": lambda chance: str(chance.randrange(10 ** chance.choice((2, 3, 4, 5, 6)))),
    "code": lambda chance: (
        "".join(chance.choice(_LETTERS) for _ in range(chance.choice((2, 3)))) + f"-{chance.randrange(10, 1000)}"
    ),
    "day": lambda chance: f"{chance.randrange(1950, 2030)}-{chance.randrange(1, 13):02}-{chance.randrange(1, 29):02}",
    "hexadecimal": lambda chance: f"{chance.randrange(16**6):06x}",
    "price": lambda chance: f"{chance.randrange(1, 900)}.{chance.randrange(100):02}",
    "name": lambda chance: "".join(_one_of(chance, "beginnings", "middles", "ends")),
    "word": lambda chance: " ".join(_one_of(chance, "colours", "things")),
}
"""How values are drawn, by their kind."""
_FIELDS = [(name, _VALUES[kind]) for kind, names in _WORDS["fields"].items() for name in names.split()]


@dataclass
class _Records:
    """Records, and the ways to write them down in lines.

    Attributes:
        chance: what details are drawn by.
        subject: what the records are about.
        fields: the fields of each record, by its key.
    """

    chance: Random
    subject: str
    fields: dict[str, dict[str, str]]

    def _rows(self) -> list[dict[str, str]]:
        """The records with their keys as the first field."""
        return [{self.subject: key} | fields for key, fields in self.fields.items()]

    def table(self, separator: str = ",", edge: str = "") -> Lines:
        rows = self._rows()
        return [f"{edge}{separator.join(cells)}{edge[::-1]}" for cells in (rows[0], *(row.values() for row in rows))]

    def json_lines(self) -> Lines:
        return [json.dumps(row) for row in self._rows()]

    def json_object(self) -> Lines:
        found = {key: fields if len(fields) > 1 else next(iter(fields.values())) for key, fields in self.fields.items()}
        return json.dumps(found, indent=2).splitlines()

    def settings(self) -> Lines:
        between = self.chance.choice((" = ", "=", ": "))
        lines = []
        for key, fields in self.fields.items():
            lines += [f"[{key}]", *(f"{name}{between}{value}" for name, value in fields.items()), ""]
        return lines

    def list_items(self) -> Lines:
        mark = self.chance.choice(("- ", "* ", "", "> "))
        between = self.chance.choice((": ", " -> ", " is ", " | "))
        return [f"{mark}{key}{between}{', '.join(fields.values())}" for key, fields in self.fields.items()]

    def assignments(self) -> Lines:
        lines = [f"{self.subject}s = {{}}"]
        for key, fields in self.fields.items():
            first, *others = values = tuple(fields.values())
            lines.append(f"{self.subject}s[{key!r}] = {values if others else first!r}")
        return lines

    def log(self) -> Lines:
        lines = []
        second = self.chance.randrange(40_000)
        for row in self._rows():
            second += self.chance.randrange(1, 500)
            clock = f"{second // 3600:02}:{second // 60 % 60:02}:{second % 60:02}"
            lines.append(f"{clock} INFO " + " ".join(f"{name}={value}" for name, value in row.items()))
        return lines

    def _facts(self, key: str, pattern: str) -> Lines:
        """The fields of a record, each in the words of a pattern."""
        stated = self.fields[key].items()
        return [pattern.format(subject=self.subject, key=key, field=name, value=value) for name, value in stated]

    def sentences(self) -> Lines:
        pattern = self.chance.choice(_WORDS["sentences"])
        return [line for key in self.fields for line in self._facts(key, pattern)]

    def _questions(self, pattern: str) -> Lines:
        return [self.chance.choice(self._facts(key, pattern)) for key in self.fields]

    def questions(self) -> Lines:
        return self._questions(self.chance.choice(_WORDS["questions"]))

    def backwards(self) -> Lines:
        """Which key has a value."""
        return self._questions("The {subject} whose {field} is {value}: {key}")


_WAYS_TO_STATE = (
    _Records.table,
    partial(_Records.table, separator="\t"),
    partial(_Records.table, separator=" | ", edge="| "),
    _Records.json_lines,
    _Records.json_object,
    _Records.settings,
    _Records.list_items,
    _Records.assignments,
    _Records.log,
    _Records.sentences,
    _Records.sentences,
)
_WAYS_TO_ASK = (
    _Records.questions,
    _Records.questions,
    _Records.backwards,
    _Records.list_items,
    _Records.json_lines,
    _Records.sentences,
    _Records.assignments,
    _Records.table,
)


def made_up_records(seed: int, characters: int, filler: Sequence[str]) -> Iterator[str]:
    """Documents without end.

    Args:
        seed: of everything that is drawn.
        characters: of the longest document, roughly; short ones are as frequent as long ones.
        filler: paragraphs of other text, among which the facts of half of the documents are scattered.
    """
    chance = Random(seed)
    while True:
        size = _SHORTEST * max(1.0, characters / _SHORTEST) ** chance.random()
        yield _document(chance, round(size), filler)


def _document(chance: Random, characters: int, filler: Sequence[str]) -> str:
    records = _Records(chance, _one_of(chance, "subjects")[0], {})
    fields = chance.sample(_FIELDS, chance.choice((1, 1, 2, 3)))
    state = chance.choice(_WAYS_TO_STATE)
    ask = chance.choice(_WAYS_TO_ASK)
    share = chance.uniform(0.1, 0.6) if filler and chance.random() < 0.5 else 0.0
    draw_key = _VALUES[chance.choice(("name", "name", "code", "word"))]
    size = 0.0
    while len(records.fields) < _FEWEST or size < characters:
        key = draw_key(chance)
        records.fields[key] = {name: draw(chance) for name, draw in fields}
        stated = {records.subject: key} | records.fields[key]
        size += sum(len(name) + len(value) + 6 for name, value in stated.items())
        size += share * len(filler[0]) if share else 0.0
    lines = []
    for line in state(records):
        lines.append(line)
        if chance.random() < share:
            lines.append(chance.choice(filler))
    asked = min(len(records.fields), chance.randrange(1, _ASKED + 1))
    records.fields = dict(chance.sample(list(records.fields.items()), asked))
    return "\n".join([*lines, "", *ask(records)]) + "\n"
