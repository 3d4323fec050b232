"""`evaluate` as a user meets it: mistakes, losses that are no numbers, questions, and files of
results.
"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file

from gqa_convert.data.hub import HubDataset
from gqa_convert.measuring.results import load_evaluation
from tests.helpers.data_helpers import demo_tokenizer
from tests.helpers.evaluate_models import POSITIONS, bart, causal, command_line, t5, write_rows

TEXT = "for number in range(10):\n    print(number, number ** 2)\n"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evaluate")
    causal(folder / "one")
    causal(folder / "two", seed=1, dtype=torch.bfloat16)
    causal(folder / "untold")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (folder / "untold" / file).unlink()
    causal(folder / "long", max_position_embeddings=600)
    causal(folder / "other", seed=1, max_position_embeddings=600)
    t5(folder / "t5")
    bart(folder / "bart")
    (folder / "text.txt").write_text(TEXT * 5)
    (folder / "empty.txt").write_text("")
    write_rows(
        folder / "rows.jsonl",
        [{"text": TEXT, "a": "w1", "b": "w2"}, {"text": "", "a": "w1", "b": ""}],
    )
    return folder


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], home: Path) -> Any:
    monkeypatch.chdir(home)
    return lambda *arguments: command_line(monkeypatch, capsys, *arguments)


def test_json_and_the_table(ask: Any, home: Path, tmp_path: Path) -> None:
    code, out, err = ask(
        "two", "one", "--data", "text.txt", "--json", "--output", tmp_path / "results.json"
    )
    assert code == 0, err
    report = json.loads(out)
    assert report == json.loads((tmp_path / "results.json").read_text())
    assert list(tmp_path.iterdir()) == [tmp_path / "results.json"]
    assert [each["model"] for each in report["results"]] == ["two", "one"]
    assert (report["kind"], report["objective"], report["context"]) == (
        "evaluate",
        "causal",
        POSITIONS,
    )
    assert report["command"][:4] == ["gqa-convert", "evaluate", "two", "one"]
    assert report["machine"]["device"] == "cpu"
    assert report["data"]["source"] == "text.txt"
    assert report["reference"] is None
    one = report["results"][1]
    assert one["difference"]["to"] == "two"
    assert one["difference"]["loss"] == pytest.approx(one["loss"] - report["results"][0]["loss"])
    assert err == ""
    code, out, err = ask("two", "one", "--data", "text.txt", "--output", tmp_path / "results.json")
    assert (code, out) == (2, "")
    assert "results.json exists already" in err
    code, out, err = ask("two", "one", "--data", "text.txt")
    assert (code, err) == (0, "")
    for words in (f"{one['loss']:.4f}", f"{one['bits_per_byte']:.4f}", "differences are from two"):
        assert words in out
    assert (home / "one" / "config.json").is_file()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("one", "--data", "missing.txt"), "missing.txt does not exist"),
        (("one", "--data", "empty.txt"), "empty.txt holds no text"),
        (
            ("one", "--data", "rows.jsonl", "--text-field", "body"),
            "has no 'body', found text, a, b",
        ),
        (("untold", "--data", "text.txt"), "no tokenizer"),
        (
            ("one", "--data", "text.txt", "--window", "49"),
            "--window is 49, and one has positions for 48",
        ),
        (("one", "--data", "text.txt", "--tokens", "0"), "'0' is not a whole number above 0"),
        (("one", "--data", "text.txt", "--dtype", "int8"), "--dtype is 'int8'"),
        (("one", "--data", "text.txt", "--device", "cuda:99"), "--device is cuda:99"),
        (
            ("one", "--data", "missing.txt", "-o", "no/a.json"),
            "the folder of no/a.json does not exist",
        ),
        (("--data", "text.txt"), "MODEL"),
        (("one", "t5", "--data", "text.txt"), "encoder-decoder"),
        (
            ("t5", "--data", "text.txt", "--window", "2"),
            "--window is 2, and span corruption needs 3",
        ),
        (("bart", "--data", "text.txt"), "--source-field"),
        (
            ("one", "--data", "rows.jsonl", "--source-field", "a", "--target-field", "b"),
            "is no encoder-decoder",
        ),
        (("t5", "--data", "rows.jsonl", "--source-field", "a"), "need each other"),
        (
            ("t5", "--data", "rows.jsonl", "--source-field", "a", "--target-field", "c"),
            "has no 'c', found text, a, b",
        ),
        (
            ("t5", "--data", "rows.jsonl", "--source-field", "a", "--target-field", "b"),
            "rows.jsonl line 2: 'b' is empty, expected text",
        ),
        (
            ("t5", "--data", "text.txt", "--source-field", "a", "--target-field", "b"),
            "plain text, which has no fields",
        ),
        (("one", "--retrieval", "--questions", "0"), "'--questions': '0' should be greater"),
        (
            ("one", "--retrieval", "--lengths", "20,1k"),
            "--lengths names 1000, and one has positions for 48 tokens",
        ),
        (("t5", "--retrieval"), "--retrieval asks causal models, and t5 is an encoder-decoder"),
        (("one", "--data", "text.txt", "--questions", "4"), "belongs to --retrieval"),
        (("one",), "or ask for facts with --retrieval"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_mistakes_get_one_line(
    ask: Any, home: Path, arguments: tuple[str, ...], words: str
) -> None:
    before = sorted(home.rglob("*"))
    code, out, err = ask(*arguments)
    assert (code, out) == (2, ""), err
    assert err.count("\n") == 1, err
    assert words in err
    assert sorted(home.rglob("*")) == before


def damaged(out: Path, name: str, row: int | None) -> Path:
    """The first model with numbers that are none in a tensor, or in a row of it."""
    causal(out)
    weights = load_file(out / "model.safetensors")
    weights[name][slice(None) if row is None else row] = float("nan")
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    return out


def test_losses_that_are_no_numbers_are_told(ask: Any, tmp_path: Path) -> None:
    """All of them, or only those of the window that has a certain token."""
    damaged(tmp_path / "all", "lm_head.weight", None)
    (tmp_path / "text.txt").write_text(TEXT * 5 + "zebra")
    token = demo_tokenizer()("zebra")["input_ids"][0]
    assert token not in demo_tokenizer()(TEXT * 5)["input_ids"]
    damaged(tmp_path / "some", "model.embed_tokens.weight", token)
    code, out, err = ask(
        "one",
        tmp_path / "all",
        tmp_path / "some",
        "--data",
        tmp_path / "text.txt",
        "--json",
        "--reference",
        "two",
    )
    assert code == 1
    sound, whole, part = json.loads(out)["results"]
    assert sound["scored_nan"] == 0
    assert sound["loss"] is not None
    assert whole["scored_nan"] == whole["tokens"]
    assert 0 < part["scored_nan"] < part["tokens"]
    for result in (whole, part):
        for key in ("loss", "bits_per_byte", "loss_standard_error", "kl"):
            assert result[key] is None
        assert result["difference"]["loss"] is None
    assert err.splitlines()[-1].startswith("gqa-convert: NaN")
    assert str(tmp_path / "some") in err.splitlines()[-1]
    code, out, _ = ask("one", "--data", "text.txt", "--json", "--reference", tmp_path / "all")
    (sound,) = json.loads(out)["results"]
    assert (code, sound["scored_nan"], sound["kl"]) == (1, 0, None)
    assert (sound["difference"]["loss"], sound["difference"]["bits_per_byte"]) == (None, None)
    shown = ask(tmp_path / "all", "--data", tmp_path / "text.txt")[1]
    assert f"{whole['tokens']:,} of {whole['tokens']:,} tokens have no finite loss" in shown


def test_the_commit_of_a_hub_dataset_is_recorded(
    ask: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """So that the same text can be read again."""
    answer = SimpleNamespace(sha="a" * 40)
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda *_, **__: answer)
    monkeypatch.setattr(HubDataset, "open_rows", lambda *_: [{"text": TEXT}] * 30)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    code, out, err = ask("one", "--data", "org/some", "--tokens", "64", "--json")
    assert code == 0, err
    found = json.loads(out)
    assert (found["data"]["source"], found["data"]["revision"]) == ("org/some", "a" * 40)
    assert found["results"][0]["tokens"] == 64


def test_models_are_asked_and_compared_with_the_first(ask: Any, tmp_path: Path) -> None:
    file = tmp_path / "asked.json"
    options = (
        "--retrieval",
        "--lengths",
        "520",
        "--questions",
        3,
        "--data",
        "text.txt",
        "--output",
        file,
    )
    code, out, err = ask("long", "other", *options, "--json")
    assert code == 0, err
    results = json.loads(out)
    assert results == json.loads(file.read_text())
    assert load_evaluation(file).as_json() == results
    assert results["questions"] == {"lengths": [520], "questions": 3}
    one, two = (each["retrieval"] for each in results["results"])
    cells = [(each["kind"], each["length"], each["questions"]) for each in two]
    assert cells[:4] == [
        (None, None, 16),
        (None, 520, 16),
        ("needles", None, 4),
        ("needles", 520, 4),
    ]
    assert len(cells) == 10
    assert one[0]["difference"] is None
    assert two[0]["difference"] == two[0]["found"] - one[0]["found"]
    assert all(each["found_standard_error"] > 0 for each in two), "also where nothing is found"
    assert results["results"][1]["kl"] is None, "there is no reference"


def test_questions_alone_need_no_text(ask: Any) -> None:
    code, out, err = ask("long", "--retrieval", "--questions", 1, "--json")
    assert code == 0, err
    results = json.loads(out)
    assert results["questions"] == {"lengths": [512], "questions": 1}
    assert results["data"] is None
    code, out, err = ask("long", "--retrieval", "--questions", 1)
    assert "Exact answers in texts of 512 tokens, 1 questions of each kind" in out
    assert "loss" not in out
