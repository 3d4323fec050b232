"""Seeded changes of bytes and of JSON values."""

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

_NUMBERS = (0, 1, -1, 2, 3, 5, 6, 8, 12, 48, 2**31, 2**63, 2**64, 10**30, 0.0, 0.5, 4.0, -1.5, 1e308, 1e-320)
_NO_NUMBERS = (None, True, False, float("nan"), float("inf"), float("-inf"))
_WORDS = (
    "",
    "4",
    "llama",
    "F32",
    "BF16",
    "I64",
    "../x",
    "/etc/passwd",
    "\x00",
    "\ud800",
    "é" * 300,
    "model.safetensors",
)
_CONTAINERS: tuple[Any, ...] = ([], [1], [4, 4], [0, 2**40], ["q"], {}, {"a": 1}, {"__proto__": []}, [[[[[[1]]]]]])
ODD_VALUES: tuple[Any, ...] = (*_NUMBERS, *_NO_NUMBERS, *_WORDS, *_CONTAINERS)
"""Values that a field does not expect, and some that it does."""


def changed_bytes(raw: bytes, dice: random.Random) -> bytes:
    """The bytes with one to four changes."""
    changed = bytearray(raw)
    for _ in range(dice.choice((1, 1, 1, 2, 4))):
        at = dice.randrange(len(changed) + 1)
        length = dice.choice((1, 1, 2, 8, 64))
        match dice.randrange(7):
            case 0 if changed:
                changed[at % len(changed)] ^= 1 << dice.randrange(8)
            case 1:
                changed[at : at + length] = dice.randbytes(length)
            case 2:
                del changed[at : at + length]
            case 3:
                changed[at:at] = dice.randbytes(length)
            case 4:
                changed[at:at] = changed[at : at + length]
            case 5:
                del changed[at:]
            case _:
                changed[at:at] = dice.choice(
                    (b"\x00", b"\xff\xfe", b"\xef\xbb\xbf", b"\r\n", b'"', b"{", b"]", b",", b"9")
                )
    return bytes(changed)


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container within a value with every key or index in it."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield value, key
            yield from _places(each)
    elif isinstance(value, list):
        for place, each in enumerate(value):
            yield value, place
            yield from _places(each)


def changed_value(value: Any, dice: random.Random) -> Any:
    """A copy of a JSON value with one to three changes."""
    changed = copy.deepcopy(value)
    for _ in range(dice.choice((1, 1, 1, 2, 3))):
        places = list(_places(changed))
        if not places:
            return changed
        holder, key = dice.choice(places)
        other_holder, other_key = dice.choice(places)
        match dice.randrange(8):
            case 0:
                del holder[key]
            case 1 if isinstance(holder, dict):
                holder[_renamed(str(key), dice)] = holder.pop(key)
            case 2:
                holder[key] = copy.deepcopy(other_holder[other_key])
            case 3 if isinstance(holder[key], int) and not isinstance(holder[key], bool):
                holder[key] += dice.choice((-4, -1, 1, 4, holder[key]))
            case 4 if isinstance(holder, dict):
                holder[_renamed(str(key), dice)] = copy.deepcopy(holder[key])
            case 5 if isinstance(holder[key], str):
                holder[key] = _renamed(holder[key], dice)
            case _:
                holder[key] = copy.deepcopy(dice.choice(ODD_VALUES))
    return changed


def _renamed(name: str, dice: random.Random) -> str:
    at = dice.randrange(len(name) + 1)
    return dice.choice(
        (name[:at], name[:at] + name[at + 1 :], name + "x", name.upper(), name[:at] + "\u200b" + name[at:])
    )


def written(value: Any, dice: random.Random) -> bytes:
    """A value as JSON: at times indented, with escapes, with a key twice, or nested far too deep."""
    text = json.dumps(value, indent=dice.choice((None, None, 2)), ensure_ascii=dice.random() < 0.5)
    if dice.random() < 0.03 and isinstance(value, dict) and value:
        key = dice.choice(list(value))
        again = json.dumps({key: dice.choice(ODD_VALUES)})
        text = f"{text.rstrip()[:-1]}, {again[1:]}"
    if dice.random() < 0.005:
        text = "[" * 100_000
    return text.encode("utf-8", "surrogatepass")
