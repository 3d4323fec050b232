"""Made-up records and questions about them, in many formats.

Only a model predicts this text which finds again what stands far above.

A document states facts that nobody can know (the badge of Tolvina is 48213), as rows of a table, as
JSON, as settings, as sentences among other prose and so on. Behind them, it asks for some of them,
or states them again. Merging heads loses this kind of reading first, and calibration text of other
kinds hardly asks for it.
"""

import functools
import json
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np

from gqa_convert.data.order import Integers

if TYPE_CHECKING:
    from jinja2 import Environment

_PARTS: dict[str, Any] = tomllib.loads(
    Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
)
_WORDS = {name: words.split() for name, words in _PARTS["words"].items()}
_FIELDS = [(name, kind) for kind, names in _PARTS["fields"].items() for name in names.split()]
"""The fields of records, and the kinds of their values."""


@functools.cache
def _forms() -> "Environment":
    """The templates of documents, which a dry run does without."""
    from jinja2 import DictLoader, Environment

    forms = Environment(
        loader=DictLoader(_PARTS["values"] | _PARTS["forms"]), trim_blocks=True, auto_reload=False
    )
    forms.globals |= _WORDS | _PARTS["patterns"] | {"json": json, "repr": repr, "tuple": tuple}
    return forms


_SHORTEST = 300
"""Characters of a document, unless less is asked for."""
_FEWEST = 3
"""Records of a document."""
_ASKED = 12
"""The most facts that one asks for."""
_CHARACTERS = 2.4
"""Of a document per token: the longest document fills a block."""


def record_blocks(
    tokenizer: Any, length: int, count: int, seed: int, filler: Sequence[str] = ()
) -> Integers:
    """[count * length], the tokens of blocks that each begin with a new document.

    Args:
        tokenizer: a transformers tokenizer.
        length: tokens of a block.
        count: blocks.
        seed: of what is drawn.
        filler: paragraphs of other text.
    """
    documents = made_up_records(seed, round(_CHARACTERS * length), filler)
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    made: list[int] = []
    for _ in range(count):
        block: list[int] = []
        while len(block) < length:
            encoded = tokenizer(next(documents), add_special_tokens=False, verbose=False)
            block += [*encoded["input_ids"], *end]
        made += block[:length]
    return np.array(made, np.int64)


def made_up_records(seed: int, characters: int, filler: Sequence[str]) -> Iterator[str]:
    """Documents without end.

    Args:
        seed: of everything that is drawn.
        characters: of the longest document, roughly; short ones are as frequent as long ones.
        filler: paragraphs of other text, among which the facts of half of the documents are
            scattered.
    """
    chance = Random(seed)
    while True:
        wanted = round(_SHORTEST * max(1.0, characters / _SHORTEST) ** chance.random())
        subject = chance.choice(_WORDS["subjects"])
        fields = chance.sample(_FIELDS, chance.choice((1, 1, 2, 3)))
        stated, asked = (chance.choice(_PARTS[ways]) for ways in ("ways_to_state", "ways_to_ask"))
        share = chance.uniform(0.1, 0.6) if filler and chance.random() < 0.5 else 0.0
        kind_of_key = chance.choice(("name", "name", "code", "word"))
        records: dict[str, dict[str, str]] = {}
        size = 0.0
        while len(records) < _FEWEST or size < wanted:
            key = _written(kind_of_key, chance)
            records[key] = {name: _written(kind, chance) for name, kind in fields}
            size += sum(
                len(name) + len(value) + 6
                for name, value in ({subject: key} | records[key]).items()
            )
            size += share * len(filler[0]) if share else 0.0
        lines = []
        for line in _written(stated, chance, subject=subject, records=records).split("\n")[:-1]:
            lines.append(line)
            if chance.random() < share:
                lines.append(chance.choice(filler))
        number = min(len(records), chance.randrange(1, _ASKED + 1))
        chosen = dict(chance.sample(list(records.items()), number))
        yield "\n".join([*lines, "", _written(asked, chance, subject=subject, records=chosen)])


def _written(form: str, chance: Random, **given: Any) -> str:
    """A value, or records in lines: in the form of this name, which draws its details itself."""
    return _forms().get_template(form).render(chance=chance, **given)
