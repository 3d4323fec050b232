"""check-serving finds what an engine computes wrongly. Here engines or their packages are fakes."""

import json
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gqa_convert import convert_checkpoint
from gqa_convert.conversion.options import ConversionOptions
from gqa_convert.errors import MissingExtraError
from gqa_convert.serving import checking
from gqa_convert.serving.checking import check_serving, compare, has_our_code, make_prompts
from gqa_convert.serving.engines import ENGINES, Engine, find_interpreter
from gqa_convert.serving.request import NEW_TOKENS
from gqa_convert.serving.worker import OK, Outcome
from tests.helpers.checkpoints import VOCABULARY, write_llama
from tests.helpers.command_line import assert_mistake, run
from tests.helpers.fake_engine import write_interpreter
from tests.helpers.tiny import make_checkpoint
from tests.helpers.verification import save_tokenizer

Engines = Callable[..., None]

OTHERS = ("llama.cpp", "vllm")
"""The engines that are not installed here."""


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Iterator[Engines]:
    """Sets what engines do, and their names, each with its packages, of which one is needed."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    real = dict(ENGINES)

    def install(mode: str, **packages: str) -> None:
        monkeypatch.setenv("FAKE_MODE", mode)
        ENGINES.clear()
        for name, listed in packages.items():
            ENGINES[name] = Engine("tests.helpers.fake_engine", tuple(listed.split()), "luck")

    yield install
    ENGINES.clear()
    ENGINES.update(real)


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
    monkeypatch.setenv("FAKE_ANSWER", str(tmp_path / "answer"))
    monkeypatch.setattr(checking, "ask_transformers", lambda _: (prompts, reference))
    return folder


@pytest.mark.parametrize(
    ("mode", "status", "words"),
    [
        ("right", "ok", "48 tokens equal, logits within 0.0e+00"),
        ("chatters", "ok", "48 tokens equal, logits within 0.0e+00"),
        ("token", "failed", "prompt of 40 tokens: new token 24 is not"),
        ("stops", "failed", "new token 8 is not"),
        ("logit", "failed", "logits differ by up to"),
        ("nan", "failed", "logits differ by up to nan"),
        ("fewer rows", "failed", "gave logits of shape"),
        ("fewer prompts", "failed", "answered 1 of 2 prompts"),
        ("raises", "failed", "RuntimeError: no tensor"),
        ("scratch", "failed", "RuntimeError: can't read model.gguf"),
        ("dies", "failed", "ended with exit code -6"),
        ("asks", "failed", "EOFError"),
        ("hangs", "failed", "not done when its time was up"),
        ("unsupported", "not supported", "no such architecture"),
        ("absent", "skipped", "no converter"),
    ],
)
def test_what_an_engine_does(
    out: Path, engines: Engines, monkeypatch: pytest.MonkeyPatch, mode: str, status: str, words: str
) -> None:
    engines(mode, fake="no-such-package-as-this numpy")
    monkeypatch.setattr(checking, "SECONDS", 1.8 if mode == "hangs" else 60.0)
    report = check_serving(out)
    (entry,) = report.clients
    assert (entry["status"], report.passed) == (status, status == "ok")
    assert words in entry["detail"]
    assert "\n" not in entry["detail"]


def test_an_absent_engine_is_skipped_and_counts_if_it_was_named(
    out: Path, engines: Engines
) -> None:
    engines("right", fake="numpy", absent="no-such-package-as-this")
    report = check_serving(out).as_json()
    assert [entry["status"] for entry in report["clients"]] == ["ok", "skipped"]
    assert (
        report["clients"][1]["detail"] == f"{sys.executable} has no no-such-package-as-this: luck"
    )
    assert report["passed"]
    assert [entry["client"] for entry in check_serving(out, ["absent"]).clients] == ["absent"]
    named = check_serving(out, ["fake", "absent"])
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
    assert (found["status"], found["tokens"]) == ("ok", 4)
    row[other] = row[token] - 2 * found["allowed"]
    assert "new token 5 is not" in compare(reference, answer, prompts)["detail"]


@pytest.mark.usefixtures("modeling_files_registered")
def test_only_this_packages_code_runs_in_an_engine(tmp_path: Path) -> None:
    """Layers that differ in number need the class of their config, a file of the checkpoint."""
    make_checkpoint(
        "llama", tmp_path / "source", head_dim=8, intermediate_size=256, num_hidden_layers=2
    )
    out = tmp_path / "list"
    convert_checkpoint(tmp_path / "source", out, [12, 3], ConversionOptions(method="mean"))
    config = checking.read_config(out)
    assert has_our_code(out, config)
    assert {entry["status"] for entry in check_serving(out, OTHERS).clients} == {"skipped"}
    assert not has_our_code(out, config | {"auto_map": {"AutoConfig": "other.Config"}})
    with (out / "gqa_decilm.py").open("a") as file:
        file.write("\n")
    assert not has_our_code(out, config)
    assert {entry["status"] for entry in check_serving(out, OTHERS).clients} == {"not supported"}


def test_the_adapters_compute_what_transformers_does(tmp_path: Path) -> None:
    """In another interpreter, whose packages have the engines' interfaces."""
    python = write_interpreter(tmp_path / "python")
    out = make_checkpoint("llama", tmp_path / "out", num_key_value_heads=3)
    save_tokenizer(out)
    named = [word for name in OTHERS for word in ("--engine", name)]
    shown = run("check-serving", out, *named, "--python", python, "--json")
    report = json.loads(shown.stdout)
    assert report["passed"], report
    assert [each["client"] for each in report["clients"]] == [*OTHERS]
    for each in report["clients"]:
        assert (each["version"], each["status"]) == ("9.9", "ok")
        assert each["tokens"] == 2 * NEW_TOKENS
        assert each["largest_difference"] < each["allowed"]
    (out / "tokenizer.json").unlink()
    shown = run("check-serving", out, "--engine", "llama.cpp", "--python", python)
    assert shown.returncode == 1
    assert (
        "failed         llama.cpp 9.9  ValueError: its converter failed: no tokenizer"
        in shown.stdout
    )
    other = make_checkpoint("qwen2", tmp_path / "other", num_key_value_heads=3)
    (entry,) = check_serving(other, ["llama.cpp"], python=str(python)).clients
    assert (entry["status"], entry["detail"]) == (
        "not supported",
        "its converter failed: Model qwen2 is not supported",
    )
    python = write_interpreter(tmp_path / "bare", converter=tmp_path)
    (entry,) = check_serving(other, ["llama.cpp"], python=str(python)).clients
    assert entry["status"] == "skipped"
    assert "LLAMA_CPP" in entry["detail"]


def test_a_named_interpreter_is_used_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engines: Engines
) -> None:
    engines("right", fake="no-such-package-as-this numpy")
    with pytest.raises(MissingExtraError, match=r"there is no interpreter .*/python: name"):
        find_interpreter("fake", str(tmp_path / "python"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    for word in (sys.executable, os.path.relpath(sys.executable), Path(sys.executable).name):
        python, version = find_interpreter("fake", word)
        assert Path(python).is_absolute()
        assert version == np.__version__
    for word, code in (("mute", "true"), ("chatty", f'echo "Hello"; exec {sys.executable} "$@"')):
        (tmp_path / word).write_text(f"#!/bin/sh\n{code}\n")
        (tmp_path / word).chmod(0o755)
    with pytest.raises(MissingExtraError, match=r"mute has no no-such-package-as-this: luck"):
        find_interpreter("fake", "./mute")
    assert find_interpreter("fake", "./chatty")[1] == np.__version__


def test_the_command(tmp_path: Path) -> None:
    folder = write_llama(tmp_path / "own", config={"model_type": "gqa_t5"})
    result = run("check-serving", folder, "--engine", "vllm")
    assert result.returncode == 1
    assert "not supported" in result.stdout
    assert "not proved" in result.stdout
    skipped = run("check-serving", write_llama(tmp_path / "out"), "--engine", "vllm")
    assert (skipped.returncode, "--python PATH" in skipped.stdout) == (1, True)
    assert_mistake(run("check-serving", folder, "--engine", "tgi"), "'tgi'", "llama.cpp, vllm")


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "canary", "architectures": ["CanaryForConditionalGeneration"]},
        {"model_type": "t5gemma", "architectures": ["T5GemmaForConditionalGeneration"]},
        {"model_type": "speech_to_text", "architectures": ["Speech2TextForConditionalGeneration"]},
    ],
    ids=lambda config: config["model_type"],
)
def test_no_engine_runs_them(config: dict[str, Any], tmp_path: Path) -> None:
    for engine in ENGINES.values():
        why = checking.why_unsupported(tmp_path, config | {"is_encoder_decoder": True}, engine)
        assert "is an encoder-decoder or reads more than text" in why
