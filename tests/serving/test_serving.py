"""check-serving finds what an engine computes wrongly. The engines here are fakes."""

import json
import os
import signal
import sys
import tarfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gqa_convert import convert_checkpoint
from gqa_convert.errors import CorruptCheckpointError, MissingExtraError, OptionError, SourceNotFoundError
from gqa_convert.serving import checking, installing, process, vllm
from gqa_convert.serving.checking import check_serving
from gqa_convert.serving.client import (
    CLIENTS,
    NEW_TOKENS,
    Answer,
    Client,
    Request,
)
from gqa_convert.serving.comparing import compare
from gqa_convert.serving.prompts import make_prompts, places
from gqa_convert.serving.worker import read_request, write_answer, write_request
from tests.helpers.checkpoints import VOCABULARY, write_llama
from tests.helpers.command_line import run
from tests.helpers.tiny import HEADS, make_checkpoint

INDEX = "model.safetensors.index.json"
FAKE = Client("fake", "tests.helpers.fake_engine", ("no-such-package-as-this", "numpy"), ("numpy",), listed_as=None)
ABSENT = Client(
    "absent",
    "tests.helpers.fake_engine",
    ("no-such-package-as-this",),
    ("no-such-package-as-this",),
    needs="luck",
    listed_as=None,
)


def random_answer(prompts: list[list[int]]) -> Answer:
    random = np.random.default_rng(1)
    logits = [random.standard_normal((len(places(len(prompt))), VOCABULARY)).astype(np.float32) for prompt in prompts]
    tokens = [each[-NEW_TOKENS:].argmax(axis=1).tolist() for each in logits]
    return Answer(tokens, logits)


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint whose reference answer is made up, and known to the fake engine."""
    folder = write_llama(tmp_path / "out")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[2]))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("FAKE_ANSWER", str(tmp_path))

    def ask(folder: Path, config: dict[str, Any]) -> tuple[Request, Answer]:
        prompts = make_prompts(config, None)
        request = Request(
            folder, config, prompts, prompts, [places(len(prompt)) for prompt in prompts], Path(), has_tokenizer=True
        )
        return request, random_answer(prompts)

    write_answer(ask(folder, checking.read_config(folder))[1], tmp_path)
    monkeypatch.setattr(checking, "_ask_transformers", ask)
    return folder


def verdict(out: Path, monkeypatch: pytest.MonkeyPatch, mode: str, **options: Any) -> tuple[str, str, bool]:
    monkeypatch.setenv("FAKE_MODE", mode)
    report = check_serving(out, known=(FAKE,), **options).as_json()
    (entry,) = report["clients"]
    return entry["status"], entry["detail"], report["passed"]


@pytest.mark.parametrize("mode", ["right", "chatters"])
def test_a_right_engine_passes(out: Path, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    status, detail, passed = verdict(out, monkeypatch, mode)
    assert (status, passed) == ("ok", True)
    assert "48 of 48 tokens equal" in detail


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("token", "prompt of 40 tokens: new token 24 is"),
        ("first token", "prompt of 5 tokens: new token 1 is"),
        ("stops", "stopped after 7 of 24 new tokens"),
        ("logit", "logits differ by up to"),
        ("nan", "logits that are not finite"),
        ("fewer rows", "gave logits of shape"),
        ("fewer prompts", "answered 1 of 2 prompts"),
        ("raises", "RuntimeError: no tensor"),
        ("dies", "killed by SIGABRT"),
        ("exits", "ended with exit code 0"),
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
    with pytest.raises(OptionError, match="allow more"):
        check_serving(out, known=(FAKE,), minutes=float("nan"))


@pytest.mark.parametrize(
    ("then", "seconds", "code"), [("exit 3", None, 3), ("wait", 2.0, None), ("kill -9 $$", None, -9)]
)
def test_a_process_leaves_nothing_behind(tmp_path: Path, then: str, seconds: float | None, code: int | None) -> None:
    reader = fifo(tmp_path / "fifo")
    ended = process.run(
        ["sh", "-c", f"exec 3> fifo; sleep 600 & echo started; {then}"], folder=tmp_path, seconds=seconds
    )
    assert (ended.code, ended.output) == (code, ["started"])
    assert closed(reader)


def test_a_process_ends_with_this_program(tmp_path: Path) -> None:
    reader = fifo(tmp_path / "fifo")

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, stop)
    try:
        with pytest.raises(KeyboardInterrupt):
            process.run(["sh", "-c", "exec 3> fifo; sleep 600 & sleep 1; kill -USR1 $PPID; wait"], folder=tmp_path)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert closed(reader)


def test_a_process_finds_nobody_to_ask() -> None:
    """Where this program's own stdin is open, and silent."""
    reader, writer = os.pipe()
    before = os.dup(0)
    os.dup2(reader, 0)
    try:
        ended = process.run(["sh", "-c", "read answer; echo $?"], seconds=20.0)
    finally:
        os.dup2(before, 0)
        for number in (before, reader, writer):
            os.close(number)
    assert (ended.code, ended.output) == (0, ["1"])


def fifo(path: Path) -> int:
    os.mkfifo(path)
    return os.open(path, os.O_RDONLY | os.O_NONBLOCK)


def closed(reader: int) -> bool:
    """Whether no process has the other end open, soon."""
    for _ in range(100):
        try:
            return os.read(reader, 1) == b""
        except BlockingIOError:
            time.sleep(0.05)
    return False


@pytest.mark.parametrize(("mode", "status"), [("unsupported", "not supported"), ("absent", "skipped")])
def test_nothing_is_proven_where_no_engine_ran(
    out: Path, monkeypatch: pytest.MonkeyPatch, mode: str, status: str
) -> None:
    assert verdict(out, monkeypatch, mode)[::2] == (status, False)


def test_an_engine_without_logits_is_judged_by_its_tokens(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status, detail, passed = verdict(out, monkeypatch, "no logits")
    assert (status, passed) == ("ok", True)
    assert "no logits available" in detail


@pytest.mark.parametrize("client", checking.CLIENTS, ids=lambda client: client.name)
def test_how_to_get_an_engine_fits_a_line(client: Client) -> None:
    shown = checking._how_to_get(client, None)
    assert len(shown) < 140
    assert f"--client {client.name} --install" in shown or "--python" in shown
    assert "pip install" not in shown


def test_an_absent_engine_is_skipped_loudly_and_counts_if_it_was_named(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_MODE", "right")
    report = check_serving(out, known=(FAKE, ABSENT)).as_json()
    assert [entry["status"] for entry in report["clients"]] == ["ok", "skipped"]
    assert report["passed"]
    assert report["clients"][1]["detail"].startswith("not installed: --client absent --install")
    assert not check_serving(out, ["fake", "absent"], known=(FAKE, ABSENT)).passed
    assert not check_serving(out, ["absent"], known=(FAKE, ABSENT)).passed
    for clients in ([], ["fake"]):
        report = check_serving(out, clients, pythons={"absent": sys.executable}, known=(FAKE, ABSENT)).as_json()
        assert [entry["status"] for entry in report["clients"]] == ["ok", "skipped"]
        assert sys.executable in report["clients"][1]["detail"]
        assert not report["passed"]


def test_code_in_a_checkpoint_is_no_obstacle_where_it_is_not_needed(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | {"auto_map": {"AutoModelForCausalLM": "modeling.Model"}}))
    assert verdict(out, monkeypatch, "right")[0] == "ok"
    (out / "config.json").write_text(
        json.dumps(config | {"model_type": "own", "auto_map": {"AutoModelForCausalLM": "modeling.Model"}})
    )
    status, detail, passed = verdict(out, monkeypatch, "right")
    assert (status, passed) == ("not supported", False)
    assert "with a modelling file" in detail


def test_a_tie_in_the_reference_is_forgiven_and_nothing_more() -> None:
    prompts = [[3, 4]]
    reference = random_answer(prompts)
    assert reference.logits is not None
    row, token = reference.logits[0][-NEW_TOKENS + 4], reference.tokens[0][4]
    other = (token + 1) % VOCABULARY
    answer = Answer([[*reference.tokens[0][:4], other, *[0] * (NEW_TOKENS - 5)]], reference.logits)
    row[other] = row[token] - 1e-4
    found = compare(reference, answer, prompts, 1e-3)
    assert (found.problems, found.ties, found.tokens) == ((), 1, 4)
    row[other] = row[token] - 0.1
    assert compare(reference, answer, prompts, 1e-3).problems


def test_an_engine_may_pad_the_vocabulary() -> None:
    prompts = [[3, 4], [5] * 30]
    reference = random_answer(prompts)
    assert reference.logits is not None
    padded = replace(
        reference, logits=[np.pad(each, ((0, 0), (0, 8)), constant_values=99) for each in reference.logits]
    )
    assert compare(reference, padded, prompts, 1e-3).problems == ()


def test_prompts_fill_what_the_context_leaves() -> None:
    assert [len(each) for each in make_prompts({"max_position_embeddings": 64, "vocab_size": 50}, None)] == [5, 40]
    assert [len(each) for each in make_prompts({"vocab_size": 50}, None)] == [5, 48, 320]
    assert make_prompts({"vocab_size": 50}, list(range(400)))[2] == list(range(320))
    for length in (1, 5, 320):
        assert places(length)[-NEW_TOKENS:] == list(range(length - 1, length + NEW_TOKENS - 1))
        assert len(places(length)) == len(set(places(length)))


def test_what_can_not_be_checked_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SourceNotFoundError, match="holds no config"):
        check_serving(tmp_path)
    folder = write_llama(tmp_path / "out", config={"vocab_size": 999})
    (folder / "tokenizer.json").unlink()
    with pytest.raises(OptionError, match=r"choose from llama\.cpp"):
        check_serving(folder, ["tgi"])
    with pytest.raises(
        CorruptCheckpointError, match=r"lm_head\.weight, which is \[24, 60\] where the model needs \[999, 60\]"
    ):
        check_serving(folder, known=(FAKE,))
    monkeypatch.setattr(checking, "load_model", lambda *_, **__: (None, []))
    with pytest.raises(CorruptCheckpointError, match=r"can't run .*: AttributeError"):
        check_serving(folder, known=(FAKE,))
    own = write_llama(tmp_path / "own", config={"model_type": "gqa_t5"})
    report = check_serving(own).as_json()
    assert {entry["status"] for entry in report["clients"]} == {"not supported"}
    listed = write_llama(tmp_path / "listed", config={"model_type": "gqa_qwen3", "num_key_value_heads": [HEADS, 1]})
    assert {entry.status for entry in check_serving(listed).clients} == {"not supported"}
    assert "only transformers 5 has code for a qwen3 of that kind" in check_serving(listed).clients[0].detail
    assert len(report["clients"]) == len(CLIENTS)
    assert not report["passed"]


@pytest.mark.usefixtures("modeling_files_registered")
def test_layers_that_differ_go_to_the_engines_that_have_code_for_them(
    tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint("llama", tmp_path / "source", head_dim=8, intermediate_size=256, num_hidden_layers=3)
    convert_checkpoint(tmp_path / "source", tmp_path / "list", [12, 6, 2], method="mean")
    monkeypatch.setenv("FAKE_MODE", "right")
    report = check_serving(tmp_path / "list", known=(replace(FAKE, runs_decilm=True), ABSENT)).as_json()
    assert [each["status"] for each in report["clients"]] == ["ok", "not supported"]
    assert report["clients"][1]["detail"] == "it has no DeciLMForCausalLM, whose layers differ"
    assert report["tensor_parallel"] == {"split": [1, 2], "with_copied_kv_heads": [6, 12]}
    assert report["passed"]
    assert [client.name for client in CLIENTS if client.runs_decilm] == ["llama.cpp", "vllm"]
    assert check_serving(out, known=(FAKE,)).tensor_parallel is not None


def test_a_checkpoint_with_a_config_class_reaches_vllm_with_this_packages_file(tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path / "source", head_dim=8, intermediate_size=256, num_hidden_layers=2)
    convert_checkpoint(folder, tmp_path / "list", [12, 3], method="mean")
    (tmp_path / "list" / "gqa_decilm.py").write_text("raise SystemExit")
    config = checking.read_config(tmp_path / "list")
    code, name = checking._config_code(config)
    request = Request(tmp_path / "list", config, [], [], [], tmp_path / "scratch", False, code, name)
    (tmp_path / "scratch").mkdir()
    write_request(request, tmp_path / "scratch")
    assert read_request(tmp_path / "scratch") == request
    linked = vllm._folder(request)
    assert "class DeciLMConfig" in (linked / "gqa_decilm.py").read_text()
    assert json.loads((linked / "config.json").read_text())["auto_map"] == {"AutoConfig": "gqa_decilm.DeciLMConfig"}
    assert (linked / INDEX).samefile(tmp_path / "list" / INDEX)
    assert vllm._folder(replace(request, config_code=None)) == request.folder


def test_an_installation_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(MissingExtraError, match="pip says"):
        installing.install(replace(ABSENT, requirements=(str(tmp_path / "no-such-file.whl"),)))
    assert list((tmp_path / "gqa-convert" / "clients").iterdir()) == []
    with pytest.raises(MissingExtraError, match="needs luck"):
        installing.install(replace(ABSENT, requirements=()))


def test_an_installation_takes_what_only_the_source_archive_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = replace(FAKE, distributions=("numpy",), sources=("vendor/engine/convert.py", "vendor/engine/conversion"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = installing.client_folder(client)
    folder.mkdir(parents=True)
    (folder / "stale").touch()

    def pip(_: Client, command: list[str]) -> None:
        if "--target" in command:
            Path(command[command.index("--target") + 1]).mkdir()
            return
        assert command[-1] == f"numpy=={np.__version__}"
        (tmp_path / "file").write_text("text")
        with tarfile.open(Path(command[command.index("--dest") + 1]) / "numpy.tar.gz", "w:gz") as archive:
            for name in ("convert.py", "conversion/a/b.py", "conversions.py", "c.py"):
                archive.add(tmp_path / "file", f"numpy-9/vendor/engine/{name}")

    monkeypatch.setattr(installing, "_run_pip", pip)
    installing.install(client)
    assert sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()) == [
        "vendor/engine/conversion/a/b.py",
        "vendor/engine/convert.py",
    ]
    assert list(folder.parent.iterdir()) == [folder]


def test_a_named_interpreter_is_used_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert installing.find_place(FAKE, str(tmp_path / "python")) is None
    place = installing.find_place(FAKE, sys.executable)
    assert place is not None
    assert (place.python, place.version) == (sys.executable, np.__version__)
    monkeypatch.chdir(tmp_path)
    for word in (os.path.relpath(sys.executable), Path(sys.executable).name):
        monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
        found = installing.find_place(FAKE, word)
        assert found is not None
        assert Path(found.python).is_absolute()
    for word, code in (("mute", "true"), ("chatty", f'echo "Hello"; exec {sys.executable} "$@"')):
        (tmp_path / word).write_text(f"#!/bin/sh\n{code}\n")
        (tmp_path / word).chmod(0o755)
    assert installing.find_place(FAKE, "./mute") is None
    found = installing.find_place(FAKE, "./chatty")
    assert found is not None
    assert found.version == np.__version__


def test_the_command(tmp_path: Path) -> None:
    folder = write_llama(tmp_path / "own", config={"model_type": "gqa_t5"})
    result = run("check-serving", folder)
    assert result.returncode == 1
    assert "not supported" in result.stdout
    assert "nothing was checked" in result.stdout
    for arguments in (("--python", "vllm"), ("--install",)):
        result = run("check-serving", folder, *arguments)
        assert (result.returncode, result.stderr.count("\n")) == (2, 1)
