"""Made-up records and questions about them, in many formats: text that only a model predicts which finds again what stands
far above.

A document states facts that nobody can know (the badge of Tolvina is 48213), as rows of a table, as JSON, as settings, as
sentences among other prose and so on. Behind them, it asks for some of them, or states them again. Merging heads loses
this kind of reading first, and calibration text of other kinds hardly asks for it.
"""

import json
import random
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

_WORDS: dict[str, str] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
_BEGINNINGS, _MIDDLES, _ENDS = (_WORDS[name].split() for name in ("beginnings", "middles", "ends"))
"""Of made-up names."""
_SUBJECTS, _COLOURS, _THINGS = (_WORDS[name].split() for name in ("subjects", "colours", "things"))

_SHORTEST = 300
"""Characters of a document, unless less is asked for."""
_FEWEST = 3
"""Records of a document."""
_ASKED = 12
"""The most facts that one asks for."""


class _Field(NamedTuple):
    """What is stated of a subject: its name, and how a value is drawn."""

    name: str
    draw: Callable[[random.Random], str]


def _digits(chance: random.Random) -> str:
    return str(chance.randrange(10 ** chance.choice((2, 3, 4, 5, 6))))


def _code(chance: random.Random) -> str:
    letters = "".join(chance.choice("ABCDEFGHJKLMNPQRSTUVWXYZ") for _ in range(chance.choice((2, 3))))
    return f"{letters}-{chance.randrange(10, 1000)}"


def _day(chance: random.Random) -> str:
    return f"{chance.randrange(1950, 2030)}-{chance.randrange(1, 13):02}-{chance.randrange(1, 29):02}"


def _hexadecimal(chance: random.Random) -> str:
    return f"{chance.randrange(16**6):06x}"


def _price(chance: random.Random) -> str:
    return f"{chance.randrange(1, 900)}.{chance.randrange(100):02}"


def _name(chance: random.Random) -> str:
    return chance.choice(_BEGINNINGS) + chance.choice(_MIDDLES) + chance.choice(_ENDS)


def _word(chance: random.Random) -> str:
    return f"{chance.choice(_COLOURS)} {chance.choice(_THINGS)}"


_FIELDS = (
    *(_Field(name, _digits) for name in ("number", "balance", "height", "port", "score", "weight")),
    *(_Field(name, _code) for name in ("code", "badge", "ticket", "version")),
    *(_Field(name, _day) for name in ("date", "birthday", "deadline")),
    *(_Field(name, _hexadecimal) for name in ("hash", "key", "token")),
    *(_Field(name, _price) for name in ("price", "cost", "rate")),
    *(_Field(name, _name) for name in ("owner", "manager", "home", "neighbour")),
    *(_Field(name, _word) for name in ("sign", "gift", "symbol", "password")),
)

Row = dict[str, str]
"""The fields of a record by name; the first one is its key."""


def made_up_records(seed: int, characters: int, filler: Sequence[str] = ()) -> Iterator[str]:
    """Documents without end.

    Args:
        seed: of everything that is drawn.
        characters: of the longest document, roughly; short ones are as frequent as long ones.
        filler: paragraphs of other text, among which the facts of half of the documents are scattered.
    """
    chance = random.Random(seed)
    while True:
        size = _SHORTEST * max(1.0, characters / _SHORTEST) ** chance.random()
        yield _document(chance, round(size), filler)


def _document(chance: random.Random, characters: int, filler: Sequence[str]) -> str:
    subject = chance.choice(_SUBJECTS)
    fields = chance.sample(_FIELDS, chance.choice((1, 1, 2, 3)))
    state, ask = chance.choice(_WAYS_TO_STATE), chance.choice(_WAYS_TO_ASK)
    share = chance.uniform(0.1, 0.6) if filler and chance.random() < 0.5 else 0.0
    draw_key = chance.choice((_name, _name, _code, _word))
    rows: dict[str, Row] = {}
    size = 0.0
    while len(rows) < _FEWEST or size < characters:
        key = draw_key(chance)
        rows[key] = {subject: key} | {field.name: field.draw(chance) for field in fields}
        size += sum(len(name) + len(value) + 6 for name, value in rows[key].items())
        size += share * len(filler[0]) if share else 0.0
    stated = _scattered(chance, state(chance, list(rows.values())), filler, share)
    asked = chance.sample(list(rows.values()), min(len(rows), chance.randrange(1, _ASKED + 1)))
    return "\n".join([*stated, "", *ask(chance, asked)]) + "\n"


def _scattered(chance: random.Random, lines: list[str], filler: Sequence[str], share: float) -> list[str]:
    """The lines in their order, with paragraphs behind a share of them."""
    mixed = []
    for line in lines:
        mixed.append(line)
        if chance.random() < share:
            mixed.append(chance.choice(filler))
    return mixed


def _table(separator: str, edge: str = "") -> Callable[[random.Random, list[Row]], list[str]]:
    def stated(chance: random.Random, rows: list[Row]) -> list[str]:  # noqa: ARG001
        every = [list(rows[0]), *(list(row.values()) for row in rows)]
        return [f"{edge}{separator.join(cells)}{edge[::-1]}" for cells in every]

    return stated


def _json_lines(chance: random.Random, rows: list[Row]) -> list[str]:  # noqa: ARG001
    return [json.dumps(row) for row in rows]


def _json_object(chance: random.Random, rows: list[Row]) -> list[str]:  # noqa: ARG001
    found = {}
    for row in rows:
        key, *values = row.values()
        found[key] = values[0] if len(values) == 1 else dict(list(row.items())[1:])
    return json.dumps(found, indent=2).splitlines()


def _settings(chance: random.Random, rows: list[Row]) -> list[str]:
    between = chance.choice((" = ", "=", ": "))
    lines = []
    for row in rows:
        (_, key), *rest = row.items()
        lines += [f"[{key}]", *(f"{name}{between}{value}" for name, value in rest), ""]
    return lines


def _list_items(chance: random.Random, rows: list[Row]) -> list[str]:
    mark = chance.choice(("- ", "* ", "", "> "))
    between = chance.choice((": ", " -> ", " is ", " | "))
    lines = []
    for row in rows:
        key, *values = row.values()
        lines.append(f"{mark}{key}{between}{', '.join(values)}")
    return lines


def _assignments(chance: random.Random, rows: list[Row]) -> list[str]:  # noqa: ARG001
    subject = next(iter(rows[0]))
    lines = [f"{subject}s = {{}}"]
    for row in rows:
        key, *values = row.values()
        lines.append(f"{subject}s[{key!r}] = {values[0] if len(values) == 1 else tuple(values)!r}")
    return lines


def _log(chance: random.Random, rows: list[Row]) -> list[str]:
    lines, second = [], chance.randrange(40_000)
    for row in rows:
        second += chance.randrange(1, 500)
        clock = f"{second // 3600:02}:{second // 60 % 60:02}:{second % 60:02}"
        lines.append(f"{clock} INFO " + " ".join(f"{name}={value}" for name, value in row.items()))
    return lines


_SENTENCES = (
    "The {field} of {key} is {value}.",
    "{key} has the {field} {value}.",
    "Note that {key}'s {field} was set to {value}.",
    "For {key}, the {field} to use is {value}.",
    "As everybody here knows, {value} is the {field} of {key}.",
    "Somebody wrote down {value} as the {field} of the {subject} {key}.",
)


def _sentences(chance: random.Random, rows: list[Row]) -> list[str]:
    pattern = chance.choice(_SENTENCES)
    lines = []
    for row in rows:
        (subject, key), *rest = row.items()
        for field, value in rest:
            lines.append(pattern.format(subject=subject, key=key, field=field, value=value))
    return lines


_QUESTIONS = (
    ("What is the {field} of {key}?", "{value}"),
    ("Question: which {field} does {key} have?", "Answer: {value}"),
    ("Q: {key}, {field}?", "A: {value}"),
    ("Look up the {field} of the {subject} {key}.", "It is {value}."),
    (">>> {field}({key!r})", "{value!r}"),
    ("User: Please tell me the {field} of {key}.", "Assistant: The {field} of {key} is {value}."),
)


def _questions(chance: random.Random, rows: list[Row]) -> list[str]:
    question, answer = chance.choice(_QUESTIONS)
    lines = []
    for row in rows:
        (subject, key), *rest = row.items()
        field, value = chance.choice(rest)
        facts = {"subject": subject, "key": key, "field": field, "value": value}
        lines += [question.format(**facts), answer.format(**facts)]
    return lines


def _backwards(chance: random.Random, rows: list[Row]) -> list[str]:
    """Which key has a value."""
    lines = []
    for row in rows:
        (subject, key), *rest = row.items()
        field, value = chance.choice(rest)
        lines.append(f"The {subject} whose {field} is {value}: {key}")
    return lines


_WAYS_TO_STATE = (
    _table(","),
    _table("\t"),
    _table(" | ", "| "),
    _json_lines,
    _json_object,
    _settings,
    _list_items,
    _assignments,
    _log,
    _sentences,
    _sentences,
)
_WAYS_TO_ASK = (_questions, _questions, _backwards, _list_items, _json_lines, _sentences, _assignments, _table(","))
