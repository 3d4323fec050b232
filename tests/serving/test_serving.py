"""check-serving finds what an engine computes wrongly. The engines here are fakes, or their packages are."""

import json
import os
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gqa_convert import convert_checkpoint
from gqa_convert.conversion.options import ConversionOptions
from gqa_convert.errors import MissingExtraError
from gqa_convert.serving import checking
from gqa_convert.serving.checking import check_serving, has_our_code
from gqa_convert.serving.comparing import compare
from gqa_convert.serving.engines import ENGINES, Engine, find_interpreter
from gqa_convert.serving.reference import make_prompts
from gqa_convert.serving.request import NEW_TOKENS
from gqa_convert.serving.worker import OK, Outcome
from tests.helpers.checkpoints import VOCABULARY, write_llama
from tests.helpers.command_line import assert_mistake, run
from tests.helpers.fake_engine import write_interpreter
from tests.helpers.tiny import make_checkpoint
from tests.helpers.verification import save_tokenizer

ROOT = Path(__file__).resolve().parents[2]
FAKE = Engine("tests.helpers.fake_engine", ("no-such-package-as-this", "numpy"), "luck")
ABSENT = Engine("tests.helpers.fake_engine", ("no-such-package-as-this",), "luck")


def random_answer(prompts: list[list[int]]) -> Outcome:
    random = np.random.default_rng(1)
    shapes = [(NEW_TOKENS, VOCABULARY) for _ in prompts]
    logits = [random.standard_normal(shape).astype(np.float32) for shape in shapes]
    tokens = [each.argmax(axis=1).tolist() for each in logits]
    return Outcome(OK, tokens=tokens, logits=logits)


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint whose reference answer is made up, and known to the fake engine."""
    folder = write_llama(tmp_path / "out")
    prompts = make_prompts(checking.read_config(folder))
    reference = random_answer(prompts)
    (tmp_path / "answer").write_bytes(pickle.dumps((reference.tokens, reference.logits)))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("FAKE_ANSWER", str(tmp_path / "answer"))
    monkeypatch.setattr(checking, "ask_transformers", lambda _: (prompts, reference))
    return folder


def verdict(out: Path, monkeypatch: pytest.MonkeyPatch, mode: str, **options: Any) -> tuple[str, str, bool]:
    monkeypatch.setenv("FAKE_MODE", mode)
    report = check_serving(out, engines={"fake": FAKE}, **options).as_json()
    (entry,) = report["clients"]
    return entry["status"], entry["detail"], report["passed"]


@pytest.mark.parametrize("mode", ["right", "chatters"])
def test_a_right_engine_passes(out: Path, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    status, detail, passed = verdict(out, monkeypatch, mode)
    assert (status, passed) == ("ok", True)
    assert detail.startswith("48 tokens equal, 0 ties, logits within 0.0e+00")


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("token", "prompt of 40 tokens: new token 24 is not"),
        ("stops", "new token 8 is not"),
        ("logit", "logits differ by up to"),
        ("nan", "logits that are not finite"),
        ("fewer rows", "gave logits of shape"),
        ("fewer prompts", "answered 1 of 2 prompts"),
        ("raises", "RuntimeError: no tensor"),
        ("dies", "ended with exit code -6"),
        ("asks", "EOFError"),
    ],
)
def test_a_wrong_engine_fails(out: Path, monkeypatch: pytest.MonkeyPatch, mode: str, words: str) -> None:
    status, detail, passed = verdict(out, monkeypatch, mode)
    assert (status, passed) == ("failed", False)
    assert words in detail
    assert "\n" not in detail


def test_an_engine_that_hangs_fails(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert verdict(out, monkeypatch, "hangs", minutes=0.03) == ("failed", "not done when its time was up", False)


@pytest.mark.parametrize(("mode", "status"), [("unsupported", "not supported"), ("absent", "skipped")])
def test_nothing_is_proven_where_no_engine_ran(
    out: Path, monkeypatch: pytest.MonkeyPatch, mode: str, status: str
) -> None:
    assert verdict(out, monkeypatch, mode)[::2] == (status, False)


def test_an_absent_engine_is_skipped_and_counts_if_it_was_named(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_MODE", "right")
    engines = {"fake": FAKE, "absent": ABSENT}
    report = check_serving(out, engines=engines).as_json()
    assert [entry["status"] for entry in report["clients"]] == ["ok", "skipped"]
    assert report["clients"][1]["detail"] == f"{sys.executable} has no no-such-package-as-this: luck"
    assert report["passed"]
    assert [entry["client"] for entry in check_serving(out, ["absent"], engines=engines).clients] == ["absent"]
    named = check_serving(out, ["fake"], pythons={"absent": sys.executable}, engines=engines)
    assert [entry["status"] for entry in named.clients] == ["ok", "skipped"]
    assert not named.passed


def test_a_tie_in_the_reference_is_forgiven_and_nothing_more() -> None:
    prompts = [[3, 4]]
    reference = random_answer(prompts)
    row, token = reference.logits[0][4], reference.tokens[0][4]
    other = (token + 1) % VOCABULARY
    tokens = [[*reference.tokens[0][:4], other, *[0] * (NEW_TOKENS - 5)]]
    answer = Outcome(OK, tokens=tokens, logits=reference.logits)
    row[other] = row[token] - 1e-4
    found = compare(reference, answer, prompts)
    assert (found["problems"], found["ties"], found["tokens"]) == ([], 1, 4)
    row[other] = row[token] - 2 * found["allowed"]
    assert compare(reference, answer, prompts)["problems"]


@pytest.mark.usefixtures("modeling_files_registered")
def test_only_this_packages_code_runs_in_an_engine(tmp_path: Path) -> None:
    """Layers that differ in number need the class of their config, which is a file of the checkpoint."""
    make_checkpoint("llama", tmp_path / "source", head_dim=8, intermediate_size=256, num_hidden_layers=2)
    out = tmp_path / "list"
    convert_checkpoint(tmp_path / "source", out, [12, 3], ConversionOptions(method="mean"))
    config = checking.read_config(out)
    assert has_our_code(out, config)
    assert {entry["status"] for entry in check_serving(out).clients} == {"skipped"}
    assert not has_our_code(out, config | {"auto_map": {"AutoConfig": "other.Config"}})
    with (out / "gqa_decilm.py").open("a") as file:
        file.write("\n")
    assert not has_our_code(out, config)
    assert {entry["status"] for entry in check_serving(out).clients} == {"not supported"}


def test_the_adapters_compute_what_transformers_does(tmp_path: Path) -> None:
    """In another interpreter, whose packages have the engines' interfaces."""
    python = write_interpreter(tmp_path / "python")
    pythons = [word for name in ENGINES for word in ("--python", f"{name}={python}")]
    out = make_checkpoint("llama", tmp_path / "out", num_key_value_heads=3)
    save_tokenizer(out)
    shown = run("check-serving", out, *pythons, "--json")
    report = json.loads(shown.stdout)
    assert report["passed"], report
    assert [each["client"] for each in report["clients"]] == ["llama.cpp", "vllm"]
    for each in report["clients"]:
        assert (each["version"], each["status"]) == ("9.9", "ok")
        assert each["tokens"] == 2 * NEW_TOKENS
        assert each["largest_difference"] < each["allowed"]
    (out / "tokenizer.json").unlink()
    shown = run("check-serving", out, "--engine", "llama.cpp", *pythons[:2])
    assert shown.returncode == 1
    assert "FAIL" in shown.stdout
    assert "its converter failed: no tokenizer" in shown.stdout
    other = make_checkpoint("qwen2", tmp_path / "other", num_key_value_heads=3)
    (entry,) = check_serving(other, ["llama.cpp"], pythons={"llama.cpp": str(python)}).clients
    assert (entry["status"], entry["detail"]) == ("not supported", "its converter failed: Model qwen2 is not supported")
    python = write_interpreter(tmp_path / "bare", converter=tmp_path)
    (entry,) = check_serving(other, ["llama.cpp"], pythons={"llama.cpp": str(python)}).clients
    assert entry["status"] == "skipped"
    assert "LLAMA_CPP" in entry["detail"]


def test_a_named_interpreter_is_used_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MissingExtraError, match=r"there is no interpreter .*/python: name"):
        find_interpreter(FAKE, str(tmp_path / "python"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    for word in (sys.executable, os.path.relpath(sys.executable), Path(sys.executable).name):
        python, version = find_interpreter(FAKE, word)
        assert Path(python).is_absolute()
        assert version == np.__version__
    for word, code in (("mute", "true"), ("chatty", f'echo "Hello"; exec {sys.executable} "$@"')):
        (tmp_path / word).write_text(f"#!/bin/sh\n{code}\n")
        (tmp_path / word).chmod(0o755)
    with pytest.raises(MissingExtraError, match=r"mute has no no-such-package-as-this: luck"):
        find_interpreter(FAKE, "./mute")
    assert find_interpreter(FAKE, "./chatty")[1] == np.__version__


def test_the_command(tmp_path: Path) -> None:
    folder = write_llama(tmp_path / "own", config={"model_type": "gqa_t5"})
    result = run("check-serving", folder)
    assert result.returncode == 1
    assert "not supported" in result.stdout
    assert "nothing was checked" in result.stdout
    skipped = run("check-serving", write_llama(tmp_path / "out"), "--engine", "vllm")
    assert (skipped.returncode, "--python vllm=PATH" in skipped.stdout) == (1, True)
    assert_mistake(run("check-serving", folder, "--python", "vllm"), "--python", "'vllm' is not NAME=PATH")
    assert_mistake(run("check-serving", folder, "--engine", "tgi"), "'tgi'", "llama.cpp, vllm")
