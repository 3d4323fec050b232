"""Checkpoints on the Hub, against a stand-in for it: what travels, what is kept, and what is said when it goes
wrong.
"""

import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from gqa_convert.checkpoint.source import open_checkpoint
from gqa_convert.conversion.plan import make_plan
from tests.helpers.checkpoints import (
    Arrays,
    by_mean,
    digests,
    llama_arrays,
    write_config,
    write_llama,
)
from tests.helpers.command_line import run_python
from tests.helpers.hub_server import BROKEN, GATED, HubServer

SCRIPT = """
import json, sys
from gqa_convert.checkpoint.source import open_checkpoint
from gqa_convert.conversion.options import ConversionOptions
from gqa_convert.conversion.run import convert_checkpoint
from gqa_convert.errors import GQAConvertError
from gqa_convert.conversion.plan import make_plan

verb, source, out, revision = sys.argv[1:5]
try:
    if verb == "plan":
        result = make_plan(open_checkpoint(source, revision=revision or None), 4).summary()
    else:
        result = convert_checkpoint(source, out, 4, ConversionOptions(method="mean", revision=revision or None)).as_json()
except GQAConvertError as problem:
    result = {"error": type(problem).__name__, "message": str(problem)}
print(json.dumps(result))
"""


def large_arrays(seed: int = 0) -> Arrays:
    """Some 2 MB, so that headers are a small part of it."""
    return llama_arrays(hidden=1200, seed=seed)


def ask(
    server: HubServer | str, cache: Path, verb: str, source: str, out: Path | str = "", revision: str = "", **env: str
) -> Any:
    """Run a command in a process of its own, with a cache of its own: the Hub's client reads its settings when it is
    imported.
    """
    url = server if isinstance(server, str) else server.url
    settings = {
        "HF_ENDPOINT": url,
        "HF_HOME": str(cache),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_OFFLINE": "0",
        "NO_PROXY": "*",
    }
    result = run_python(
        "-c", SCRIPT, verb, source, out, revision, environment=dict(os.environ) | settings | env, timeout=600
    )
    assert result.returncode == 0, result.stderr
    assert "it/s" not in result.stderr  # no progress bars where there is no terminal
    answer = json.loads(result.stdout)
    if "message" in answer:
        assert answer["message"].isprintable()
    return answer


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("hub")
    config = {"hidden_size": 1200}
    main = write_llama(base / "main", arrays=large_arrays(), shards=3, config=config)
    (main / "pytorch_model.bin").write_bytes(b"0" * 1_000_000)
    (main / "consolidated.safetensors").write_bytes(b"0" * 1_000_000)
    (main / "stray[1].safetensors").write_bytes(b"0" * 1_000_000)
    (main / "original").mkdir()
    (main / "original" / "consolidated.00.pth").write_bytes(b"0" * 1_000_000)
    (main / ".gitattributes").write_text("*.bin filter=lfs")
    (main / "sub").mkdir()
    (main / "sub" / "note.txt").write_text("carried")
    dev = write_llama(base / "dev", arrays=large_arrays(seed=1), config=config)
    old = base / "old"
    old.mkdir()
    write_config(old, **config)
    torch.save({name: torch.from_numpy(array) for name, array in large_arrays().items()}, old / "pytorch_model.bin")
    quantised = base / "quantised"
    quantised.mkdir()
    write_config(quantised, quantization_config={"quant_method": "awq"})
    (quantised / "pytorch_model.bin").write_bytes(b"0" * 1_000_000)
    lying = write_llama(base / "lying")
    (lying / "model.safetensors").write_bytes((10_000).to_bytes(8, "little") + b"{" * 20_000)
    return {"main": main, "dev": dev, "old": old, "quantised": quantised, "lying": lying}


@pytest.fixture
def hub(folders: dict[str, Path]) -> Iterator[HubServer]:
    repos = {
        "org/model": {"main": folders["main"], "dev": folders["dev"]},
        "gpt-like": {"main": folders["dev"]},
        "org/old": {"main": folders["old"]},
        "org/quantised": {"main": folders["quantised"]},
        "org/lying": {"main": folders["lying"]},
        GATED: {"main": folders["main"]},
        BROKEN: {"main": folders["main"]},
    }
    with HubServer(repos) as server:
        yield server


def header_bytes(path: Path) -> int:
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")


class TestPlan:
    def test_only_headers_travel(self, hub: HubServer, folders: dict[str, Path], tmp_path: Path) -> None:
        hub.together = threading.Barrier(3, timeout=30)  # headers of three files, read one after another, never arrive
        plan = ask(hub, tmp_path, "plan", "org/model")
        local = json.loads(json.dumps(make_plan(open_checkpoint(folders["main"]), 4).summary()))
        assert plan["revision"] == hub.commit("org/model", "main")
        assert plan == local | {"source": "org/model", "revision": plan["revision"]}
        shards = sorted(folders["main"].glob("model-*"))
        assert len(shards) == 3
        for path in shards:
            assert hub.sent(path.name) == 8 + header_bytes(path)  # the length field is read first
        read = {path.name for path in shards} | {"config.json", "model.safetensors.index.json", "model"}
        assert {entry.file for entry in hub.log if entry.nbytes} == read
        assert sum(entry.nbytes for entry in hub.log) < 20_000 < plan["weight_bytes"]["before"] // 50

    def test_a_branch_a_commit_and_an_id_without_organisation(self, hub: HubServer, tmp_path: Path) -> None:
        commit = hub.commit("org/model", "dev")
        assert ask(hub, tmp_path, "plan", "org/model", revision="dev")["revision"] == commit
        assert ask(hub, tmp_path, "plan", "org/model", revision=commit)["revision"] == commit
        assert ask(hub, tmp_path, "plan", "gpt-like")["revision"] == hub.commit("gpt-like", "main")

    def test_bin_files_are_downloaded(self, hub: HubServer, folders: dict[str, Path], tmp_path: Path) -> None:
        """Their tensors cannot be listed otherwise."""
        plan = ask(hub, tmp_path, "plan", "org/old")
        assert plan["weights_format"] == "torch"
        assert hub.sent("pytorch_model.bin") == (folders["old"] / "pytorch_model.bin").stat().st_size


class TestConvert:
    def test_only_what_is_needed_is_downloaded(self, hub: HubServer, folders: dict[str, Path], tmp_path: Path) -> None:
        result = ask(hub, tmp_path / "cache", "convert", "org/model", tmp_path / "out")
        by_mean(folders["main"], tmp_path / "expected", 4)
        assert digests(tmp_path / "out") == digests(tmp_path / "expected")
        assert result["revision"] == hub.commit("org/model", "main")
        source = json.loads((tmp_path / "out" / "gqa_conversion.json").read_bytes())["source"]
        assert (source["id"], source["revision"]) == ("org/model", result["revision"])
        for name in ("pytorch_model.bin", "consolidated.safetensors", "stray[1].safetensors", "consolidated.00.pth"):
            assert hub.sent(name) == 0
        assert (tmp_path / "out" / "sub" / "note.txt").read_text() == "carried"

    def test_without_network_the_cache_serves(self, hub: HubServer, tmp_path: Path) -> None:
        cache, nobody = tmp_path / "cache", "http://127.0.0.1:9"
        ask(hub, cache, "convert", "org/model", tmp_path / "online")
        for number, (url, env) in enumerate([(nobody, {}), (hub.url, {"HF_HUB_OFFLINE": "1"})]):
            started = time.monotonic()
            result = ask(url, cache, "convert", "org/model", tmp_path / f"out{number}", **env)
            assert result["revision"] == hub.commit("org/model", "main")
            assert digests(tmp_path / f"out{number}") == digests(tmp_path / "online")
            assert f"those of commit {result['revision']} in its cache" in result["warnings"][-1]
            assert time.monotonic() - started < 60
        for url, env in [(nobody, {}), (hub.url, {"HF_HUB_OFFLINE": "1"})]:
            started = time.monotonic()
            answer = ask(url, tmp_path / "empty", "plan", "org/model", **env)
            assert answer["error"] == "SourceNotFoundError"
            assert "is not in the Hub's cache, and the Hub cannot be reached" in answer["message"]
            assert time.monotonic() - started < 60

    def test_the_commit_whose_headers_were_read_is_downloaded(
        self, hub: HubServer, folders: dict[str, Path], tmp_path: Path
    ) -> None:
        """Also where the branch moves on meanwhile."""
        hub.moves_to = "dev"
        result = ask(hub, tmp_path / "cache", "convert", "org/model", tmp_path / "out")
        assert result["revision"] == hub.commit("org/model", "main")
        by_mean(folders["main"], tmp_path / "expected", 4)
        assert digests(tmp_path / "out") == digests(tmp_path / "expected")

    def test_a_cache_that_holds_only_a_part(self, hub: HubServer, tmp_path: Path) -> None:
        ask(hub, tmp_path / "cache", "convert", "org/model", tmp_path / "out")
        next((tmp_path / "cache").rglob("snapshots/*/model-00002*")).unlink()
        answer = ask(hub, tmp_path / "cache", "plan", "org/model", HF_HUB_OFFLINE="1")
        assert answer["error"] == "CorruptCheckpointError"
        assert "model-00002-of-00003.safetensors is missing" in answer["message"]

    def test_what_cannot_be_converted_is_not_downloaded(self, hub: HubServer, tmp_path: Path) -> None:
        assert ask(hub, tmp_path, "convert", "org/quantised", tmp_path / "out")["error"] == "UnsupportedFormatError"
        assert ask(hub, tmp_path, "convert", "org/lying", tmp_path / "out")["error"] == "CorruptCheckpointError"
        assert sum(entry.nbytes for entry in hub.log) < 40_000


class TestErrors:
    @pytest.mark.parametrize(
        ("source", "revision", "words"),
        [
            ("org/nothing", "", "nor a Hub repository that you can access"),
            ("org/model", "no-such-branch", "no such revision"),
            (GATED, "", "hf auth login"),
            ("a/b/c", "", "nor a Hub id of the form org/name"),
            ("org/na me", "", "nor a Hub id of the form org/name"),
            ("../no/where", "", "nor a Hub id of the form org/name"),
        ],
    )
    @pytest.mark.parametrize("verb", ["plan", "convert"])
    def test_refusals_are_one_line(
        self, hub: HubServer, tmp_path: Path, verb: str, source: str, revision: str, words: str
    ) -> None:
        answer = ask(hub, tmp_path, verb, source, tmp_path / "out", revision)
        assert answer["error"] == "SourceNotFoundError"
        assert words in answer["message"]
        assert not (tmp_path / "out").exists()

    def test_a_server_in_trouble(self, hub: HubServer, tmp_path: Path) -> None:
        started = time.monotonic()
        answer = ask(hub, tmp_path, "plan", BROKEN)
        assert answer["error"] == "SourceNotFoundError"
        assert "500" in answer["message"]
        assert time.monotonic() - started < 60
