"""Publishing on a stand-in for the Hub, in processes of their own as the client reads its settings
when it is imported.
"""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gqa_convert.conversion.options import ConversionOptions
from gqa_convert.conversion.run import convert_checkpoint
from gqa_convert.errors import UploadError
from gqa_convert.hub.repository import PublishOptions, Repository
from tests.helpers.checkpoints import digests, write_llama
from tests.helpers.command_line import run_python
from tests.helpers.hub_uploads import SIGNATURE, UploadHub

ROOT = Path(__file__).parents[2]
TOKEN = "hf_" + "Zx9" * 12
NOWHERE = "http://127.0.0.1:9"


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("publish")
    source = write_llama(base / "source", shards=3)
    (source / "README.md").write_text("---\nlicense: apache-2.0\n---\n# Source\n")
    (source / "odd [name]*.txt").write_text("carried")
    convert_checkpoint(source, base / "out", 3, ConversionOptions(method="mean"))
    return base / "out"


@pytest.fixture
def out(converted: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "gqa-3"
    subprocess.run(["cp", "-r", converted, folder], check=True)
    return folder


@pytest.fixture
def hub() -> Iterator[UploadHub]:
    with UploadHub() as server:
        yield server


def environment(out: Path, url: str, token: str | None = TOKEN) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    ours = {
        "HF_ENDPOINT": url,
        "HF_HOME": str(out.parent / "hf-home"),
        "HF_HUB_DISABLE_XET": "1",
        "NO_PROXY": "*",
    }
    return kept | ours | ({"HF_TOKEN": token} if token else {})


def publish(
    out: Path, url: str, *options: str, token: str | None = TOKEN
) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """The command with --json; whatever it prints, the token is not in it, nor in any file."""
    env = environment(out, url, token)
    result = run_python(
        "-m", "gqa_convert", "publish", out, "--json", *options, environment=env, timeout=100
    )
    assert TOKEN not in result.stdout + result.stderr
    assert SIGNATURE not in result.stdout + result.stderr
    for path in out.parent.rglob("*"):
        assert not path.is_file() or TOKEN.encode() not in path.read_bytes()
    assert "Traceback" not in result.stderr
    return result, json.loads(result.stdout) if result.stdout else {}


def assert_refused(result: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
    lines = result.stderr.splitlines()
    assert result.returncode == code, result.stderr
    assert lines[-1].startswith("gqa-convert: ")
    assert code == 1 or len(lines) == 1, lines
    for word in words:
        assert word in lines[-1]


def sent_files(out: Path) -> dict[str, bytes]:
    return {
        path.relative_to(out).as_posix(): path.read_bytes()
        for path in out.rglob("*")
        if path.is_file()
    }


def test_everything_arrives_and_nothing_is_sent_twice(out: Path, hub: UploadHub) -> None:
    result, made = publish(out, hub.url, "--repo-id", "me/gqa-3", "--private")
    assert result.returncode == 0, result.stderr
    assert "it/s" not in result.stderr
    assert f"to       {hub.url}/me/gqa-3, private\n" in result.stderr
    assert made["private"]
    there = hub.branches["me/gqa-3"]["main"]
    assert there.pop(".gitattributes")
    assert there == sent_files(out)
    assert {"odd [name]*.txt", "gqa_conversion.json"} <= set(there)
    assert hub.private["me/gqa-3"]
    assert hub.tokens <= {f"Bearer {TOKEN}", None}
    assert (made["repo_id"], made["url"]) == ("me/gqa-3", f"{hub.url}/me/gqa-3")
    hashes = {name: hashlib.sha256(raw).hexdigest() for name, raw in there.items()}
    assert {each["path"]: each["sha256"] for each in made["files"]} == hashes
    assert not made["dry_run"]
    puts = len(hub.puts)
    assert puts == len(set(hub.puts)) == 4  # three shards and the tokenizer

    result, _ = publish(out, hub.url, "--repo-id", "me/gqa-3")
    assert result.returncode == 0, result.stderr
    assert len(hub.puts) == puts
    hub.branches["me/gqa-3"]["main"]["pytorch_model.bin"] = b"0"
    result, _ = publish(out, hub.url, "--repo-id", "me/gqa-3")
    assert_refused(
        result, 2, "holds weights of another model, pytorch_model.bin: delete them there"
    )


def test_an_interrupted_upload_goes_on(out: Path, hub: UploadHub) -> None:
    second = hashlib.sha256((out / "model-00002-of-00003.safetensors").read_bytes()).hexdigest()
    hub.failing = [("PUT", second)]
    result, _ = publish(out, hub.url, "--repo-id", "me/gqa-3")
    assert_refused(result, 1, "same command")
    assert set(hub.branches["me/gqa-3"]["main"]) == {".gitattributes"}
    hub.failing = [("POST", "/commit/")]
    result, _ = publish(out, hub.url, "--repo-id", "me/gqa-3")
    assert_refused(result, 1, "same command")
    result, _ = publish(out, hub.url, "--repo-id", "me/gqa-3")
    assert result.returncode == 0, result.stderr
    assert sorted(hub.puts.count(each) for each in set(hub.puts)) == [1, 1, 1, 2]
    assert hub.puts.count(second) == 2
    assert hub.branches["me/gqa-3"]["main"].items() >= sent_files(out).items()


def test_a_signal_during_the_upload(out: Path, hub: UploadHub) -> None:
    hub.slow = 1.5
    command = [sys.executable, "-m", "gqa_convert", "publish", str(out), "--repo-id", "me/gqa-3"]
    with subprocess.Popen(
        command, cwd=ROOT, env=environment(out, hub.url), stderr=subprocess.PIPE, text=True
    ) as process:
        until = time.monotonic() + 60
        while not hub.puts and time.monotonic() < until:
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert "same command" in stderr.splitlines()[-1]
    assert "Traceback" not in stderr
    hub.slow = 0.0
    assert publish(out, hub.url, "--repo-id", "me/gqa-3")[0].returncode == 0
    assert hub.branches["me/gqa-3"]["main"].items() >= sent_files(out).items()


def test_a_dry_run_writes_the_card_alone_and_uses_no_network(out: Path, hub: UploadHub) -> None:
    before = digests(out, ignore=("README.md",))
    result, made = publish(out, hub.url, "--repo-id", "me/gqa-3", "--dry-run", token=None)
    assert result.returncode == 0, result.stderr
    assert made["dry_run"]
    assert made["card"] == str(out / "README.md")
    assert {each["path"] for each in made["files"]} == set(before) | {
        "README.md",
        "gqa_conversion.json",
    }
    assert digests(out, ignore=("README.md",)) == before
    assert hub.requests == []
    assert "license: apache-2.0" in (out / "README.md").read_text()
    first = (out / "README.md").read_bytes()
    assert publish(out, NOWHERE, "--repo-id", "me/gqa-3", "--dry-run")[0].returncode == 0
    assert (out / "README.md").read_bytes() == first


def test_messages_show_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(f"{TOKEN} https://me:secret@hub/x?{SIGNATURE}")

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", refuse)
    with pytest.raises(UploadError) as problem:
        Repository(PublishOptions("me/gqa-3"), TOKEN).read([])
    assert str(problem.value).startswith(
        "the Hub refused me/gqa-3 (*** https://hub/x); nothing was sent"
    )


def test_no_login_no_rights_no_network(out: Path, hub: UploadHub) -> None:
    before = digests(out, ignore=())
    assert_refused(
        publish(out, hub.url, "--repo-id", "me/gqa-3", token=None)[0],
        2,
        "hf auth login",
        "--dry-run",
    )
    assert_refused(publish(out, NOWHERE, "--repo-id", "me/gqa-3")[0], 1, "refused")
    assert digests(out, ignore=()) == before
    (out / "stray.log").write_text("mine")
    result, _ = publish(out, hub.url, "--repo-id", "forbidden/gqa-3")
    assert_refused(result, 1, "hf auth login")
    assert "sending  config.json" in result.stderr  # notes are of no use after the upload
    assert "stray.log" in result.stderr


def test_the_hub_refuses_a_licence(out: Path, hub: UploadHub) -> None:
    refused = publish(out, hub.url, "--repo-id", "me/gqa-3", "--license", "nonsense")[0]
    assert_refused(refused, 1, "metadata", "must be one of a list")
