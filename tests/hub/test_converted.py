"""No folder of the machine is on a card, whatever its name: oracles are the names themselves."""

from typing import Any

import pytest

from gqa_convert.hub.converted import names_on_hub, without_folders

SECRET = "Secret Plans of ACME"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def public(record: dict[str, Any]) -> Any:
    return without_folders(record, names_on_hub(record))


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (f"/home/jane/{SECRET}/t.txt", "t.txt"),
        (f"{SECRET}/t.txt", "t.txt"),
        (f"../{SECRET}/model/", "model"),
        ("acme/t.txt", "t.txt"),
        (f"~/{SECRET}/*.jsonl", "*.jsonl"),
        ("../", "../"),
        ("t.txt", "t.txt"),
        ("python-stdlib", "python-stdlib"),
        ("org/corpus", "org/corpus"),
        ("https://huggingface.co/a/b", "https://huggingface.co/a/b"),
        (f"file:///{SECRET}/t.txt", "t.txt"),
    ],
)
def test_a_value(value: str, shown: str) -> None:
    on_hub = names_on_hub({"data": [{"source": "org/corpus", "revision": COMMIT}]})
    assert without_folders(value, on_hub) == shown


@pytest.mark.parametrize(
    ("word", "shown"),
    [
        (f"--calibration=/{SECRET}/t.txt", "--calibration=t.txt"),
        (f"-c/{SECRET}/t.txt", "-ct.txt"),
        (f"@{SECRET}/list", "@list"),
        (f"data=/{SECRET}/t.txt", "data=t.txt"),
        (
            f"data=[{{source: '/{SECRET}/t.txt', weight: 2}}, b.txt]",
            "data=... t.txt', weight: 2}, b.txt]",
        ),
        ("learning_rate=1e-4", "learning_rate=1e-4"),
        ("--kv-heads", "--kv-heads"),
    ],
)
def test_an_argument(word: str, shown: str) -> None:
    record = {"command": ["gqa-convert", word]}
    assert public(record) == {"command": ["gqa-convert", shown]}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("9 tokens of /home/{}/t.txt: 1 block", "9 tokens of t.txt: 1 block"),
        ("9 tokens of {}/t.txt: 1 block", "9 tokens of t.txt: 1 block"),
        ("9 tokens of t.txt and org/corpus@0123456789ab: 1", None),
        ("9 tokens of /a/{}/t.txt and /{} and {}/u.txt: 1", "9 tokens of ... u.txt: 1"),
    ],
)
def test_words_on_calibration_text(text: str, shown: str | None) -> None:
    record: dict[str, Any] = {"calibration": {"text": text.format(*[SECRET] * 3)}}
    said = public(record)["calibration"]["text"]
    assert said == (shown or text)


def test_what_is_on_the_hub_is_what_has_a_commit() -> None:
    record = {
        "source": {"id": "org/model", "revision": COMMIT},
        "command": ["convert", "org/model", "acme/model"],
    }
    assert public(record)["command"] == ["convert", "org/model", "model"]
    record["source"] = {"id": "org/model", "revision": None}
    assert public(record)["command"] == ["convert", "model", "model"]


def test_what_holds_no_paths_stays() -> None:
    record = {"machine": {"processor": "AMD Ryzen 7/8"}, "tokens": 9, "kl": None, "mix": True}
    assert public(record) == record
