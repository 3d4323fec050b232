"""Checkpoints on the Hub, against a stand-in for it: what travels, what is kept, and what is said
when it goes wrong.
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

NOBODY = "http://127.0.0.1:9"
PLAN = "--dry-run"
FIRST_BYTES = 100_001
"""Of a weight file, which the client reads at once for its header."""


def large_arrays(seed: int = 0) -> Arrays:
    """Some 2 MB, so that headers are a small part of it."""
    return llama_arrays(hidden=1200, seed=seed)


def convert(
    url: str, cache: Path, source: str, *arguments: Path | str, words: str = "", **env: str
) -> Any:
    """What `convert --json` prints; where words are given, it must fail with an error that holds
    them.

    It runs in a process of its own, with a cache of its own: the Hub's client reads its settings
    when it is imported.
    """
    settings = {
        "HF_ENDPOINT": url,
        "HF_HOME": str(cache),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_OFFLINE": "0",
        "NO_PROXY": "*",
    }
    command = ["-m", "gqa_convert", "convert", source, *arguments]
    by_mean_in_json = ["--kv-heads", "4", "--method", "mean", "--json"]
    result = run_python(
        *command, *by_mean_in_json, environment=dict(os.environ) | settings | env, timeout=600
    )
    assert "it/s" not in result.stderr  # no progress bars where there is no terminal
    answer = json.loads(result.stdout)
    assert result.returncode == answer.get("exit_code", 0) == (2 if words else 0)
    assert words in answer.get("error", "")
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
    torch.save(
        {name: torch.from_numpy(array) for name, array in large_arrays().items()},
        old / "pytorch_model.bin",
    )
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


def test_only_headers_travel_for_a_plan(
    hub: HubServer, folders: dict[str, Path], tmp_path: Path
) -> None:
    hub.together = threading.Barrier(
        3, timeout=30
    )  # headers of three files, read one after another, never arrive
    plan = convert(hub.url, tmp_path, "org/model", PLAN)
    local = json.loads(json.dumps(make_plan(open_checkpoint(folders["main"]), 4).summary()))
    assert plan["revision"] == hub.commit("org/model", "main")
    assert {key: plan[key] for key in local} == local | {
        "source": "org/model",
        "revision": plan["revision"],
    }
    shards = sorted(folders["main"].glob("model-*"))
    assert len(shards) == 3
    for path in shards:
        assert hub.sent(path.name) == FIRST_BYTES
    read = {path.name for path in shards} | {"config.json", "model.safetensors.index.json", "model"}
    assert {entry.file for entry in hub.log if entry.nbytes} == read
    assert sum(entry.nbytes for entry in hub.log) < 3 * FIRST_BYTES + 20_000


def test_a_branch_a_commit_and_an_id_without_organisation(hub: HubServer, tmp_path: Path) -> None:
    commit = hub.commit("org/model", "dev")
    for revision in ("dev", commit):
        assert (
            convert(hub.url, tmp_path, "org/model", PLAN, "--revision", revision)["revision"]
            == commit
        )
    assert convert(hub.url, tmp_path, "gpt-like", PLAN)["revision"] == hub.commit(
        "gpt-like", "main"
    )


def test_bin_files_are_downloaded_for_a_plan(
    hub: HubServer, folders: dict[str, Path], tmp_path: Path
) -> None:
    """Their tensors cannot be listed otherwise."""
    assert convert(hub.url, tmp_path, "org/old", PLAN)["weights_format"] == "torch"
    assert hub.sent("pytorch_model.bin") == (folders["old"] / "pytorch_model.bin").stat().st_size


def test_only_what_is_needed_is_downloaded_at_the_commit_whose_headers_were_read(
    hub: HubServer, folders: dict[str, Path], tmp_path: Path
) -> None:
    """Also where the branch moves on meanwhile."""
    hub.moves_to = "dev"
    result = convert(hub.url, tmp_path / "cache", "org/model", tmp_path / "out")
    by_mean(folders["main"], tmp_path / "expected", 4)
    assert digests(tmp_path / "out") == digests(tmp_path / "expected")
    assert result["revision"] == hub.commit("org/model", "main")
    source = json.loads((tmp_path / "out" / "gqa_conversion.json").read_bytes())["source"]
    assert (source["id"], source["revision"]) == ("org/model", result["revision"])
    for name in (
        "pytorch_model.bin",
        "consolidated.safetensors",
        "stray[1].safetensors",
        "consolidated.00.pth",
    ):
        assert hub.sent(name) == 0
    assert (tmp_path / "out" / "sub" / "note.txt").read_text() == "carried"


def test_without_network_the_cache_serves(hub: HubServer, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    convert(hub.url, cache, "org/model", tmp_path / "online")
    for number, (url, env) in enumerate([(NOBODY, {}), (hub.url, {"HF_HUB_OFFLINE": "1"})]):
        started = time.monotonic()
        result = convert(url, cache, "org/model", tmp_path / f"out{number}", **env)
        assert result["revision"] == hub.commit("org/model", "main")
        assert digests(tmp_path / f"out{number}") == digests(tmp_path / "online")
        assert f"those of commit {result['revision']} in its cache" in result["warnings"][-1]
        assert time.monotonic() - started < 60
        started = time.monotonic()
        words = "is not a local folder, and the Hub did not provide it"
        convert(url, tmp_path / "empty", "org/model", PLAN, words=words, **env)
        assert time.monotonic() - started < 60
    next(cache.rglob("snapshots/*/model-00002*")).unlink()
    words = "model-00002-of-00003.safetensors is missing"
    convert(hub.url, cache, "org/model", PLAN, words=words, HF_HUB_OFFLINE="1")


def test_what_cannot_be_converted_is_not_downloaded(hub: HubServer, tmp_path: Path) -> None:
    convert(hub.url, tmp_path, "org/quantised", tmp_path / "out", words="quantised (awq)")
    convert(hub.url, tmp_path, "org/lying", tmp_path / "out", words="damaged header")
    assert sum(entry.nbytes for entry in hub.log) < 40_000


@pytest.mark.parametrize(
    ("source", "revision", "words"),
    [
        ("org/nothing", "main", "nor a Hub repository that you can access"),
        ("org/model", "no-such-branch", "no such revision"),
        (GATED, "main", "hf auth login"),
        ("a/b/c", "main", "nor a Hub id of the form org/name"),
        ("org/na me", "main", "nor a Hub id of the form org/name"),
        ("../no/where", "main", "nor a Hub id of the form org/name"),
        (BROKEN, "main", "500"),
    ],
)
def test_refusals_are_one_line(
    hub: HubServer, tmp_path: Path, source: str, revision: str, words: str
) -> None:
    started = time.monotonic()
    convert(hub.url, tmp_path, source, tmp_path / "out", "--revision", revision, words=words)
    assert not (tmp_path / "out").exists()
    assert time.monotonic() - started < 60
