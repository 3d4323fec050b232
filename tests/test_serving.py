"""check-serving finds what an engine computes wrongly. The engines here are fakes; tests/test_serving_engines.py runs real ones."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gqa_convert.errors import CorruptCheckpointError, MissingExtraError, OptionError, SourceNotFoundError
from gqa_convert.serving import checking, installing
from gqa_convert.serving.checking import check_serving
from gqa_convert.serving.client import CLIENTS, NEW_TOKENS, Answer, Client, Request
from gqa_convert.serving.comparing import compare
from gqa_convert.serving.prompts import make_prompts, places
from gqa_convert.serving.worker import write_answer
from tests.checkpoints import VOCABULARY, write_llama
from tests.test_cli import run

FAKE = Client("fake", "tests.fake_engine", "numpy", ("numpy",))
ABSENT = Client("absent", "tests.fake_engine", "no-such-package-as-this", ("no-such-package-as-this",), needs="luck")


def random_answer(prompts: list[list[int]]) -> Answer:
    random = np.random.default_rng(1)
    logits = [random.standard_normal((len(places(len(prompt))), VOCABULARY)).astype(np.float32) for prompt in prompts]
    tokens = [each[-NEW_TOKENS:].argmax(axis=1).tolist() for each in logits]
    return Answer(tokens, logits, [4, 9, 3, 17])


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint whose reference answer is made up, and known to the fake engine."""
    folder = write_llama(tmp_path / "out")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parent.parent))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("FAKE_ANSWER", str(tmp_path))

    def ask(folder: Path, config: dict[str, Any]) -> tuple[Request, Answer]:
        prompts = make_prompts(config, None)
        request = Request(folder, config, prompts, prompts, [places(len(prompt)) for prompt in prompts], Path(), "text")
        return request, random_answer(prompts)

    write_answer(ask(folder, checking.read_config(folder))[1], tmp_path)
    monkeypatch.setattr(checking, "_ask_transformers", ask)
    return folder


def verdict(out: Path, monkeypatch: pytest.MonkeyPatch, mode: str) -> tuple[str, str, bool]:
    monkeypatch.setenv("FAKE_MODE", mode)
    report = check_serving(out, known=(FAKE,))
    (entry,) = report["clients"]
    return entry["status"], entry["detail"], report["passed"]


def test_a_right_engine_passes(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status, detail, passed = verdict(out, monkeypatch, "right")
    assert (status, passed) == ("ok", True)
    assert "48 of 48 tokens equal" in detail


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("token", "prompt of 40 tokens: new token 24 is"),
        ("first token", "prompt of 5 tokens: new token 1 is"),
        ("stops", "stopped after 7 of 24 new tokens"),
        ("logit", "logits differ by up to"),
        ("nan", "logits differ by up to inf"),
        ("fewer rows", "showed logits of shape"),
        ("fewer prompts", "answered 1 of 2 prompts"),
        ("text", "its tokenizer makes other tokens"),
        ("raises", "RuntimeError: no tensor"),
        ("dies", "killed by SIGABRT"),
        ("exits", "ended with exit code 0"),
    ],
)
def test_a_wrong_engine_fails(out: Path, monkeypatch: pytest.MonkeyPatch, mode: str, words: str) -> None:
    status, detail, passed = verdict(out, monkeypatch, mode)
    assert (status, passed) == ("failed", False)
    assert words in detail
    assert "\n" not in detail


@pytest.mark.parametrize(("mode", "status"), [("unsupported", "not supported"), ("absent", "skipped")])
def test_nothing_is_proven_where_no_engine_ran(out: Path, monkeypatch: pytest.MonkeyPatch, mode: str, status: str) -> None:
    assert verdict(out, monkeypatch, mode)[::2] == (status, False)


def test_an_engine_without_logits_is_judged_by_its_tokens(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status, detail, passed = verdict(out, monkeypatch, "no logits")
    assert (status, passed) == ("ok", True)
    assert "shows no logits" in detail


def test_an_absent_engine_is_skipped_loudly_and_counts_if_it_was_named(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_MODE", "right")
    report = check_serving(out, known=(FAKE, ABSENT))
    assert [entry["status"] for entry in report["clients"]] == ["ok", "skipped"]
    assert report["passed"]
    for word in ("pip install", "no-such-package-as-this", "--install", "luck"):
        assert word in report["clients"][1]["detail"]
    assert not check_serving(out, ["fake", "absent"], known=(FAKE, ABSENT))["passed"]
    assert not check_serving(out, ["absent"], known=(FAKE, ABSENT))["passed"]


def test_a_tie_in_the_reference_is_forgiven_and_nothing_more() -> None:
    prompts = [[3, 4]]
    reference = random_answer(prompts)
    assert reference.logits is not None
    row, token = reference.logits[0][-NEW_TOKENS + 4], reference.tokens[0][4]
    other = (token + 1) % VOCABULARY
    answer = Answer([[*reference.tokens[0][:4], other, *[0] * (NEW_TOKENS - 5)]], reference.logits)
    row[other] = row[token] - 1e-4
    found = compare(reference, answer, prompts, 1e-3)
    assert (found["problems"], found["ties"], found["tokens"]) == ([], 1, 4)
    row[other] = row[token] - 0.1
    assert compare(reference, answer, prompts, 1e-3)["problems"]


def test_an_engine_may_pad_the_vocabulary() -> None:
    prompts = [[3, 4], [5] * 30]
    reference = random_answer(prompts)
    assert reference.logits is not None
    padded = replace(reference, logits=[np.pad(each, ((0, 0), (0, 8)), constant_values=99) for each in reference.logits])
    assert compare(reference, padded, prompts, 1e-3)["problems"] == []


def test_prompts_fill_what_the_context_leaves() -> None:
    assert [len(each) for each in make_prompts({"max_position_embeddings": 64, "vocab_size": 50}, None)] == [5, 40]
    assert [len(each) for each in make_prompts({"vocab_size": 50}, None)] == [5, 48, 320]
    assert make_prompts({"vocab_size": 50}, list(range(400)))[2] == list(range(320))
    for length in (1, 5, 320):
        assert places(length)[-NEW_TOKENS:] == list(range(length - 1, length + NEW_TOKENS - 1))
        assert len(places(length)) == len(set(places(length)))


def test_what_can_not_be_checked_is_said(tmp_path: Path) -> None:
    with pytest.raises(SourceNotFoundError, match="holds no config"):
        check_serving(tmp_path)
    folder = write_llama(tmp_path / "out", config={"vocab_size": 999})
    (folder / "tokenizer.json").unlink()
    with pytest.raises(OptionError, match="choose from transformers"):
        check_serving(folder, ["tgi"])
    with pytest.raises(CorruptCheckpointError, match="transformers"):
        check_serving(folder, known=(FAKE,))
    own = write_llama(tmp_path / "own", config={"model_type": "gqa_t5"})
    report = check_serving(own)
    assert {entry["status"] for entry in report["clients"]} == {"not supported"}
    assert len(report["clients"]) == len(CLIENTS)
    assert not report["passed"]


def test_an_installation_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(MissingExtraError, match="pip says"):
        installing.install(replace(ABSENT, requirements=(str(tmp_path / "no-such-file.whl"),)))
    assert list((tmp_path / "gqa-convert" / "clients").iterdir()) == []


def test_a_named_interpreter_is_used_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert installing.find_place(FAKE, str(tmp_path / "python")) is None
    place = installing.find_place(FAKE, sys.executable)
    assert place is not None
    assert (place.python, place.version) == (sys.executable, np.__version__)
    assert installing.find_place(replace(FAKE, version="0.9")) is None
    assert installing.find_place(replace(FAKE, beside=("torch",))) == place
    assert installing.find_place(replace(FAKE, beside=("no-such-package-as-this",))) is None


def test_the_command(tmp_path: Path) -> None:
    folder = write_llama(tmp_path / "own", config={"model_type": "gqa_t5"})
    result = run("check-serving", folder)
    assert result.returncode == 1
    assert "not supported" in result.stderr
    assert "nothing was checked" in result.stderr
    for arguments in (("--python", "vllm"), ("--install",)):
        result = run("check-serving", folder, *arguments)
        assert (result.returncode, result.stderr.count("\n")) == (2, 1)
