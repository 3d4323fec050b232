"""`evaluate --retrieval` as a user meets it, key tokens, and the loss of one model on another's text."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gqa_convert.measuring.evaluation.comparison import Mean
from gqa_convert.measuring.evaluation.examples import Example, Material
from gqa_convert.measuring.evaluation.forward import Scored, score
from gqa_convert.measuring.evaluation.long_contexts import key_tokens, loss_of_rows, write
from gqa_convert.measuring.results import load_evaluation
from tests.helpers.data_helpers import demo_tokenizer
from tests.helpers.evaluate_models import causal, command_line, t5
from tests.helpers.tiny import make_config, make_model


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("retrieval")
    causal(folder / "one", max_position_embeddings=600)
    causal(folder / "two", seed=1, max_position_embeddings=600)
    t5(folder / "t5")
    (folder / "text.txt").write_text("for number in range(10):\n    print(number, number ** 2)\n" * 9)
    return folder


@pytest.fixture
def evaluate(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], home: Path) -> Any:
    monkeypatch.chdir(home)
    return lambda *arguments: command_line(monkeypatch, capsys, *arguments)


def test_models_are_asked_and_compared_with_the_first(evaluate: Any, tmp_path: Path) -> None:
    file = tmp_path / "asked.json"
    options = ("--retrieval", "--lengths", "520", "--questions", 3, "--data", "text.txt", "--output", file)
    code, out, err = evaluate("one", "two", *options, "--json")
    assert code == 0, err
    results = json.loads(out)
    assert results == json.loads(file.read_text())
    assert load_evaluation(file).as_json() == results
    assert results["questions"] == {"lengths": [520], "questions": 3, "seed": 0}
    one, two = (each["retrieval"] for each in results["results"])
    cells = [(each["kind"], each["length"], each["questions"]) for each in two["found"]]
    assert cells[:4] == [(None, None, 16), (None, 520, 16), ("needles", None, 4), ("needles", 520, 4)]
    assert len(cells) == 10
    assert one["found"][0]["difference"] is None
    assert two["found"][0]["difference"] == two["found"][0]["found"] - one["found"][0]["found"]
    assert two["written_difference"] == pytest.approx(two["written_loss"] - one["written_loss"])
    assert two["written_loss"] > one["written_loss"], "random models expect their own text more than another's"
    assert results["results"][1]["kl"] > 0, "the first model is the reference"
    assert results["results"][1]["key_tokens"] == 0, "windows are shorter than two short contexts"


def test_questions_alone_need_no_text(evaluate: Any) -> None:
    code, out, err = evaluate("one", "--retrieval", "--questions", 1, "--seed", 7, "--json")
    assert code == 0, err
    results = json.loads(out)
    assert results["questions"] == {"lengths": [512], "questions": 1, "seed": 7}
    assert results["data"] is None
    code, out, err = evaluate("one", "--retrieval", "--questions", 1)
    own = f"{results['results'][0]['retrieval']['written_loss']:.4f}"
    assert own not in out, "another seed"
    assert "Exact answers in percent in texts of 512 tokens, 1 questions of each kind" in out
    assert "loss" not in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("one", "--retrieval", "--questions", 0), "'--questions': '0' should be greater"),
        (("one", "--retrieval", "--lengths", "512,1k"), "--lengths names 1000, and one has positions for 600 tokens"),
        (("t5", "--retrieval"), "--retrieval asks causal models, and t5 is an encoder-decoder"),
        (("one", "--data", "text.txt", "--questions", 4), "belongs to --retrieval"),
        (("one", "--retrieval", "--plot", "losses.png"), "--html and --plot draw losses"),
        (("one",), "or ask for facts with --retrieval"),
    ],
)
def test_mistakes_are_one_line(evaluate: Any, arguments: tuple[Any, ...], words: str) -> None:
    code, out, err = evaluate(*arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert words in err


def test_key_tokens_are_those_that_the_long_context_makes_likelier() -> None:
    # a random model's losses hardly depend on its context, so that losses with the window are made up
    model = make_model(make_config("llama", max_position_embeddings=900))
    tokens = np.random.default_rng(0).integers(0, 64, 801)
    material = Material([Example(tokens[:-1], tokens[1:], np.zeros(800, np.int64))], 1)
    assert [len(each.read) for each in material.with_short_context(256).examples] == [256, 512, 512, 288]
    assert [len(each.targets) for each in material.with_short_context(256).examples] == [256, 256, 256, 32]
    loss = np.full(800, 1.9, np.float32)
    loss[::2] = 2.1
    short = score(Scored(model, material.with_short_context(256)), 2).loss
    whole = score(Scored(model, material), 2).loss
    np.testing.assert_allclose(short[:512], whole[:512], atol=1e-4)
    assert abs(short[512:] - whole[512:]).max() > 1e-3
    expected = (short > 3.9) & (np.arange(800) % 2 == 1)
    assert 0 < expected.sum() < 400
    assert (key_tokens(Scored(model, material), loss, 2) == expected).all()


def test_the_loss_on_own_text_is_the_entropy() -> None:
    tokenizer = demo_tokenizer()
    model = make_model(make_config("llama", vocab_size=len(tokenizer), max_position_embeddings=200))
    for parameter in model.get_output_embeddings().parameters():
        parameter.requires_grad_(False).zero_()
    rows = write(model, tokenizer, seed=0)
    assert rows.shape == (16, 192)
    assert (rows[:, 0] == tokenizer.bos_token_id).all()
    assert len({tuple(row[:64]) for row in rows}) == 16
    assert len(np.unique(rows[:, 64:])) > 1000, "a uniform model writes every token"
    found = loss_of_rows(model, rows, 4)
    assert isinstance(found, Mean)
    assert found.value == pytest.approx(math.log(len(tokenizer)), rel=1e-5)
    assert (write(model, tokenizer, seed=0) == rows).all()
    assert not (write(model, tokenizer, seed=1) == rows).all()
