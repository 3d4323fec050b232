"""Prints the record of a model type, which is joined from facts.toml, derived.json and the defaults of `Family`.

python -m gqa_convert.families llama
"""

import sys
from dataclasses import fields

from gqa_convert.families.family import Family
from gqa_convert.families.records import ALL, REFUSALS


def described(model_type: str) -> str:
    """The record of a type, a line for each field, with a mark before what is not the default; or why there is none."""
    if model_type not in ALL:
        return f"{model_type} {REFUSALS.get(model_type, 'is on no list')}"
    record, default = ALL[model_type], Family(model_type=model_type)
    lines = []
    for field in fields(Family):
        value = getattr(record, field.name)
        mark = " " if value == getattr(default, field.name) else "*"
        shown = sorted(value) if isinstance(value, frozenset) else value
        lines.append(f"{mark} {field.name:24} {shown!r}")
    return "\n".join(lines)


if __name__ == "__main__":
    for each in sys.argv[1:]:
        sys.stdout.write(described(each) + "\n")
